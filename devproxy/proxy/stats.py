# SPDX-License-Identifier: Apache-2.0
"""Asks a device-proxy server for its statistics, over the socket that clients attach to."""

from __future__ import annotations

import json
import os
import socket
import struct

from devproxy import layout, proctree
from devproxy.errors import ServerStopped, ServerUnreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONGEST_ANSWER_BYTES = 16 << 20


def query(
    job_dir: str, gpu: int, abi_id: bytes = bytes(layout.ABI_BYTES), timeout_s: float = 2.0
) -> dict[str, Any]:
    """The server's statistics as docs/protocol.md gives them.

    Raises ServerUnreachable when nothing answers within timeout_s, or not with what was asked for; ServerStopped where
    a signal is the reason.
    """
    path = os.path.join(job_dir, f"gpu{gpu}.sock")
    request = struct.pack(
        layout.ATTACH_REQUEST,
        layout.ATTACH_MAGIC,
        layout.ATTACH_KIND_STATS,
        abi_id,
        os.getpid(),
        layout.ANY_SLOT,
    )
    server = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(path)
            server = proctree.listener(link)
            link.sendall(request)
            (size,) = struct.unpack("<I", _receive(link, 4))
            if size > LONGEST_ANSWER_BYTES:
                raise ServerUnreachable(f"the server of GPU {gpu} answers with {size} bytes")
            answer = json.loads(_receive(link, size))
    except (OSError, ValueError) as error:
        if server and proctree.stopped(server):
            raise ServerStopped(
                f"the server of GPU {gpu} {proctree.stopped_words(server)}"
            ) from None
        raise ServerUnreachable(
            f"the server of GPU {gpu} does not answer on {path} ({error})"
        ) from None
    if not isinstance(answer, dict):
        raise ServerUnreachable(f"the server of GPU {gpu} answers something else than statistics")
    return answer


def _receive(link: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        piece = link.recv(size - len(parts))
        if not piece:
            raise OSError("it closed the connection")
        parts += piece
    return bytes(parts)
