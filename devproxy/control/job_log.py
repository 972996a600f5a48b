# SPDX-License-Identifier: Apache-2.0
"""A job's log, read on while the job writes it: also into its next part (node/transcript.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from devproxy import state


def follow_log(job: str, offset: int, ended: threading.Event) -> Iterator[bytes]:
    """See coordinator_api.Coordinator."""
    path = state.log_path(job)
    if not os.path.exists(path):
        return
    log = open(path, "rb")  # noqa: SIM115  # closed where the next part takes its place
    try:
        log.seek(offset)
        over = False
        while True:
            replaced = _is_replaced(log.fileno(), path)
            piece = log.read(1 << 16)
            if piece:
                yield piece
            elif replaced:  # it was long (node/transcript.py), and all of it is read
                log.close()
                log = open(path, "rb")  # noqa: SIM115
            elif over:
                return
            else:
                over = ended.wait(0.1)  # what was written until then is still read
                yield b""  # a reader that went away is noticed
    finally:
        log.close()


def _is_replaced(fd: int, path: str) -> bool:
    try:
        return not os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False  # between two parts
