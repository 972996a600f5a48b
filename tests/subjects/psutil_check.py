# SPDX-License-Identifier: Apache-2.0
"""What the process sees of itself stays true: psutil, /proc/self, pid, parent, children, times, memory."""

import os
import subprocess
import sys
import time

import psutil
from common import Digest, Steps, check, options


def facts() -> tuple:
    me = psutil.Process()
    return (
        os.getpid(),
        me.pid,
        me.ppid(),
        os.getppid(),
        os.getpgrp(),
        os.getsid(0),
        me.exe(),
        tuple(me.cmdline()),
    )


def main() -> None:
    o = options(__doc__)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    before, cpu = facts(), 0.0
    created = psutil.Process().create_time()
    boxes = []
    steps = Steps(o)
    for _ in steps:
        me = psutil.Process()
        check(facts() == before, f"{facts()} was {before}")
        with open("/proc/self/stat") as file:
            check(int(file.read().split()[0]) == os.getpid(), "/proc/self is another process")
        check(os.readlink("/proc/self") == str(os.getpid()), "/proc/self")
        check([c.pid for c in me.children()] == [child.pid], f"children {me.children()}")
        check(child.pid in psutil.pids() and me.parent() is not None, "the list of processes")
        check(psutil.Process(child.pid).ppid() == os.getpid(), "the child's parent")
        deadline = time.process_time() + 0.005
        while time.process_time() < deadline:
            pass
        boxes.append(bytearray(100_000))
        memory = me.memory_info().rss
        check(1 << 22 < memory < 1 << 36, f"memory {memory}")
        # A process that CRIU restored has a new start time, so a psutil.Process made before says that it has ended.
        check(me.num_threads() >= 1 and psutil.Process().is_running(), "threads")
        now = sum(me.cpu_times()[:2])
        # CRIU restores CPU times as those of a new process: they may begin again, but they have to go up.
        restarted = "again" if now < cpu else "on"
        cpu = now
        age = time.time() - me.create_time()
        steps.say(
            f"pid {os.getpid()} parent {os.getppid()} cpu {cpu:.2f} {restarted} age {age:.0f} first {created:.0f}"
        )
    child.stdin.close()
    check(child.wait() == 0, "the child's exit code")
    digest = Digest()
    digest.add("boxes", len(boxes))
    digest.finish()


if __name__ == "__main__":
    main()
