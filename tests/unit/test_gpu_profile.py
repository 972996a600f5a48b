# SPDX-License-Identifier: Apache-2.0
"""gpucheck/profile.py: a sampling profile of another process, where the kernel allows one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from gpucheck import profile

BUSY = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("begun", flush=True)
while True: sum(range(2000))
"""


def allowed() -> bool:
    try:
        profile.Thread(os.getpid(), threading.get_native_id()).close()
    except OSError:
        return False
    return True


def test_a_busy_thread_is_seen_and_a_sleeping_one_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout and busy.stdout.readline() == b"begun\n"
            found = profile.profile([busy.pid], 0.6)
        finally:
            busy.kill()
    if not allowed():
        assert found == {}
        return
    assert len(found) == 1, found
    (one,) = found.values()
    assert 0.05 < one["busy"] <= 1.1
    assert sum(one["libraries_%"].values()) > 95
    assert any("python" in name for name in one["libraries_%"]), one


def test_addresses_are_told_by_the_files_that_they_lie_in() -> None:
    maps = [(0x1000, 0x3000, 0x400, "a.so"), (0x5000, 0x6000, 0, "b.so")]
    assert profile.place(maps, 0x1010) == ("a.so", 0x410)
    assert profile.place(maps, 0x5FFF) == ("b.so", 0xFFF)
    assert profile.place(maps, 0x4000) == ("elsewhere", 0x4000)
    assert any("libc" in name for _, _, _, name in profile.executable_maps(os.getpid()))
