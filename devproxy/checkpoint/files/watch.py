# SPDX-License-Identifier: Apache-2.0
"""Who writes to the job's files, as the kernel sees it."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
import time
from collections.abc import Callable

from devproxy import proctree
from devproxy.checkpoint.files.look import lstat
from devproxy.checkpoint.files.tracker import FilesTracker


class FanotifyWatch:
    """Who writes to the job's files, as the kernel sees it (fanotify(7)); needs CAP_SYS_ADMIN.

    One thread of the supervisor; an event for each close after writing on the file systems of tracked files. Outsiders'
    writes are marked in the tracker; writes of the tree that the library missed (static programs) are added to it.
    """

    _EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
    _CLOSE_WRITE = 0x8
    _OVERFLOW = 0x4000
    _MARK_ADD_FILESYSTEM = 0x1 | 0x100
    _INIT_FLAGS = 0x1 | 0x2  # FAN_CLOEXEC | FAN_NONBLOCK, class FAN_CLASS_NOTIF

    def __init__(
        self, tracker: FilesTracker, root_pid: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._tracker = tracker
        self._root_pid = root_pid
        self._say = say
        self._fd = -1
        self._wake = (-1, -1)
        self._thread: threading.Thread | None = None
        self._devices: set[int] = set()
        self._space_of, self._space = 0, 0  # the tree's root, and the inode of its PID namespace
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._lost = False

    def start(self) -> bool:
        """False, said once, where the kernel does not permit it: note_state() alone decides then."""
        self._fd = self._libc.fanotify_init(self._INIT_FLAGS, os.O_RDONLY | os.O_CLOEXEC)
        if self._fd < 0:
            reason = os.strerror(ctypes.get_errno())
            self._say(
                f"who else writes to the job's files is not watched (fanotify: {reason}); their states decide"
            )
            return False
        self._wake = os.pipe()
        # stop() may come from another thread at any moment: it joins only what has been started.
        thread = threading.Thread(target=self._loop, name="devproxy-fanotify", daemon=True)
        thread.start()
        self._thread = thread
        self.refresh()
        return True

    def refresh(self) -> None:
        """After note_state: watches the file systems of files that are new."""
        if self._fd < 0:
            return
        folders = {os.path.dirname(p) for p in self._tracker.changed()}
        for folder in folders:
            st = lstat(folder)
            if st is None or st.st_dev in self._devices:
                continue
            self._devices.add(st.st_dev)
            self._libc.fanotify_mark(
                self._fd,
                ctypes.c_uint(self._MARK_ADD_FILESYSTEM),
                ctypes.c_uint64(self._CLOSE_WRITE),
                -100,
                ctypes.c_char_p(os.fsencode(folder)),
            )

    def stop(self) -> None:
        if self._thread is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._thread = None
        for fd in (self._fd, *self._wake):
            os.close(fd)
        self._fd = -1

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._fd in ready:
                self._drain()
            if self._wake[0] in ready:
                return

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 64 << 10)
            except OSError:
                return
            at = 0
            while at + self._EVENT.size <= len(data):
                size, _, _, _, mask, fd, pid = self._EVENT.unpack_from(data, at)
                at += size
                if mask & self._OVERFLOW and not self._lost:
                    self._lost = True
                    self._say("events about the job's files were lost; their states decide")
                if fd < 0:
                    continue
                try:
                    path = os.readlink(f"/proc/self/fd/{fd}")
                except OSError:
                    continue
                finally:
                    os.close(fd)
                if pid != os.getpid():
                    self._event(path, pid)

    def _event(self, path: str, pid: int) -> None:
        known = self._tracker.tracked(path)
        inside = self._inside(pid)
        if inside:
            if not known and not self._tracker.ignored(path):
                self._tracker.changed()  # the journal may have it by now; its record says more
                self._tracker.mention(path)
        elif known or self._tracker.tracked_by_now(path):
            self._tracker.somebody_else(path, time.time_ns(), sure=inside is False)

    def _inside(self, pid: int) -> bool | None:
        """None: it is gone, nobody knows. A job has a PID namespace of its own (nested ones cannot be dumped anyway)."""
        root = self._root_pid()
        try:
            if root != self._space_of:
                self._space = os.stat(f"/proc/{root}/ns/pid").st_ino
                self._space_of = root
            if self._space != os.stat("/proc/self/ns/pid").st_ino:
                return os.stat(f"/proc/{pid}/ns/pid").st_ino == self._space
            while pid > 1:
                if pid == root:
                    return True
                parent = proctree.parent(pid)
                if parent is None:
                    return None
                pid = parent
        except OSError:
            return None
        return False
