# SPDX-License-Identifier: Apache-2.0
"""The file of `devproxy trace`, read by Perfetto's own reader of its format; and the shares of `devproxy explain`."""

from __future__ import annotations

import io
import re
import runpy
import struct
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from devproxy.cli import trace
from devproxy.cli.perfetto import Writer
from devproxy.node import history
from devproxy.node.history import History, Span
from devproxy.proxy import tracing
from devproxy.proxy.tracing import Event, OfClient
from tests.trace_processor import ask

HEADER = Path(__file__).resolve().parents[2] / "devproxy/csrc/server/trace.h"
LAUNCH, CALL, STEP, ROOM = tracing.KINDS.index("launch"), tracing.CALL, tracing.STEP, tracing.ROOM


def test_the_kinds_are_the_servers() -> None:
    (text,) = re.findall(r"enum class Kind : uint8_t \{([^}]*)\}", HEADER.read_text())
    names = [re.sub(r"(?<!^)([A-Z])", r" \1", n.strip()[1:]).lower() for n in text.split(",")]
    assert tuple(names) == tracing.KINDS


def test_events_as_the_server_sends_them() -> None:
    data = struct.pack("<QQQQIHBB", 1, 2, 3, 4, 1, 5, LAUNCH, 0)
    assert list(tracing._events(data, ["", "add"])) == [Event(1, 2, 3, 4, "add", 5, LAUNCH)]


def test_a_profile_in_a_job_reads_the_same_events() -> None:
    """It cannot import devproxy."""
    path = HEADER.parents[2] / "torch/pylib/devproxy_torch/servers_record.py"
    record = runpy.run_path(str(path))["ServersRecord"]
    assert record.EVENT == tracing._EVENT.format
    shown = {tracing.KINDS[number]: said for number, said in record.KINDS.items()}
    assert shown == {
        "copy": "gpu_memcpy",
        "memset": "gpu_memset",
        "launch": "kernel",
        "communicate": "kernel",
    }


def test_perfetto_reads_it() -> None:
    """The format by Perfetto's own types, what it says by Perfetto's trace processor."""
    client = OfClient(1, 77, 0, 3)
    client.events = [
        Event(10, 20, 30, 0, "add", 2, LAUNCH),
        Event(10, 10, 20, 64, "", 2, tracing.KINDS.index("copy")),
        Event(12, 12, 31, 0, "STREAM_QUERY", 4, CALL),
        Event(5, 5, 40, 0, "step", 0, STEP),
        Event(41, 41, 44, 0, "cut", 0, tracing.CUT),
    ]
    spans = [
        Span("stage", "device", 4, 6),
        Span("stage", "host", 5, 7),  # beside it
        Span("verb", "checkpoint", 2, 9),
        Span("phase", "running", 1, 3),
        Span("phase", "cutting", 3, 8),
    ]
    file = io.BytesIO()
    assert trace._write(Writer(file), "j", [client], spans) == 10
    read = perfetto_trace_pb2.Trace.FromString(file.getvalue())
    assert all(p.trusted_packet_sequence_id for p in read.packet)
    on_tracks, facts, processes = ask(
        file.getvalue(),
        """select coalesce(process.name, '') as process, process.pid, track.name as track, category,
        slice.name, ts, dur, depth from slice join track on slice.track_id = track.id
        left join process_track on process_track.id = track.id left join process using (upid) order by ts, dur""",
        """select slice.name, key, int_value as value from slice join args using (arg_set_id)
        where key glob 'debug.*' order by slice.name, key""",
        "select pid, name from process where pid > 0",
    )
    assert processes == [{"pid": 77, "name": "rank 3, process 77, GPU 1"}]
    assert [tuple(row.values())[2:] for row in on_tracks] == [
        ("job j: phase", "phase", "running", 1, 2, 0),
        ("job j: verb", "verb", "checkpoint", 2, 7, 0),
        ("job j: phase", "phase", "cutting", 3, 5, 0),
        ("job j: stage device", "stage", "device", 4, 2, 0),
        ("job j: stage host", "stage", "host", 5, 2, 0),
        ("steps", "step", "step", 5, 35, 0),
        ("stream 2", "copy", "copy", 10, 10, 0),
        ("thread 4: calls that wait", "call", "STREAM_QUERY", 12, 19, 0),
        ("stream 2", "launch", "add", 20, 10, 0),
        ("cuts", "cut", "cut", 41, 3, 0),
    ]
    assert all((row["process"] == "") == row["track"].startswith("job j") for row in on_tracks)
    assert [tuple(row.values()) for row in facts] == [
        ("add", "debug.queued_ns", 10),
        ("copy", "debug.bytes", 64),
        ("copy", "debug.queued_ns", 0),
    ]


def test_what_perfetto_makes_of_mistakes() -> None:
    """It complains of little: a slice without an end has none, one that overlaps another is taken for its child."""
    file = io.BytesIO()
    writer = Writer(file)
    writer.slice(writer.track("a"), "phase", "ends before it begins", 20, 10)
    track = writer.track("b")
    writer.slice(track, "phase", "one", 10, 20)
    writer.slice(track, "phase", "other", 15, 25)
    writer.flush()
    (found,) = ask(file.getvalue(), "select name, dur, depth from slice order by name")
    assert [tuple(row.values()) for row in found] == [
        ("ends before it begins", -1, 0),
        ("one", 15, 0),
        ("other", 5, 1),
    ]
    with pytest.raises(AssertionError, match="Unknown trace type"):
        ask(b"this is no trace", "select * from slice")
    with pytest.raises(AssertionError, match="no such table"):
        ask(b"", "select * from no_such_thing")


def test_what_is_under_way_and_what_has_ended() -> None:
    kept = History()
    with kept.during("verb", "checkpoint"):
        with kept.during("stage", "device"):
            pass
        device, verb = kept.since(0)
        assert (device.name, verb.name) == ("device", "checkpoint")
        assert verb.begin_ns <= device.begin_ns <= device.end_ns <= verb.end_ns
        assert kept.since(device.end_ns + 1)[0].name == "checkpoint"
    (ended,) = kept.since(verb.end_ns)
    assert ended.begin_ns == verb.begin_ns
    assert kept.since(ended.end_ns + 1) == []
    for number in range(2 * history.MOST):
        with kept.during("stage", str(number)):
            pass
    assert len(kept.since(0)) == history.MOST


def test_shares_add_up() -> None:
    client = OfClient(0, 1, 0, None)
    s = 10**9
    client.events = [
        Event(0, 0, 3 * s, 0, "", 1, LAUNCH),
        Event(0, 2 * s, 4 * s, 0, "", 2, LAUNCH),
        Event(0, 3 * s, 6 * s, 0, "", 0, CALL),
        Event(0, 3 * s, 5 * s, 0, "", 1, ROOM),
    ]
    (found,) = trace.shares([client], 10.0)
    assert (found["kernel"], found["ring"], found["wait"], found["client"]) == (0.4, 0.1, 0.1, 0.4)
