# SPDX-License-Identifier: Apache-2.0
"""Traits of files."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable

from tests.subjects.odd.shared import (
    Child,
    Look,
    Wrong,
    end,
    flow,
    fork,
    here,
    same,
    sleep_for_ever,
    trait,
)


@trait()
def deleted_files(dice: random.Random) -> Look:
    """Open files without a name: with an offset, opened twice, empty, sparse, and a folder."""
    fds = []
    for number, size in enumerate((0, 1, 70_000)):
        fds.append(os.open(here(f"deleted-{number}"), os.O_RDWR | os.O_CREAT, 0o640))
        os.write(fds[-1], flow(0, size))
    os.truncate(here("deleted-1"), 1 << 33)
    again = os.open(here("deleted-2"), os.O_RDONLY)
    os.mkdir(here("deleted-folder"))
    folder = os.open(here("deleted-folder"), os.O_RDONLY)
    os.rmdir(here("deleted-folder"))
    for number in range(3):
        os.unlink(here(f"deleted-{number}"))
    os.lseek(fds[2], 100, os.SEEK_SET)
    at, size = 100, 70_000
    while True:
        yield None
        same("at the offset", os.read(fds[2], 10), flow(at, 10))
        at += 10
        same("opened twice", os.pread(again, 90_000, 0), flow(0, size))
        os.pwrite(fds[2], flow(size, 3), size)
        size += 3
        same("sizes", [os.fstat(fd).st_size for fd in (*fds, again)], [0, 1 << 33, size, size])
        same("mode", os.fstat(fds[0]).st_mode & 0o7777, 0o640)
        same("no links", [os.fstat(fd).st_nlink for fd in (*fds, again)], [0] * 4)
        same("empty folder", os.listdir(folder), [])


@trait()
def odd_names(dice: random.Random) -> Look:
    """Open files whose names are no UTF-8, long, have newlines, or look like something that the kernel writes."""
    names = [
        b"\xff\xe9",
        b"n" * 255,
        b"a\nb",
        b" ",
        b"socket:[1]",
        b"\\012",
        b"%s*?",
    ]
    os.mkdir(here("names"))
    files = [open(here("names/") + name, "w+b", buffering=0) for name in names]
    text = b""
    while True:
        step = yield None
        for name, file in zip(names, files):
            same(f"bytes of {name!r}", os.pread(file.fileno(), 9999, 0), text)
            with open(here("names/") + name, "rb") as again:
                same(f"bytes by the name {name!r}", again.read(), text)
            file.write(b"%d\n" % step)
        text += b"%d\n" % step


@trait()
def named_deleted(dice: random.Random) -> Look:
    """An open file that has a name which ends as the kernel says it of deleted ones."""
    file = open(here("really here (deleted)"), "w+b", buffering=0)
    text = b""
    while True:
        step = yield None
        same("bytes", os.pread(file.fileno(), 9999, 0), text)
        file.write(b"%d\n" % step)
        text += b"%d\n" % step


@trait()
def renamed_files(dice: random.Random) -> Look:
    """An open file that gets another name in every step, in another folder, and has a second name."""
    os.mkdir(here("from"))
    os.mkdir(here("to"))
    path = here("from/0")
    file = open(path, "w+b", buffering=0)
    os.link(path, here("second"))
    while True:
        step = yield None
        file.write(b"%d\n" % step)
        fresh = here(f"{('from', 'to')[step % 2]}/{step}")
        os.rename(path, fresh)
        path = fresh
        for name in (path, here("second")):
            same("same file", os.path.samestat(os.stat(name), os.fstat(file.fileno())), True)
        same("links", os.fstat(file.fileno()).st_nlink, 2)


@trait()
def append_log(dice: random.Random) -> Look:
    """A log that three processes append to; no line is lost or torn, and none comes twice."""
    path = here("log-of-three")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(who: str) -> Callable[[str], object]:
        return lambda word: os.write(log, f"{who} {word}\n".encode()) if word != "-" else 0

    children = [Child(write("a")), Child(write("b"))]
    while True:
        step = yield None
        os.write(log, b"c %d\n" % step)
        for child in children:
            child.ask(str(step))
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
        wanted = [b"%c %d" % (who, n) for n in range(1, step + 1) for who in b"cab"]
        same("lines", lines, [*wanted, b""])


@trait()
def odd_opens(dice: random.Random) -> Look:
    """O_PATH, O_TMPFILE, folders, links, and files of /proc, also of a process that is gone."""
    os.mkdir(here("opens"))
    os.symlink("nowhere", here("opens/link"))
    for n in range(20):
        with open(here(f"opens/{n}"), "wb"):
            pass
    path = os.open(here("opens"), os.O_PATH)
    link = os.open(here("opens/link"), os.O_PATH | os.O_NOFOLLOW)
    unnamed = os.open(here("opens"), os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(unnamed, b"unnamed")
    mine = os.open("/proc/self/stat", os.O_RDONLY)
    pid = fork(sleep_for_ever)
    theirs = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    end(pid)
    limit = os.open("/proc/sys/kernel/pid_max", os.O_RDONLY)
    device = os.open("/dev/full", os.O_RDWR)
    while True:
        yield None
        same("link", os.readlink("", dir_fd=link), "nowhere")
        same("folder", len(os.listdir(f"/proc/self/fd/{path}")), 21)
        same("unnamed", os.pread(unnamed, 99, 0), b"unnamed")
        same("mine", os.pread(mine, 9, 0).split()[0], str(os.getpid()).encode())
        same("a number", os.pread(limit, 99, 0).strip().isdigit(), True)
        try:
            os.pread(theirs, 9, 0)
            raise Wrong("a process that is gone has a status")
        except ProcessLookupError:
            pass
        try:
            os.write(device, b"x")
            raise Wrong("/dev/full takes bytes")
        except OSError as error:
            same("/dev/full", error.errno, errno.ENOSPC)


@trait()
def many_descriptors(dice: random.Random) -> Look:
    """Hundreds of descriptors, some with high numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with open(here("many"), "wb") as file:
        file.write(flow(0, 5000))
    fds = [os.open(here("many"), os.O_RDONLY) for _ in range(200)]
    for n, fd in enumerate(fds):
        os.lseek(fd, n, os.SEEK_SET)
    top = most // 2
    os.dup2(fds[0], top)
    os.dup2(fds[1], top - 500)
    at = 0
    while True:
        yield None
        for n, fd in enumerate(fds):
            same("offset", os.lseek(fd, 0, os.SEEK_CUR), n + (at if not n else 0))
        same("top", os.read(top, 2), flow(at, 2))
        at += 2
        same("close to the top", os.lseek(top - 500, 0, os.SEEK_CUR), 1)


@trait(apart="the image cannot be restored: Can't chose service_fd_base")
def highest_descriptor(dice: random.Random) -> Look:
    """The highest descriptor that the limit allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    r, w = os.pipe()
    os.dup2(w, hard - 1)
    while True:
        yield None
        os.write(hard - 1, b"x")
        same("through the highest", os.read(r, 1), b"x")
