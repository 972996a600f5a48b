# SPDX-License-Identifier: Apache-2.0
"""What happens after a kill -9 of devproxy-run: the job must not run on unwatched, and nothing may stay behind.

The janitor is a fork of devproxy-run in a session of its own. It sleeps on a pipe whose other end only devproxy-run
holds. A last message on the pipe means a normal end; end-of-file without it means that devproxy-run was killed: then the
janitor kills the command's process tree, waits for the servers (their lease has ended too) and removes the job's folder.
"""

from __future__ import annotations

import os
import signal
import struct
import time

from devproxy import config, proctree, runtime

PASSES = 100
NORMAL_END = b"done"  # four bytes, as a process id has; no id is that large
END_S = 5.0


def _ends(pid: int, within_s: float) -> bool:
    """Reaps our child. Raises ChildProcessError where another has done so."""
    until = time.monotonic() + within_s
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


class Janitor:
    """devproxy-run's side."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    def watch(self, command_pid: int) -> None:
        """Names the command, the root of the tree to kill. Precondition: it has not been reaped yet."""
        self._write(struct.pack("<I", command_pid))

    def dismiss(self) -> None:
        """The normal end: it goes without doing anything. May be called twice."""
        if self._pipe < 0:
            return
        self._write(NORMAL_END)
        os.close(self._pipe)
        self._pipe = -1
        try:
            if not _ends(self.pid, END_S):  # a signal has stopped it; it has nothing left to do
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        except (ChildProcessError, ProcessLookupError):
            pass

    def _write(self, message: bytes) -> None:
        try:
            os.write(self._pipe, message)
        except BrokenPipeError:
            pass  # somebody killed it: then only the next start sweeps


def start(job: runtime.JobFolder, job_id: str) -> Janitor:
    """Forks it. job_id: the mark in the environment of the job's processes; empty after a restore, where the tree's
    environment may be another living job's. Precondition: this process has one thread."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read_fd)
        return Janitor(pid, write_fd)
    status = 0
    try:
        _detach(keep=read_fd)
        _serve(job, job_id, read_fd)
    except BaseException:  # a fork must never return into devproxy-run's own code
        status = 1
    os._exit(status)


def _serve(job: runtime.JobFolder, job_id: str, pipe: int) -> None:
    command: tuple[int, int | None] | None = None
    while message := os.read(pipe, 4):
        if message == NORMAL_END:
            return
        (pid,) = struct.unpack("<I", message)
        command = (pid, _pidfd(pid))
    if command:
        _kill_tree(*command)
    if job_id:
        _kill_marked(job_id)
    runtime.wait_until_dead(job.path)
    runtime.sweep()


def _detach(keep: int) -> None:
    """A session of its own, no descriptor of devproxy-run's (not its lease, not its lock, not its stdout)."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        if int(name) != keep:
            try:
                os.close(int(name))
            except OSError:
                pass
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd not in (null, keep):
            os.dup2(null, fd)
    _take_name("devproxy-janitor")


def _take_name(name: str) -> None:
    """For `ps`: a second devproxy-run with the same arguments would look like a second job. Failing is harmless."""
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write(name[:15])
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
        start, end = int(fields[45]), int(fields[46])  # proc(5): arg_start, arg_end
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(name.encode()[: end - start].ljust(end - start, b"\0"))
    except (OSError, ValueError, IndexError):
        pass


def _kill_tree(root_pid: int, root: int | None) -> None:
    """From the top, so that nobody starts another child meanwhile. Handles, not numbers: those are used again."""
    below = [_pidfd(pid) for pid in proctree.descendants(root_pid)] if root is not None else []
    for handle in (root, *below):
        if handle is not None:
            _kill(handle)


def _kill_marked(job_id: str) -> None:
    """Whoever has the job's id in its environment: what left the tree, and what we were not told of in time.

    devproxy-run can be killed between the command's start and its message to us.
    """
    mark = f"{config.JOB_ID}={job_id}\0".encode()
    for _ in range(PASSES):
        handles = [_pidfd(pid) for pid in proctree.with_environment(mark)]
        for handle in handles:
            if handle is not None:
                _kill(handle)
                os.close(handle)
        if not handles:
            return
        time.sleep(0.01)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass
