"""What of a job's process tree CRIU cannot dump, or what would be lost: found before anything is stopped, and named.

Looks through /proc and sock_diag from outside; takes nothing's time. Called with the pid (as we see it) of the first
process of the job's PID namespace.

Each rule was tried against CRIU 4.2.1, kernel 6.18, `--external mnt[] --tcp-established --network-lock skip --file-locks
--link-remap`, by dump and restore (tests/unit/test_dumpable.py does it again):

| found in the tree | CRIU | here |
|---|---|---|
| unix stream, seqpacket, dgram socket connected to an outsider | dump fails | refused; the proxy's own: waited for |
| unix sockets among themselves, one end closed, data in flight, SCM_RIGHTS in flight | works | - |
| unix connection not accepted yet, with data written | dump fails: "Non-empty write queue" | refused, transient |
| TCP among themselves, closed ends, listeners | works (--tcp-established) | - |
| TCP not accepted yet | dump fails: "In-flight connection" | refused, transient |
| TCP to outside | not a failure; the other side goes on alone | warned, strict: refused |
| UDP, unconnected or connected; packet, raw, netlink sockets | works | connected UDP: warned |
| netlink socket with unread messages | dump fails | refused, transient |
| vsock, MPTCP; other families, ping sockets [inferred] | dump fails | refused |
| io_uring, perf event, userfaultfd, bpf map, landlock rule set | dump fails | refused |
| eventfd, epoll, signalfd, timerfd, inotify, fanotify, pidfd (also of the dead), memfd, AIO | works | - |
| memfd_secret mapping | dump fails | refused |
| System V shared memory, no IPC namespace | dump fails | refused |
| POSIX message queue | dump fails | refused |
| unlinked file with more than the ghost limit of allocated bytes, open or mapped | dump fails | refused |
| memfd of huge pages | dump fails | refused |
| unlinked file that has another name | dump works; restore fails after --leave-running | refused |
| file hidden by a later mount | dump fails: "link remap" | refused |
| unlinked directory, O_TMPFILE, O_PATH, file of a dead process in /proc | works | - |
| nested pid, user, ipc, uts, net, time, cgroup namespace | dump fails | refused |
| nested mount namespace, tmpfs, bind, overlay, proc mount of the job, chroot | works | - |
| seccomp filter, stopped processes, zombies, sessions without leader | works | - |
| zombie leader whose threads live | dump fails | refused |
| traced process | dump fails | refused, with the tracer's name |
| process of another uid, without CAP_SYS_RESOURCE on our side | dump fails | refused |
| session or group leader outside the PID namespace | dump fails | refused |
| file locks, leases | works (--file-locks) | - |
| pipe whose other end only an outsider holds | dump works, restore gives end of file or SIGPIPE | refused |
| pipe with both ends inside that an outsider holds too | works inside | warned |
| FIFO in the file system | works by path | - |
| devices null, zero, full, random, urandom, kmsg, tty, ptmx; a pty with its master inside | works | - |
| a terminal whose master is outside; any other device, open or mapped | dump fails | refused |
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from devproxy import procfs, proctree
from devproxy.checkpoint import netdiag

GHOST_LIMIT_BYTES = 1 << 30  # as checkpoint/criu.py gives it to CRIU
_SETTLE_S = 1.0  # as long an attach may take
_SETTLE_STEP_S = 0.01
_CAP_SYS_RESOURCE = 24

_TTY, _PTMX = os.makedev(5, 0), os.makedev(5, 2)
# null, zero, full, random, urandom, kmsg
_MEMORY_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9, 11)}
_PTS_MAJORS = range(136, 144)

_ANON_OK = {"eventfd", "eventpoll", "signalfd", "timerfd", "inotify", "fanotify", "pidfd"}
_ANON_WHY = {
    "io_uring": (
        "io_uring cannot be dumped",
        "switch it off in that program; libraries fall back to epoll where io_uring_setup fails",
    ),
    "perf_event": ("performance counters cannot be dumped", "checkpoint without the profiler"),
    "userfaultfd": ("userfaultfd cannot be dumped", "run the job without that feature"),
}
_NAMESPACES = ("pid", "user", "ipc", "uts", "net", "time", "cgroup")
_SOCKETS_OK = ("TCP", "UDP", "UNIX", "NETLINK", "PACKET", "RAW")


@dataclass(frozen=True)
class Obstacle:
    """One thing in the way. pid: as the job sees it; outer_pid: as we do. object: a descriptor or a mapping.

    transient: it may be gone in a moment.
    """

    pid: int
    outer_pid: int
    process: str
    object: str
    what: str
    why: str
    remedy: str
    transient: bool = False

    @property
    def text(self) -> str:
        """One line for the user."""
        where = f"process {self.pid} ({self.process})" if self.pid else "the job"
        if self.object:
            where += f", {self.object}"
        line = f"{where}: {self.what}: {self.why}"
        return f"{line}; {self.remedy}" if self.remedy else line


@dataclass(frozen=True)
class OutsideTcp:
    """A TCP connection whose other end is not in the tree. local, remote: "address:port"."""

    pid: int
    outer_pid: int
    process: str
    fd: int
    local: str
    remote: str
    state: str


@dataclass
class Verdict:
    """refusals: a dump would fail, or a restore would lose. warnings: what the user should know.

    tcp: how CRIU should treat connections. "close" only where no connection inside of the tree would be closed too.
    """

    refusals: list[Obstacle] = field(default_factory=list)
    warnings: list[Obstacle] = field(default_factory=list)
    tcp: str = "established"
    outside_tcp: list[OutsideTcp] = field(default_factory=list)
    # (local, remote) of both ends of connections within the tree: for netdiag.destroy_tcp before a restore
    inside_tcp: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Process:
    """pid: as we see it; its own number is status.inner_pid."""

    pid: int
    status: procfs.Status


@dataclass(frozen=True)
class _Socket:
    process: _Process
    fd: int
    inode: int


class _Tree:
    """What one walk over the tree has collected."""

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self.processes: list[_Process] = []
        self.sockets: list[_Socket] = []
        self.pipes: dict[int, list[tuple[_Process, int]]] = {}
        self.terminals: list[tuple[_Process, int, int]] = []  # process, fd, index of the pty
        self.masters: set[int] = set()
        self.refusals: list[Obstacle] = []
        self.warnings: list[Obstacle] = []
        self._memfd_device: int | None = None

    def memfd_device(self) -> int:
        """st_dev of every memfd of normal pages."""
        if self._memfd_device is None:
            fd = os.memfd_create("devproxy", os.MFD_CLOEXEC)
            self._memfd_device = os.fstat(fd).st_dev
            os.close(fd)
        return self._memfd_device


def check_tree(
    root_pid: int,
    job_dir: str,
    *,
    strict: bool = False,
    known_pipes: Iterable[int] = (),
    ghost_limit_bytes: int = GHOST_LIMIT_BYTES,
    settle_s: float = _SETTLE_S,
) -> Verdict:
    """Looks at the tree below (and with) `root_pid`. Changes and stops nothing.

    known_pipes: inodes of pipes that the caller holds and restores. strict: losses count as refusals. Obstacles that pass by
    themselves, above all an attach to a device proxy under way, are waited for up to settle_s.
    """
    known = frozenset(known_pipes)
    end = time.monotonic() + settle_s
    while True:
        verdict = _check_once(root_pid, job_dir, strict, known, ghost_limit_bytes)
        waiting = any(o.transient for o in verdict.refusals)
        lasting = any(not o.transient for o in verdict.refusals)
        if not waiting or lasting or time.monotonic() >= end:
            return verdict
        time.sleep(_SETTLE_STEP_S)


def _check_once(
    root_pid: int, job_dir: str, strict: bool, known_pipes: frozenset[int], ghost_limit: int
) -> Verdict:
    tree = _Tree(root_pid)
    spaces = _namespaces(root_pid)
    for pid in [root_pid, *proctree.descendants(root_pid)]:
        process = _process(pid)
        if process is None:
            continue  # it ended while we looked
        tree.processes.append(process)
        _check_process(tree, process, root_pid, spaces)
        _check_threads(tree, process)
        if process.status.state != "Z":
            _check_descriptors(tree, process, ghost_limit)
            _check_mappings(tree, process, ghost_limit)
    if not tree.processes:
        gone = "the job's first process is not there"
        tree.refusals.append(Obstacle(0, root_pid, "", "", gone, "the job has ended", ""))
    _check_zombies(tree)
    _check_terminals(tree)
    _check_pipes(tree, known_pipes)
    verdict = Verdict(tree.refusals, tree.warnings)
    _check_sockets(tree, verdict, root_pid, job_dir)
    if strict:
        verdict.refusals += verdict.warnings
        verdict.warnings = []
    return verdict


def _obstacle(
    process: _Process, thing: str, what: str, why: str, remedy: str = "", transient: bool = False
) -> Obstacle:
    status = process.status
    return Obstacle(status.inner_pid, process.pid, status.name, thing, what, why, remedy, transient)


# --- processes ---


def _process(pid: int) -> _Process | None:
    status = procfs.status(pid)
    return None if status is None else _Process(pid, status)


def _namespaces(pid: int) -> dict[str, str]:
    found = {}
    for name in _NAMESPACES:
        # for_children too: after unshare of the PID or time namespace only the next child enters it
        for link in (name, f"{name}_for_children"):
            try:
                found[link] = os.readlink(f"/proc/{pid}/ns/{link}")
            except OSError:
                pass
    return found


def _own_capability(number: int) -> bool:
    me = procfs.status("self")
    return me is not None and me.has_capability(number)


def _name_of(pid: int) -> str:
    status = procfs.status(pid)
    return status.name if status else "gone"


def _check_process(tree: _Tree, process: _Process, root_pid: int, spaces: dict[str, str]) -> None:
    refuse, status = tree.refusals.append, process.status
    if status.state == "Z":
        return
    if status.uids != (os.getuid(),) * 4 and not _own_capability(_CAP_SYS_RESOURCE):
        refuse(
            _obstacle(
                process,
                "",
                f"it runs as uid {status.uids[1]}",
                f"only processes of uid {os.getuid()} can be dumped",
                "run the whole job as one user",
            )
        )
    if status.state == "D":
        wait = "it waits in the kernel, uninterruptibly (state D)"
        refuse(_obstacle(process, "", wait, "it cannot be frozen now", "try again", True))
    mine = _namespaces(process.pid)
    for name in _NAMESPACES:
        for link in (name, f"{name}_for_children"):
            if link in spaces and link in mine and mine[link] != spaces[link]:
                refuse(
                    _obstacle(
                        process,
                        "",
                        f"it made a {name} namespace of its own",
                        "CRIU cannot dump nested ones",
                        "run it without containers, sandboxes and unshare",
                    )
                )
                break
    if not status.inner_session or not status.inner_group:
        which = "process group" if status.inner_session else "session"
        refuse(
            _obstacle(
                process,
                "",
                f"the leader of its {which} is outside of the job",
                "it could not be restored into it",
                "start the job through devproxy-run",
            )
        )
    if process.pid != root_pid and status.tracer:
        _refuse_traced(tree, process, "", status.tracer)


def _refuse_traced(tree: _Tree, process: _Process, thing: str, tracer: int) -> None:
    tree.refusals.append(
        _obstacle(
            process,
            thing,
            f"process {tracer} ({_name_of(tracer)}) traces it",
            "a traced process cannot be dumped",
            "detach the debugger or tracer",
        )
    )


def _check_threads(tree: _Tree, process: _Process) -> None:
    """The leader is checked with the process; here are the others."""
    try:
        tids = os.listdir(f"/proc/{process.pid}/task")
    except OSError:
        return
    for tid in tids:
        if int(tid) == process.pid:
            continue
        status = procfs.status(process.pid, int(tid))
        if status is None:
            continue
        if status.tracer and status.tracer != process.status.tracer:
            _refuse_traced(tree, process, f"thread {status.inner_pid}", status.tracer)
        if status.state == "D":
            thing = f"thread {status.inner_pid} ({status.name})"
            wait = "it waits in the kernel, uninterruptibly (state D)"
            tree.refusals.append(
                _obstacle(process, thing, wait, "it cannot be frozen now", "try again", True)
            )


def _check_zombies(tree: _Tree) -> None:
    """proctree leaves zombies out, and with them a leader that has ended before its threads."""
    for process in tree.processes:
        for pid in proctree.children(process.pid):
            child = _process(pid)
            if child is None or child.status.state != "Z":
                continue
            try:
                threads = len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                continue
            if threads > 1:
                tree.refusals.append(
                    _obstacle(
                        child,
                        "",
                        "its first thread has ended and others live on",
                        "CRIU cannot dump that",
                        "let the first thread wait for the others",
                    )
                )


# --- descriptors ---


def _check_descriptors(tree: _Tree, process: _Process, ghost_limit: int) -> None:
    try:
        descriptors = procfs.descriptors(process.pid)
    except OSError:
        if os.path.exists(f"/proc/{process.pid}/fd"):
            tree.refusals.append(
                _obstacle(
                    process,
                    "",
                    "its descriptors cannot be read",
                    "we may not look at it",
                    "run devproxy as the job's user",
                )
            )
        return
    for fd, target in descriptors:
        _check_descriptor(tree, process, fd, target, ghost_limit)


def _check_descriptor(
    tree: _Tree, process: _Process, fd: int, target: str, ghost_limit: int
) -> None:
    if target.startswith("socket:["):
        tree.sockets.append(_Socket(process, fd, int(target[8:-1])))
    elif target.startswith("pipe:["):
        tree.pipes.setdefault(int(target[6:-1]), []).append((process, fd))
    elif target.startswith("anon_inode:"):
        _check_anonymous(tree, process, fd, target[len("anon_inode:") :].strip("[]"))
    elif target.startswith("/"):
        _check_file(tree, process, fd, target, ghost_limit)
    elif not target.startswith(
        (
            "mnt:",
            "net:",
            "pid:",
            "user:",
            "uts:",
            "ipc:",
            "cgroup:",
            "time:",
            "pid_for_children:",
            "time_for_children:",
            "pidfd:",
            "memfd:",
        )
    ):
        tree.refusals.append(
            _obstacle(
                process, f"fd {fd}", target, "CRIU knows no such object", "close it in the program"
            )
        )


def _check_anonymous(tree: _Tree, process: _Process, fd: int, kind: str) -> None:
    if kind in _ANON_OK:
        return
    why, remedy = _ANON_WHY.get(
        kind, ("CRIU cannot dump it", "run the program without that feature")
    )
    tree.refusals.append(_obstacle(process, f"fd {fd}", kind, why, remedy))


def _check_file(tree: _Tree, process: _Process, fd: int, target: str, ghost_limit: int) -> None:
    if target.startswith(("/proc/", "/sys/")):
        return  # restored by name, also what belongs to a process that is gone
    try:
        info = os.stat(f"/proc/{process.pid}/fd/{fd}")
    except OSError:
        return
    thing = f"fd {fd}"
    if stat.S_ISCHR(info.st_mode):
        _check_character(tree, process, fd, target, info.st_rdev)
    elif stat.S_ISBLK(info.st_mode):
        tree.refusals.append(_device(process, thing, target))
    elif target.startswith("/secretmem"):
        tree.refusals.append(_secret(process, thing))
    elif target.startswith("/memfd:"):
        if info.st_dev != tree.memfd_device():
            why, remedy = (
                "CRIU cannot dump it",
                "use memory of normal pages, or close it once mapped",
            )
            tree.refusals.append(_obstacle(process, thing, "a memfd of huge pages", why, remedy))
    elif _is_queue(process, target, info):
        what, why = f"{target}, a POSIX message queue", "CRIU cannot dump it"
        remedy = "use a pipe or a socket"
        tree.refusals.append(_obstacle(process, thing, what, why, remedy))
    elif target.endswith(" (deleted)"):
        _check_ghost(tree, process, thing, target, info, ghost_limit)
    elif stat.S_ISREG(info.st_mode):
        _check_name(tree, process, thing, target, info)


def _is_queue(process: _Process, target: str, info: os.stat_result) -> bool:
    """A message queue looks like a file in the root folder, but its file system is another one."""
    if target.count("/") != 1 or not stat.S_ISREG(info.st_mode):
        return False
    try:
        return os.stat(f"/proc/{process.pid}/root/").st_dev != info.st_dev
    except OSError:
        return False


def _check_name(
    tree: _Tree, process: _Process, thing: str, target: str, info: os.stat_result
) -> None:
    """Is the file still what its name leads to? If not, CRIU fails, or makes a link that is gone at restore."""
    # Names are those of the mount namespace; a process in a chroot sees them from elsewhere, hence the second root.
    for pid in (process.pid, tree.root_pid):
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/root{target}"), info):
                return
        except OSError:
            continue
    why, remedy = "a mount or another file hides it, and it could not be opened again", "close it"
    tree.refusals.append(_obstacle(process, thing, target, why, remedy))


def _device(process: _Process, thing: str, target: str) -> Obstacle:
    if target.startswith("/dev/nvidia"):
        remedy = "the process reaches the real driver past the device proxy: run it with devproxy's libraries"
        return _obstacle(process, thing, target, "the state of a device cannot be dumped", remedy)
    remedy = "close it in the program before the checkpoint"
    return _obstacle(process, thing, target, "the state of a device cannot be dumped", remedy)


def _secret(process: _Process, thing: str) -> Obstacle:
    why = "not even the kernel may read it"
    return _obstacle(process, thing, "memfd_secret memory", why, "run without it")


def _check_character(tree: _Tree, process: _Process, fd: int, target: str, device: int) -> None:
    if device in _MEMORY_DEVICES or device == _TTY:
        return
    if device == _PTMX:
        info = procfs.fdinfo(process.pid, fd)
        if info and info.tty_index is not None:
            tree.masters.add(info.tty_index)
    elif os.major(device) in _PTS_MAJORS:
        index_of = (os.major(device) - 136) * 256 + os.minor(device)
        tree.terminals.append((process, fd, index_of))
    else:
        tree.refusals.append(_device(process, f"fd {fd}", target))


def _check_ghost(
    tree: _Tree, process: _Process, thing: str, target: str, info: os.stat_result, ghost_limit: int
) -> None:
    """st_nlink > 0: it has another name. CRIU makes a temporary third one and, where the job goes on, removes it again."""
    if stat.S_ISREG(info.st_mode) and info.st_nlink:
        what = f"{target.removesuffix(' (deleted)')} is deleted, open, and has another name (a hard link)"
        why, remedy = "CRIU cannot open it again at restore", "close it, or keep the name"
        tree.refusals.append(_obstacle(process, thing, what, why, remedy))
        return
    size = info.st_blocks * 512
    if stat.S_ISREG(info.st_mode) and not info.st_nlink and size > ghost_limit:
        name = target.removesuffix(" (deleted)")
        tree.refusals.append(
            _obstacle(
                process,
                thing,
                f"{name} is deleted, and open with {size / 2**20:.1f} MiB",
                f"CRIU takes at most {ghost_limit / 2**20:.0f} MiB of a deleted file along",
                "keep the file until the program has closed it",
            )
        )


def _check_terminals(tree: _Tree) -> None:
    for process, fd, index in tree.terminals:
        if index not in tree.masters:
            tree.refusals.append(
                _obstacle(
                    process,
                    f"fd {fd}",
                    f"/dev/pts/{index}, a terminal",
                    "its other side is outside of the job",
                    "start the job through devproxy-run, which gives it a terminal of its own",
                )
            )


# --- mappings ---


def _check_mappings(tree: _Tree, process: _Process, ghost_limit: int) -> None:
    seen: set[tuple[int, int, str]] = set()
    # System V segments are "/SYSV00000000 (deleted)".
    for one in procfs.mappings(process.pid, b" (deleted)", b" /dev/", b" anon_inode:"):
        key = (one.device, one.inode, one.path)
        if key not in seen and (one.deleted or one.path.startswith(("/dev/", "anon_inode:"))):
            seen.add(key)
            _check_mapping(tree, process, one, ghost_limit)


def _check_mapping(tree: _Tree, process: _Process, mapping: procfs.Mapping, limit: int) -> None:
    thing, path = f"mapping {mapping.range}", mapping.path
    if path.startswith("/SYSV"):
        tree.refusals.append(
            _obstacle(
                process,
                thing,
                "System V shared memory",
                "CRIU dumps it only in an IPC namespace",
                "use POSIX shared memory",
            )
        )
    elif path.startswith("/secretmem"):
        tree.refusals.append(_secret(process, thing))
    elif path.startswith("anon_inode:"):
        kind = path[len("anon_inode:") :].strip("[]")
        why, remedy = _ANON_WHY.get(
            kind, ("CRIU cannot dump it", "run the program without that feature")
        )
        tree.refusals.append(_obstacle(process, thing, kind, why, remedy))
    elif path.startswith(("/memfd:", "/dev/zero", "/[aio]")):
        return  # anonymous shared memory is called /dev/zero (deleted)
    elif mapping.deleted:
        try:
            info = os.stat(f"/proc/{process.pid}/map_files/{mapping.map_file}")
        except OSError:
            return
        if stat.S_ISREG(info.st_mode):
            _check_ghost(tree, process, thing, path, info, limit)
    elif not path.startswith("/dev/shm/"):
        try:
            info = os.stat(f"/proc/{process.pid}/map_files/{mapping.map_file}")
        except OSError:
            return
        if not stat.S_ISREG(info.st_mode) and info.st_rdev not in _MEMORY_DEVICES:
            tree.refusals.append(_device(process, thing, path))


# --- pipes ---


def _holders_outside(tree: _Tree, inodes: set[int]) -> dict[int, int]:
    """inode -> a process outside of the tree that holds it."""
    inside = {process.pid for process in tree.processes}
    marks = {f"pipe:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in inside:
            continue
        try:
            descriptors = procfs.descriptors(name)
        except OSError:
            continue
        for _, target in descriptors:
            if target in marks:
                found.setdefault(marks[target], int(name))
    return found


def _check_pipes(tree: _Tree, known: frozenset[int]) -> None:
    unknown = {inode for inode in tree.pipes if inode not in known}
    if not unknown:
        return
    for inode, outsider in _holders_outside(tree, unknown).items():
        process, fd = tree.pipes[inode][0]
        modes = {_access(p.pid, n) for p, n in tree.pipes[inode]}
        what = f"a pipe that process {outsider} ({_name_of(outsider)}) outside of the job holds too"
        if len(modes) > 1 or os.O_RDWR in modes:
            why = "after a restore the two sides are no longer connected"
            tree.warnings.append(_obstacle(process, f"fd {fd}", what, why))
        else:
            end = "end of file" if modes == {os.O_RDONLY} else "a broken pipe"
            why = f"after a restore the job would see {end} on it"
            remedy = "use a FIFO in the file system, or the job's standard streams"
            tree.refusals.append(_obstacle(process, f"fd {fd}", what, why, remedy))


def _access(pid: int, fd: int) -> int:
    info = procfs.fdinfo(pid, fd)
    return os.O_RDWR if info is None else info.access


# --- sockets ---


def _check_sockets(tree: _Tree, verdict: Verdict, root_pid: int, job_dir: str) -> None:
    if not tree.sockets:
        return
    inodes = {s.inode for s in tree.sockets}
    internet = netdiag.internet_sockets(root_pid, inodes)
    unix = netdiag.unix_sockets()
    done: set[int] = set()
    unread = netdiag.unread_netlink(root_pid, inodes)
    pairs = {(s.local, s.remote) for s in internet.values() if s.protocol.startswith("tcp")}
    listeners = {
        s.local for s in internet.values() if s.state == netdiag.LISTEN and "tcp" in s.protocol
    }
    for one in tree.sockets:
        if one.inode in done:
            continue
        done.add(one.inode)
        if one.inode in internet:
            info = internet[one.inode]
            if netdiag.protocol_name(one.process.pid, one.fd).startswith("MPTCP"):
                _check_other_socket(tree, one, False)  # its first subflow is in the tables of TCP
                continue
            if not info.protocol.startswith("tcp"):
                _check_datagram(tree, one, info)
            elif info.state == netdiag.LISTEN:
                if info.queued:
                    what = (
                        f"listening socket {info.local} with {info.queued} connections in its queue"
                    )
                    why = "they are not accepted yet, and cannot be dumped"
                    tree.refusals.append(
                        _obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
                    )
            elif info.remote:
                if (info.remote, info.local) in pairs or _listens(listeners, info.remote):
                    ends = (info.local, info.remote)
                    for pair in (ends, ends[::-1]):
                        if pair not in verdict.inside_tcp:
                            verdict.inside_tcp.append(pair)
                else:
                    _outside_tcp(tree, verdict, one, info)
        elif one.inode in unread:
            what, why = "netlink socket with unread messages", "they cannot be dumped"
            tree.refusals.append(
                _obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
            )
        elif unix is not None and one.inode in unix:
            _check_unix(tree, one, unix, inodes, job_dir)
        else:
            _check_other_socket(tree, one, unix is None)
    if verdict.outside_tcp and not verdict.inside_tcp:
        verdict.tcp = "close"


def _listens(listeners: set[str], address: str) -> bool:
    """A connection that nobody has accepted yet belongs to the listener."""
    port = address.rsplit(":", 1)[1]
    return any(at in listeners for at in (address, f"0.0.0.0:{port}", f"[::]:{port}"))


def _outside_tcp(tree: _Tree, verdict: Verdict, one: _Socket, info: netdiag.InternetSocket) -> None:
    process, state = one.process, netdiag.TCP_STATES.get(info.state, str(info.state))
    verdict.outside_tcp.append(
        OutsideTcp(
            process.status.inner_pid,
            process.pid,
            process.status.name,
            one.fd,
            info.local,
            info.remote,
            state,
        )
    )
    tree.warnings.append(
        _obstacle(
            process,
            f"fd {one.fd}",
            f"TCP connection {info.local} -> {info.remote} ({state})",
            "its other end is outside of the job, so it will be closed at restore",
            "",
        )
    )


def _check_datagram(tree: _Tree, one: _Socket, info: netdiag.InternetSocket) -> None:
    if info.protocol.startswith("udp") and info.remote:
        tree.warnings.append(
            _obstacle(
                one.process,
                f"fd {one.fd}",
                f"UDP socket {info.local} -> {info.remote}",
                "what is sent to it while the job is away is lost",
            )
        )


def _check_unix(
    tree: _Tree,
    one: _Socket,
    unix: dict[int, netdiag.UnixSocket],
    inodes: set[int],
    job_dir: str,
) -> None:
    info = unix[one.inode]
    if info.state == netdiag.LISTEN and info.pending:
        outside = [inode for inode in info.pending if inode not in inodes]
        if outside:
            name = info.name or "without a name"
            what = f"listening socket {name} with {len(outside)} connections from outside"
            why = "they wait to be accepted, and cannot be dumped"
            tree.refusals.append(
                _obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
            )
        return
    if info.state != netdiag.ESTABLISHED and info.kind != socket.SOCK_DGRAM:
        return
    if info.peer in inodes:
        return
    listener = next((s for s in unix.values() if one.inode in s.pending), None)
    if listener is not None and listener.inode in inodes:
        # CRIU connects it anew, without what was already written to it.
        if info.unread_bytes:
            what = f"connection to {listener.name or 'a socket'} of the job itself"
            why = "data waits in it, and nobody has accepted it yet"
            tree.refusals.append(
                _obstacle(one.process, f"fd {one.fd}", what, why, "try again", True)
            )
        return
    if not info.peer and listener is None:
        return  # the other end has been closed
    peer = listener or unix.get(info.peer)
    ours = peer is not None and _of_the_proxy(peer.name, job_dir)
    holder = _socket_holder(info.peer)
    name = (peer.name if peer else "") or "without a name"
    what = f"unix socket connected to {name}" + (f" of {holder}" if holder else "")
    if ours:
        why = "the process is just being attached to its device proxy"
        tree.refusals.append(_obstacle(one.process, f"fd {one.fd}", what, why, "try again", True))
        return
    why = "its other end is outside of the job"
    remedy = "close the connection in the program, or start that program within the job"
    tree.refusals.append(_obstacle(one.process, f"fd {one.fd}", what, why, remedy))


def _of_the_proxy(name: str, job_dir: str) -> bool:
    """job_dir is the host's name of the folder; the job sees it as .job beside it."""
    seen = os.path.join(os.path.dirname(job_dir), ".job")
    return os.path.dirname(name) in (job_dir, seen)


def _socket_holder(inode: int) -> str:
    """ "process 12 (name)": who holds the socket; "" where we may not see. Only called for a refusal."""
    mark = f"socket:[{inode}]"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if any(target == mark for _, target in procfs.descriptors(name)):
                return f"process {name} ({_name_of(int(name))})"
        except OSError:
            continue
    return ""


def _check_other_socket(tree: _Tree, one: _Socket, blind: bool) -> None:
    """A socket in no table: not bound yet, or of another family."""
    protocol = netdiag.protocol_name(one.process.pid, one.fd)
    if protocol.startswith("UNIX"):
        if blind:
            what, why = "unix socket", "the kernel does not tell its other end (no unix_diag)"
            remedy = "load the kernel module unix_diag"
            tree.refusals.append(_obstacle(one.process, f"fd {one.fd}", what, why, remedy))
        return
    if protocol and not protocol.startswith(_SOCKETS_OK):
        what = f"{protocol} socket"
        why = "CRIU knows no sockets of that kind"
        tree.refusals.append(
            _obstacle(one.process, f"fd {one.fd}", what, why, "close it in the program")
        )
