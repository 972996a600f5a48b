# SPDX-License-Identifier: Apache-2.0
"""The file of `devproxy trace`, read by Perfetto's own reader of its format; and the shares of `devproxy explain`."""

from __future__ import annotations

import io
import re
import struct
from pathlib import Path

from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from devproxy.cli import trace
from devproxy.cli.perfetto import Writer
from devproxy.proxy import tracing
from devproxy.proxy.tracing import Event, OfClient

HEADER = Path(__file__).resolve().parents[2] / "devproxy/csrc/server/trace.h"
LAUNCH, CALL, STEP = tracing.KINDS.index("launch"), tracing.CALL, tracing.STEP


def test_the_kinds_are_the_servers() -> None:
    (text,) = re.findall(r"enum class Kind : uint8_t \{([^}]*)\}", HEADER.read_text())
    names = [re.sub(r"(?<!^)([A-Z])", r" \1", n.strip()[1:]).lower() for n in text.split(",")]
    assert tuple(names) == tracing.KINDS


def test_events_as_the_server_sends_them() -> None:
    data = struct.pack("<QQQQIHBB", 1, 2, 3, 4, 1, 5, LAUNCH, 0)
    assert list(tracing._events(data, ["", "add"])) == [Event(1, 2, 3, 4, "add", 5, LAUNCH)]


def test_perfetto_reads_it() -> None:
    client = OfClient(1, 77, 0, 3)
    client.events = [
        Event(10, 20, 30, 0, "add", 2, LAUNCH),
        Event(10, 10, 20, 64, "", 2, tracing.KINDS.index("copy")),
        Event(12, 12, 31, 0, "STREAM_QUERY", 4, CALL),
        Event(5, 5, 40, 0, "step", 0, STEP),
    ]
    file = io.BytesIO()
    count = trace._write(Writer(file), "j", [client], [("running", 1, 50)])
    assert count == 5
    read = perfetto_trace_pb2.Trace.FromString(file.getvalue())
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in read.packet
        if p.HasField("track_descriptor")
    }
    names = {t.name for t in tracks.values() if t.name}
    assert names == {"job j: phase", "stream 2", "thread 4: calls that wait", "steps"}
    (process,) = [t for t in tracks.values() if t.HasField("process")]
    assert process.process.pid == 77
    assert process.process.process_name == "rank 3, process 77, GPU 1"
    assert all(t.parent_uuid == process.uuid for t in tracks.values() if t.name.startswith("stream"))  # fmt: skip
    assert all(p.trusted_packet_sequence_id for p in read.packet)
    begun: dict[int, list[tuple[str, int]]] = {}
    slices = []
    for packet in read.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        if event.type == event.TYPE_SLICE_BEGIN:
            begun.setdefault(event.track_uuid, []).append((event.name, packet.timestamp))
            if event.name == "copy":
                facts = {a.name: a.uint_value for a in event.debug_annotations}
                assert facts == {"bytes": 64, "queued_ns": 0}
        else:
            assert event.type == event.TYPE_SLICE_END
            name, since = begun[event.track_uuid].pop()
            slices.append((tracks[event.track_uuid].name, name, since, packet.timestamp))
    assert not any(begun.values())
    assert sorted(slices) == [
        ("job j: phase", "running", 1, 50),
        ("steps", "step", 5, 40),
        ("stream 2", "add", 20, 30),
        ("stream 2", "copy", 10, 20),
        ("thread 4: calls that wait", "STREAM_QUERY", 12, 31),
    ]


def test_shares_add_up() -> None:
    client = OfClient(0, 1, 0, None)
    s = 10**9
    client.events = [
        Event(0, 0, 3 * s, 0, "", 1, LAUNCH),
        Event(0, 2 * s, 4 * s, 0, "", 2, LAUNCH),
        Event(0, 3 * s, 6 * s, 0, "", 0, CALL),
    ]
    (found,) = trace.shares([client], 10.0)
    assert (found["kernel"], found["wait"], found["client"]) == (0.4, 0.2, 0.4)
