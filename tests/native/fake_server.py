#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands in for devproxy-server in the supervisor's unit tests. FAKE_SERVER says how it behaves.

ready (default), error, die, silent, crash:<seconds>, crash-slowly:<seconds>, other-abi
"""

import json
import os
import select
import socket
import struct
import sys
import time

ABI = os.environ.get("FAKE_SERVER_ABI", "00" * 32)


def main() -> int:
    how = os.environ.get("FAKE_SERVER", "ready")
    if "--print-abi" in sys.argv:
        print("ff" * 32 if how == "other-abi" else ABI)
        return 0
    words = [
        word
        for word in sys.argv[1:]
        if word not in ("--metas", "--collectives", "--together", "--encrypt-data")
    ]  # without values
    option = dict(zip(words[::2], words[1::2]))
    ready, lease = int(option["--ready-fd"]), int(option["--lease-fd"])
    print("fake server starts", file=sys.stderr, flush=True)
    if how == "error":
        os.write(ready, b"error: no device memory on GPU 0\n")
        return 2
    if how == "die":
        print("fatal: something broke", file=sys.stderr, flush=True)
        return 7
    path = os.path.join(option["--job-dir"], f"gpu{option['--gpu']}.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    if how != "silent":
        os.write(ready, b"ready\n")
    deadline = time.monotonic() + float(how.split(":")[1]) if how.startswith("crash") else None
    while True:
        left = 60.0 if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([listener, lease], [], [], left)
        if deadline is not None and time.monotonic() >= deadline:
            print("fatal: crashed as told", file=sys.stderr, flush=True)
            if how.startswith(
                "crash-slowly"
            ):  # the job can tell, and its end is noticed before ours
                os.unlink(path)
                time.sleep(0.5)
            os.abort()
        if lease in readable:
            os.unlink(path)
            return 0
        if listener in readable:
            link, _ = listener.accept()
            link.recv(4096)
            stats = {
                "job": option["--job"],
                "gpu": int(option["--gpu"]),
                "pid": os.getpid(),
                "device": "soft",
                "name": "fake GPU",
                "uptime_s": 1.0,
                "chaos": "--chaos" in option,
                "memory": {"total": int(option["--gpu-memory"]), "used": 0, "peak": 1 << 20},
                "clients_now": 0,
                "totals": {
                    "calls": 5,
                    "launches": 3,
                    "h2d_bytes": 10,
                    "d2h_bytes": 4,
                    "busy_us": 9,
                },
                "clients": [],
                "sticky": "",
            }
            text = json.dumps(stats).encode()
            link.sendall(struct.pack("<I", len(text)) + text)
            link.close()


if __name__ == "__main__":
    sys.exit(main())
