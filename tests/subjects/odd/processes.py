# SPDX-License-Identifier: Apache-2.0
"""Traits of processes and how they are related."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.subjects.odd.shared import (
    PAGE,
    PATIENCE_S,
    Child,
    Look,
    call,
    flow,
    fork,
    here,
    libc,
    mapped,
    same,
    sleep_for_ever,
    status,
    trait,
    wait_for,
)


@trait()
def stopped_child(dice: random.Random) -> Look:
    """A stopped child, one that was stopped and nobody knows yet, and one that goes on at times."""
    silent, known, moves = (fork(sleep_for_ever) for _ in range(3))
    for pid in (silent, known):
        os.kill(pid, signal.SIGSTOP)
    os.waitpid(known, os.WUNTRACED)
    while True:
        step = yield None
        wait_for(lambda: status(silent, "State")[0] == "T", "a stopped child")
        same("a stopped child", status(known, "State")[0], "T")
        os.kill(moves, signal.SIGSTOP)
        _, how = os.waitpid(moves, os.WUNTRACED)
        same("stopped", os.WIFSTOPPED(how), True)
        os.kill(moves, signal.SIGCONT)
        _, how = os.waitpid(moves, os.WCONTINUED)
        same("continued", os.WIFCONTINUED(how), True)
        if step % 5 == 0:
            os.kill(known, signal.SIGCONT)
            os.waitpid(known, os.WCONTINUED)
            os.kill(known, signal.SIGSTOP)
            os.waitpid(known, os.WUNTRACED)


@trait()
def zombies(dice: random.Random) -> Look:
    """Children that have ended, by themselves and by signals, and that nobody has waited for."""

    def make(code: int) -> int:
        if code >= 0:
            return fork(lambda: os._exit(code))
        pid = fork(sleep_for_ever)
        os.kill(pid, -code)
        return pid

    codes = [dice.choice([0, 1, 77, 255, -9, -15]) for _ in range(4)]
    waiting = [(make(code), code) for code in codes]
    value: object = None
    while True:
        yield value
        pid, code = waiting.pop(0)
        _, how = os.waitpid(pid, 0)
        same("how a zombie ended", os.waitstatus_to_exitcode(how), value := code)
        code = dice.choice([0, 3, -9])
        waiting.append((make(code), code))


def _forks_and_ends(work: Callable[[], object]) -> tuple[int, int]:
    """A child that forks and ends; its number, and that of its child."""
    r, w = os.pipe()

    def parent() -> None:
        os.write(w, str(fork(work)).encode())

    pid = fork(parent)
    grandchild = int(os.read(r, 99))
    os.close(r)
    os.close(w)
    return pid, grandchild


@trait()
def orphan(dice: random.Random) -> Look:
    """A process whose parent has ended, that still talks."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.settimeout(PATIENCE_S)

    def work() -> None:
        while True:
            b.send(b.recv(99) + b" " + str(os.getppid()).encode())

    pid, grandchild = _forks_and_ends(work)
    os.waitpid(pid, 0)
    # Init, or this process where it is a subreaper too.
    wait_for(lambda: status(grandchild, "PPid") != str(pid), "another parent")
    parent = status(grandchild, "PPid").encode()
    while True:
        step = yield None
        a.send(b"%d" % step)
        same("the orphan", a.recv(99), b"%d " % step + parent)


@trait()
def subreaper(dice: random.Random) -> Look:
    """This process adopts orphans."""
    call("prctl", 36, 1, 0, 0, 0)
    pid, grandchild = _forks_and_ends(sleep_for_ever)
    os.waitpid(pid, 0)
    is_one = ctypes.c_int()
    while True:
        yield None
        call("prctl", 37, ctypes.byref(is_one), 0, 0, 0)
        same("a subreaper", is_one.value, 1)
        same("parent of the orphan", status(grandchild, "PPid"), str(os.getpid()))
        pid, fresh = _forks_and_ends(lambda: 0)
        os.waitpid(pid, 0)
        os.waitpid(fresh, 0)


@trait()
def sessions(dice: random.Random) -> Look:
    """Sessions and groups of children, with and without their leaders."""
    a, b = os.pipe()

    def leader(ends: bool) -> Callable[[], object]:
        def work() -> None:
            os.setsid()
            member, apart = fork(sleep_for_ever), fork(sleep_for_ever)
            os.setpgid(apart, apart)
            os.write(b, f"{member} {apart}\n".encode())
            if not ends:
                sleep_for_ever()

        return work

    pids = []
    for ends in (False, True):
        pids.append(first := fork(leader(ends)))
        pids += map(int, os.read(a, 99).split())
        if ends:
            os.waitpid(first, 0)
            pids.remove(first)
    group = fork(sleep_for_ever)
    os.setpgid(group, group)
    member = fork(sleep_for_ever)
    os.setpgid(member, group)
    os.kill(group, signal.SIGKILL)
    os.waitpid(group, 0)
    pids.append(member)
    wanted = [(os.getsid(pid), os.getpgid(pid)) for pid in pids]
    while True:
        yield None
        same("sessions and groups", [(os.getsid(pid), os.getpgid(pid)) for pid in pids], wanted)


@trait()
def process_settings(dice: random.Random) -> Look:
    """What a child has of its own: name, death signal, flags of prctl, limits of its memory's dumps."""

    def get(option: int) -> int:
        value = ctypes.c_int()
        call("prctl", option, ctypes.byref(value), 0, 0, 0)
        return value.value

    def first() -> None:
        call("prctl", 15, b"odd \xff) name", 0, 0, 0)
        call("prctl", 1, int(signal.SIGUSR2), 0, 0, 0)
        call("prctl", 41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
        call("prctl", 8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
        call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        call("prctl", 29, 77_777, 0, 0, 0)  # PR_SET_TIMERSLACK
        Path("/proc/self/oom_score_adj").write_text("500")

    def look(word: str) -> object:
        name = ctypes.create_string_buffer(16)
        call("prctl", 16, name, 0, 0, 0)
        plain = [libc.prctl(option, 0, 0, 0, 0) for option in (3, 7, 21, 30, 39, 42)]
        return name.value, get(2), plain, Path("/proc/self/oom_score_adj").read_text()

    child = Child(look, first)
    wanted = child.ask()
    while True:
        yield wanted
        same("settings of a child", child.ask(), wanted)


@trait()
def undumpable(dice: random.Random) -> Look:
    """A child that allows no core dumps of itself, and so belongs to root in /proc."""
    child = Child(lambda word: libc.prctl(3, 0, 0, 0, 0), lambda: libc.prctl(4, 0, 0, 0, 0))
    while True:
        yield None
        same("dumpable", child.ask(), 0)


@trait()
def scheduling(dice: random.Random) -> Look:
    """Nice values, policies and CPUs of a child and of a thread, each its own."""
    cpus = sorted(os.sched_getaffinity(0))

    def look(word: str = "") -> object:
        policy = os.sched_getscheduler(0)
        slack = libc.prctl(30, 0, 0, 0, 0)
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return nice, policy, sorted(os.sched_getaffinity(0)), slack

    def first() -> None:
        os.nice(7)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setaffinity(0, {cpus[-1]})

    child = Child(look, first)
    asked, found = threading.Semaphore(0), []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 11)
        os.sched_setaffinity(0, {cpus[0]})
        call("prctl", 29, 222_222, 0, 0, 0)
        while True:
            found.append(look())
            asked.acquire()

    threading.Thread(target=work, daemon=True).start()
    wait_for(lambda: found, "a thread")
    wanted = (child.ask(), found.pop(), look())
    while True:
        yield None
        asked.release()
        wait_for(lambda: found, "a thread")
        same("scheduling", (child.ask(), found.pop(), look()), wanted)


@trait()
def limits(dice: random.Random) -> Look:
    """Resource limits, soft and hard, of this process and of a child."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]

    def look(word: str = "") -> object:
        return [resource.getrlimit(getattr(resource, name)) for name in names]

    def first() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 31))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 4096))
        resource.setrlimit(resource.RLIMIT_NOFILE, (90, 2000))
        resource.setrlimit(resource.RLIMIT_CPU, (5000, 6000))

    child = Child(look, first)
    resource.setrlimit(resource.RLIMIT_CORE, (512, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(resource.RLIMIT_RTTIME, (100_000, 200_000))
    wanted = (child.ask(), look())
    while True:
        yield None
        same("limits", (child.ask(), look()), wanted)


@trait()
def umask(dice: random.Random) -> Look:
    """A child with an odd umask that makes files."""

    def make(word: str) -> object:
        path = here(f"mask-{word}")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o777))
        return os.stat(path).st_mode & 0o7777

    child = Child(make, lambda: os.umask(0o137))
    while True:
        step = yield None
        same("mode", child.ask(str(step % 3)), 0o777 & ~0o137)
        if step % 3 == 2:
            os.unlink(here(f"mask-{step % 3}"))


@trait()
def odd_folder(dice: random.Random) -> Look:
    """Children whose working folder is deleted, in /proc, or has a name that is no UTF-8."""
    odd = here("folder ") + b"\xff\n\xe9"
    for path in (odd, here("doomed"), here("tmp")):
        os.mkdir(path)
    paths = (odd, here("doomed"), b"/proc/self/task", b"/dev/shm")
    children = [Child(lambda word: os.readlink(b"/proc/self/cwd"), lambda p=p: os.chdir(p)) for p in paths]  # type: ignore[misc]  # fmt: skip
    os.rmdir(here("doomed"))
    wanted = [child.ask() for child in children]
    while True:
        yield None
        same("working folders", [child.ask() for child in children], wanted)


@trait()
def odd_command(dice: random.Random) -> Look:
    """A child with a long environment, odd arguments, and a name that looks like something else."""
    words = [b"odd (name) \xff", b"", b"-c", b"\n", b"x" * 5000]
    env = {b"ODD\xff": b"\xe9=\n", b"LONG": b"y" * 100_000, b"EMPTY": b""}
    env |= {key: value for key, value in os.environb.items() if key.startswith(b"DEVPROXY_")}
    script = b"while true; do sleep 100; done"
    pid = fork(lambda: os.execve("/bin/sh", [words[0], b"-c", script, *words], env))
    wait_for(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(words[0]), "the child")
    files = [Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ")]
    wanted = [file.read_bytes() for file in files]
    same("environment", len(wanted[1]) > 100_000, True)
    while True:
        yield None
        same("arguments and environment", [file.read_bytes() for file in files], wanted)


@trait()
def execs_itself(dice: random.Random) -> Look:
    """A child that becomes itself again and again, and counts."""
    script = 'echo $1 >> "$2"; sleep 0.0$(($1 % 9)); exec /bin/sh -c "$0" "$0" $(($1 + 1)) "$2"'
    log = here("execs")
    fork(lambda: os.execv("/bin/sh", [b"sh", b"-c", script.encode(), script.encode(), b"1", log]))
    seen = 0
    while True:
        yield None
        wait_for(lambda: os.path.exists(log), "the child")
        numbers = Path(os.fsdecode(log)).read_text().split()
        same("numbers", numbers, [str(n + 1) for n in range(len(numbers))])
        same("more numbers", len(numbers) >= seen, True)
        seen = len(numbers)
        wait_for(lambda: os.stat(log).st_size > len(" ".join(numbers)) + 1, "another number")


@trait(may="state D")
def forker(dice: random.Random) -> Look:
    """Children all the time: forked, of subprocess, and some that are still at work in the next step."""
    late: list[tuple[int, int, bytes]] = []
    value = b""
    while True:
        yield value
        for pid, r, wanted in late:
            value = b""
            while piece := os.read(r, 1 << 16):
                value += piece
            same("a worker's result", value, wanted)
            os.close(r)
            same("its end", os.waitpid(pid, 0)[1], 0)
        late = []
        for _ in range(dice.randrange(1, 4)):
            r, w = os.pipe()
            begin, pause = dice.randrange(1000), dice.random() * 0.02

            def work(w: int = w, begin: int = begin, pause: float = pause) -> None:
                os.write(w, flow(begin, 3000))
                time.sleep(pause)
                os.write(w, flow(begin + 3000, 3000))

            late.append((fork(work), r, flow(begin, 6000)))
            os.close(w)
        if dice.random() < 0.3:
            done = subprocess.run(["/bin/sh", "-c", "echo $((6 * 7))"], capture_output=True)
            same("a command's output", done.stdout, b"42\n")


@trait(may="state D")
def pool(dice: random.Random) -> Look:
    """multiprocessing: a pool, whose workers are forked, and a queue."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    workers = context.Pool(2)
    lock, number, queue = context.Lock(), context.Value("i", 0), context.Queue()
    value = 0
    while True:
        step = yield value
        value = sum(workers.map(abs, range(-step, 20)))
        same("sum", value, sum(map(abs, range(-step, 20))))
        with lock, number.get_lock():
            number.value += 1
        same("shared value", number.value, step)
        queue.put(("x" * 1000, step))
        same("queue", queue.get(timeout=PATIENCE_S), ("x" * 1000, step))


def _cloned(flags: int) -> int:
    """A process that has something in common with this one. It may touch nothing of Python's: it waits."""
    pid = call("syscall", 56, flags | int(signal.SIGCHLD), None, None, None, 0)
    if not pid:
        while True:
            libc.pause()
    return pid


@trait()
def shared_descriptors(dice: random.Random) -> Look:
    """A process that has its table of descriptors in common with its parent."""
    pid = _cloned(0x400)
    r, w = os.pipe()
    while True:
        yield None
        found = [os.readlink(f"/proc/{who}/fd/{r}") for who in (pid, "self")]
        same("what it has open", found[0], found[1])
        os.close(r)
        os.close(w)
        r, w = os.pipe()
        same("what it sees of new ones", os.path.exists(f"/proc/{pid}/fd/{r}"), True)


@trait(apart="CRIU cannot dump it: Can't make FS id")
def shared_folder(dice: random.Random) -> Look:
    """A process that has its working folder and its umask in common with its parent."""
    pid = _cloned(0x200)
    while True:
        step = yield None
        os.umask(0o20 + step % 8)
        same("its umask", status(pid, "Umask"), f"00{0o20 + step % 8:o}")


@trait(apart="what CRIU says of it is not tried")
def shared_everything(dice: random.Random) -> Look:
    """A process that has its memory in common with its parent, and is no thread."""
    stack = mapped(16 * PAGE, 0x22) + 16 * PAGE - 256
    pid = call("clone", libc.pause, ctypes.c_void_p(stack), 0x100 | int(signal.SIGCHLD), None)
    while True:
        yield None
        same("it lives", status(pid, "State")[0] in "RS", True)
