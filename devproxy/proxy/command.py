# SPDX-License-Identifier: Apache-2.0
"""The job's command: started beside us, given our signals, reaped, and its stragglers ended.

Who gets a signal. When our process group is the terminal's foreground group, the command shares it, so that the
terminal's own signals (Ctrl-C, Ctrl-Z, a resized window) reach the command by themselves: these carry SI_KERNEL and
are not passed on. Anywhere else the command gets a group of its own, and everything is passed on, so a signal sent to
our whole group (by `timeout`, say) arrives once. A signal that a shell sends to the shared group of a terminal
arrives twice: its sender cannot be told from one that meant us alone.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable

from devproxy import proctree
from devproxy.errors import CommandNotExecutable, CommandNotFound

TYPE_CHECKING = False  # typing itself costs every start 10 ms
if TYPE_CHECKING:
    from typing import Any

_SI_KERNEL = 0x80
_PR_SET_CHILD_SUBREAPER = 36
PASSED_ON = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        signal.SIGCONT,
    }
)
ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# What devproxy-init passes on to the command.
FORWARDED = PASSED_ON | {signal.SIGTSTP}
WATCHED = PASSED_ON | {signal.SIGTSTP, signal.SIGCHLD}
STRAGGLER_GRACE_S = 1.0
TERM_GRACE_S = 3.0


class Interrupted(Exception):
    """A signal asked us to end before the command ran."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def block_signals() -> set[int]:
    """From here on signals wait for us. Returns the old mask, which the command is started with."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED))


def check_interrupted() -> None:
    """While nothing runs yet: raises Interrupted when we were asked to end; drops the others."""
    while info := signal.sigtimedwait(WATCHED - {signal.SIGCHLD}, 0):
        if info.si_signo in ENDING:
            raise Interrupted(info.si_signo)


def become_subreaper() -> None:
    """Orphans of the command become our children, so that its tree can be seen and ended as one."""
    import ctypes  # 5 ms, while the servers start

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def find_program(name: str) -> str:
    """The path that a shell would execute. Raises CommandNotFound or CommandNotExecutable."""
    if "/" in name:
        candidates = [name]
    else:
        path = os.environ.get("PATH", os.defpath)
        candidates = [os.path.join(folder or ".", name) for folder in path.split(":")]
    seen = ""
    for candidate in candidates:
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            seen = seen or candidate
        elif "/" in name and os.path.isdir(candidate):
            raise CommandNotExecutable(f"{name}: is a directory", "give a program after --")
    if seen:
        raise CommandNotExecutable(
            f"{seen}: permission denied", f"make it executable: chmod +x {seen}"
        )
    raise CommandNotFound(
        f"{name}: command not found", "give a program after -- that is there, or in PATH"
    )


def in_foreground() -> bool:
    """Are we in the foreground group of a terminal?"""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)


class Command:
    """The running command. status is its exit code as a shell tells it, once it has ended."""

    def __init__(self, program: str, argv: list[str], env: dict[str, str], mask: set[int]) -> None:
        self.shares_group = in_foreground()
        self.started_at = time.monotonic()
        self.status: int | None = None
        self.pid = self._spawn(program, argv, env, mask)

    def _spawn(self, program: str, argv: list[str], env: dict[str, str], mask: set[int]) -> int:
        # Python ignores these two at its start; a command expects them as the system has them.
        default = [signal.SIGPIPE, signal.SIGXFSZ]
        group: dict[str, Any] = {} if self.shares_group else {"setpgroup": 0}
        try:
            return os.posix_spawn(program, argv, env, setsigmask=mask, setsigdef=default, **group)
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # a script without #!: a shell runs it itself
                return os.posix_spawn(
                    "/bin/sh",
                    ["sh", program, *argv[1:]],
                    env,
                    setsigmask=mask,
                    setsigdef=default,
                    **group,
                )
            if error.errno == errno.ENOENT:
                raise CommandNotFound(
                    f"{program}: its interpreter is not there", "see the first line of the file"
                ) from None
            raise CommandNotExecutable(f"{program}: {error.strerror}") from None

    def wait(self, tick: Callable[[], float | None], other_exit: Callable[[int, int], bool]) -> int:
        """Until the command has ended: passes signals on, reaps, calls tick when its last answer (seconds) is over.

        other_exit(pid, wait status) takes the end of a child that is not the command. Returns the exit code.
        """
        pause = tick()
        due = None if pause is None else time.monotonic() + pause
        while True:
            self._reap(other_exit)
            if self.status is not None:
                return self.status
            if due is None:
                self._on_signal(signal.sigwaitinfo(WATCHED))
                continue
            info = signal.sigtimedwait(WATCHED, max(0.0, due - time.monotonic()))
            if info is not None:
                self._on_signal(info)
            if time.monotonic() >= due:
                pause = tick()
                due = None if pause is None else time.monotonic() + pause

    def _on_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCHLD:
            return
        reached_it_already = self.shares_group and info.si_code == _SI_KERNEL
        if not reached_it_already:
            self._send(number)
        if number == signal.SIGTSTP:
            os.kill(
                os.getpid(), signal.SIGSTOP
            )  # as the shell around us expects; SIGCONT is passed on

    def _send(self, number: int) -> None:
        if self.status is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def _reap(self, other_exit: Callable[[int, int], bool]) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = shell_status(status)
            else:
                other_exit(pid, status)

    def end_stragglers(
        self, without: frozenset[int], other_exit: Callable[[int, int], bool]
    ) -> int:
        """What the command left running ends with it, as in a container. Returns how many had to be told.

        A second to go by themselves (loader workers that see their parent gone), then SIGTERM, then SIGKILL.
        """
        self._wait_for_none(without, STRAGGLER_GRACE_S, other_exit)
        told = set(proctree.descendants(os.getpid(), without))
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
            left = proctree.descendants(os.getpid(), without)
            if not left:
                break
            for pid in left:
                try:
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)
                except OSError:
                    pass
            self._wait_for_none(without, grace_s, other_exit)
        return len(told)

    def _wait_for_none(
        self, without: frozenset[int], timeout_s: float, other_exit: Callable[[int, int], bool]
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            # In this order: one that ends between the two would be left to somebody else to wait for.
            living = proctree.descendants(os.getpid(), without)
            self._reap(other_exit)
            if not living:
                return
            time.sleep(0.02)


def shell_status(wait_status: int) -> int:
    """0..255, or 128+N for signal N."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code
