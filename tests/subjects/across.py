# SPDX-License-Identifier: Apache-2.0
"""Two trees of one job, and what is on its way between them: each sends the other megabytes before it reads anything.

The connection is made once, at the start. Every step sends blocks whose sizes are drawn from the step's number; both
sides hash all that they get. Each tree says its own steps and digest.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time

import common
import numpy as np

PORT = 5000
BUFFER_BYTES = 16 << 20


def connect() -> socket.socket:
    """The first node listens."""
    master, node = os.environ["DEVPROXY_MASTER_ADDRESS"], int(os.environ["DEVPROXY_NODE"])
    while True:
        one = socket.socket()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        try:
            if node:
                one.connect((master, PORT))
                return one
            one.bind((master, PORT))
            one.listen()
            return one.accept()[0]
        except ConnectionRefusedError:
            time.sleep(0.1)


def block(step: int, node: int) -> bytes:
    dice = np.random.default_rng((step, node))
    return dice.bytes(int(dice.integers(1, 3 << 20)) + (10 << 20) * (step % 10 == 0))


def take(one: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = one.recv(min(size, 1 << 18))
        if not part:
            raise SystemExit("the other tree has hung up")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    parsed = common.options(__doc__ or "")
    node, steps = int(os.environ["DEVPROXY_NODE"]), common.Steps(parsed)
    one, history = connect(), hashlib.blake2b(digest_size=16)
    for step in steps:
        sender = threading.Thread(target=one.sendall, args=(block(step, node),))
        sender.start()
        time.sleep(0.02)  # meanwhile it is on its way
        expected = block(step, 1 - node)
        got = take(one, len(expected))
        assert got == expected
        history.update(got)
        sender.join()
        steps.say(f"{len(got)}")
    print(f"{common.NONCE} digest {history.hexdigest()}", flush=True)
    print(f"{common.NONCE} done", flush=True)


if __name__ == "__main__":
    main()
