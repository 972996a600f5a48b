# SPDX-License-Identifier: Apache-2.0
"""Asks a device-proxy server for its statistics, over the socket that clients attach to."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import contextmanager

from devproxy import layout, proctree
from devproxy.errors import ServerStopped, ServerUnreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LONGEST_ANSWER_BYTES = 512 << 20  # of a trace: 2.6 MB for each client


def query(
    job_dir: str, gpu: int, abi_id: bytes = bytes(layout.ABI_BYTES), timeout_s: float = 2.0
) -> dict[str, Any]:
    """The server's statistics as docs/protocol.md gives them.

    Raises ServerUnreachable when nothing answers within timeout_s, or not with what was asked for; ServerStopped where
    a signal is the reason.
    """
    with _asked(job_dir, gpu, layout.ATTACH_KIND_STATS, abi_id, timeout_s) as link:
        answer = json.loads(_answer(link, gpu))
    if not isinstance(answer, dict):
        raise ServerUnreachable(f"the server of GPU {gpu} answers something else than statistics")
    return answer


def trace(
    job_dir: str, gpu: int, abi_id: bytes = bytes(layout.ABI_BYTES), timeout_s: float = 5.0
) -> tuple[dict[str, Any], bytes]:
    """What the streams of the server's clients have done since the last call, and makes the server go on noting it for five
    seconds (csrc/server/trace.h). (facts, events behind one another, client after client)

    Raises as query() does; also for a server that is too old to be asked this.
    """
    with _asked(job_dir, gpu, layout.ATTACH_KIND_TRACE, abi_id, timeout_s) as link:
        facts = json.loads(_answer(link, gpu))
        events = _answer(link, gpu)
    if not isinstance(facts, dict):
        raise ServerUnreachable(f"the server of GPU {gpu} answers something else than a trace")
    return facts, events


@contextmanager
def _asked(
    job_dir: str, gpu: int, kind: int, abi_id: bytes, timeout_s: float
) -> Iterator[socket.socket]:
    path = os.path.join(job_dir, f"gpu{gpu}.sock")
    request = struct.pack(
        layout.ATTACH_REQUEST, layout.ATTACH_MAGIC, kind, abi_id, os.getpid(), layout.ANY_SLOT
    )
    server = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(path)
            server = proctree.listener(link)
            link.sendall(request)
            yield link
    except (OSError, ValueError) as error:
        if server and proctree.stopped(server):
            raise ServerStopped(
                f"the server of GPU {gpu} {proctree.stopped_words(server)}"
            ) from None
        raise ServerUnreachable(
            f"the server of GPU {gpu} does not answer on {path} ({error})"
        ) from None


def _answer(link: socket.socket, gpu: int) -> bytes:
    (size,) = struct.unpack("<I", _receive(link, 4))
    if size > LONGEST_ANSWER_BYTES:
        raise ServerUnreachable(f"the server of GPU {gpu} answers with {size} bytes")
    return _receive(link, size)


def _receive(link: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        piece = link.recv(size - len(parts))
        if not piece:
            raise OSError("it closed the connection")
        parts += piece
    return bytes(parts)
