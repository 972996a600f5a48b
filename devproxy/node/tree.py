# SPDX-License-Identifier: Apache-2.0
"""A job's process tree on this host, with its servers, its standard streams, and its end.

The process that owns it is devproxy-run, or the detached agent after a restore. Its main thread waits here for signals
and for the tree's end; the coordinator's verbs come from other threads and change `root` through the methods below.

Who owns what
    main thread     signals, reaping, the decision that the tree has ended for good
    verb thread     one at a time (the coordinator's lock): servers, gpus, expect_end() and restored()
    _lock           root, expect_end, gone_with, code; a leaf, taken under servers.reaping
"""

from __future__ import annotations

import os
import signal
import threading
import time

from devproxy import config, proctree, runtime
from devproxy.node import init
from devproxy.node import stdio as streams
from devproxy.node.spec import JobSpec
from devproxy.proxy import command as cmd
from devproxy.proxy.janitor import Janitor
from devproxy.proxy.server import Server
from devproxy.proxy.server_set import READY, WAITING, ServerSet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from devproxy.node.network import Place, TreeNetwork
    from devproxy.proxy.control_channel import ControlChannel

RESTORE_ENDS_S = 60.0
LAST_PROCESS_S = 10.0  # for the processes of a tree that is ended
GIVEN_UP_S = 2.0  # for output that nobody takes, after a signal that ended the job


class Tree:
    """gpus: [k] is the machine's GPU behind the tree's GPU k. lib: the folder of the build that the tree has mapped."""

    def __init__(
        self,
        spec: JobSpec,
        gpus: list[int],
        folder: runtime.JobFolder,
        servers: ServerSet,
        janitor: Janitor,
        stdio: streams.Stdio,
        lib: str,
        server: str,
        place: Place | None = None,
    ) -> None:
        self.spec = spec
        self.gpus = gpus
        # What they had in common when somebody last looked (placement.py); None: nobody has.
        self.alike: list[list[int]] | None = None
        self.folder = folder
        self.servers = servers
        self.janitor = janitor
        self.stdio = stdio
        self.lib = lib
        self.server = server
        self.place = place  # in a job of several trees
        self.network: TreeNetwork | None = None  # then: of the processes that live, or did last
        self.root: int | None = None  # outer process id of the tree's root
        self.code: int | None = None  # how it ended for good, as a shell tells it
        self.stragglers = 0
        self.started_at = time.monotonic()
        self._lock = threading.Lock()
        self._expect_end = False
        self._gone_with: int | None = None  # the status of the last root that ended when expected
        self._tree_gone = threading.Event()
        self._we_stopped_it = False
        self._told_to_end = False
        self._plain: cmd.Command | None = None
        # While a restore goes on: children reaped that we did not know, and how they ended. Not always: a number
        # comes back some day, and would be taken for a root that has ended.
        self._strangers: dict[int, int] | None = None
        self._has_root = threading.Event()  # no restore goes on
        self._has_root.set()
        self._main = threading.main_thread().ident or 0

    # -- start --------------------------------------------------------------------------------------------------

    def start_plain(self, env: dict[str, str], mask: set[int]) -> None:
        """Without namespaces, as a child of ours with our own standard streams."""
        self._plain = cmd.Command(self.spec.program, self.spec.command, env, mask)
        self.root = self._plain.pid
        self.janitor.watch(self.root)

    def start_tree(self, env: dict[str, str], mask: set[int], mount_at: str) -> None:
        """Under devproxy-init. Raises what init.start raises."""
        self.stdio.open()
        root = init.start(
            os.path.join(self.lib, "devproxy-init"),
            self.spec.program,
            self.spec.command,
            env,
            job_dir=self.folder.path,
            mount_at=mount_at,
            modes=self.stdio.modes,
            mask=mask,
            namespace=self.fresh_network(),
        )
        self.restored(root)
        self.expect_no_end()
        self.begin_streams()

    def fresh_network(self) -> int:
        """The namespace for processes that are about to live, held; -1 for a tree that has its host's network.

        A new one each time: of the last may be left what a restored connection would meet.
        """
        if self.place is None:
            return -1
        self.close_network()
        self.network = self.place.make_network()
        return self.network.namespace

    def release_network(self) -> None:
        if self.network is not None:
            self.network.release()

    def hold_network(self) -> None:
        if self.network is not None:
            self.network.hold()

    def close_network(self) -> None:
        network, self.network = self.network, None
        if network is not None:
            network.close()

    def deliver(self, packets: list[bytes]) -> None:
        """From another tree of the job. Any thread."""
        network = self.network
        if network is not None:
            network.deliver(packets)

    def begin_streams(self) -> None:
        self.stdio.start()
        if self.stdio.terminal:
            threading.Thread(target=self._follow_events, name="events", daemon=True).start()

    # -- for the verbs ------------------------------------------------------------------------------------------

    def lives(self) -> bool:
        """Its command, and not only what that left running."""
        root = self.root
        return root is not None and init.command_lives(root)

    def lost_servers(self) -> str:
        """Which servers have ended under the tree, and how; "" for none."""
        lost = self.servers.lost(self.folder)
        return ", ".join(f"{process.name} {process.how_it_ended()}" for process in lost)

    def channel(self, server: Server) -> ControlChannel:
        """Raises ServerGone where it does not answer."""
        from devproxy.proxy.control_channel import (
            ControlChannel,  # json, typing: devproxy-run starts without
        )

        return ControlChannel(self.folder.path, server.gpu, bytes.fromhex(self.spec.abi))

    def start_servers(self, gpus: list[int], more: tuple[str, ...]) -> list[Server]:
        """One server for each of the tree's GPUs, on these of the machine, parked. more: further arguments (--restore DIR).

        Raises Refused with the server's own words; then none of them runs.
        """
        return self._start_servers(gpus, more, waits=False)

    def prepare_servers(self, gpus: list[int], more: tuple[str, ...]) -> list[Server]:
        """The same, but they wait for begin_servers() with all that needs no client loaded. Raises Refused."""
        return self._start_servers(gpus, more, waits=True)

    def begin_servers(self, fresh: list[Server]) -> None:
        """Raises Refused with the server's own words; then none of them runs."""
        try:
            self.servers.begin(fresh)
            self.servers.wait_ready(config.start_timeout_s(), lambda: None, fresh)
        except BaseException:
            self.servers.dismiss(fresh, grace_s=0.5)
            raise

    def _start_servers(self, gpus: list[int], more: tuple[str, ...], waits: bool) -> list[Server]:
        spec, fresh = self.spec, []
        try:
            fresh = self.servers.start_all(
                self.server,
                self.folder,
                gpus,
                spec.device,
                spec.gpu_memory_bytes,
                spec.chaos,
                spec.carries_metas,
                (*(self.place.server_arguments() if self.place else ()), *more),
                waits,
            )
            word = WAITING if waits else READY
            self.servers.wait_ready(config.start_timeout_s(), lambda: None, fresh, word)
        except BaseException:
            self.servers.dismiss(fresh, grace_s=0.5)
            raise
        return fresh

    def expect_end(self) -> None:
        """The tree is about to be ended by us: that is not the job's end."""
        with self._lock:
            self._expect_end = True
            self._tree_gone.clear()

    def expect_no_end(self) -> None:
        """It was not, after all. A tree that ended in between has ended for good: the main thread looks again."""
        with self._lock:
            self._expect_end = False
            gone, status = self.root is None, self._gone_with
        if gone and status is not None:
            self._note_end(status)
            self._wake()

    def wait_tree_gone(self, timeout_s: float) -> bool:
        return self._tree_gone.wait(timeout_s)

    def await_root(self) -> None:
        """A restore begins: restored() or no_root() follows."""
        with self._lock:
            self._strangers = {}
        self._has_root.clear()

    def hold_root(self, root: int) -> int | None:
        """A pidfd of a restored root, also of one that runs already; None where it has ended."""
        with self.servers.reaping:  # until it is reaped, the number is its own
            with self._lock:
                strangers = self._strangers
                lives = root == self.root or (strangers is not None and root not in strangers)
            return os.pidfd_open(root) if lives else None

    def no_root(self) -> None:
        """The restore has failed."""
        with self._lock:
            self._strangers = None
        self._has_root.set()

    def restored(self, root: int) -> None:
        """A tree runs, and this process is its root's parent. Its end is the job's from expect_no_end() on."""
        with self._lock:
            self._expect_end = True
            self._tree_gone.clear()
            # It may have ended before it had a name here.
            status = self._strangers.pop(root, None) if self._strangers else None
            self._strangers = None
            self.root = None if status is not None else root
            self._gone_with = status
        self._has_root.set()
        if status is None:
            self.janitor.watch(root)

    def end_now(self, code: int) -> None:
        """There is no tree, and there will be none: the main thread goes on to the job's end."""
        with self._lock:
            if self.code is None:
                self.code = code
        self._wake()

    def send(self, number: int) -> None:
        """A signal for the job's main process; SIGKILL for the whole tree. Without a tree an ending signal ends the job."""
        with self._lock:
            root = self.root
        ends = number in cmd.ENDING or number == signal.SIGKILL
        self._told_to_end |= ends
        if root is None:
            if ends:
                self.end_now(128 + number)
            return
        if self._plain or number in cmd.FORWARDED or number == signal.SIGKILL:
            init.kill_tree(root, number)
            return
        for pid in proctree.children(root)[:1]:  # one that devproxy-init does not pass on
            init.kill_tree(pid, number)

    def _wake(self) -> None:
        signal.pthread_kill(self._main, signal.SIGCHLD)

    # -- main thread --------------------------------------------------------------------------------------------

    def wait(self, tick: Callable[[], float | None]) -> int:
        """Until the job has ended: passes signals on, reaps, calls tick when its last answer (seconds) is over."""
        pause = tick()
        due = None if pause is None else time.monotonic() + pause
        while True:
            self._reap()
            if self.code is not None:
                return self.code
            if due is None:
                self._on_signal(signal.sigwaitinfo(cmd.WATCHED))
                continue
            info = signal.sigtimedwait(cmd.WATCHED, max(0.0, due - time.monotonic()))
            if info is not None:
                self._on_signal(info)
            if time.monotonic() >= due:
                pause = tick()
                due = None if pause is None else time.monotonic() + pause

    def _reap(self) -> None:
        """Everybody's children: subprocess.Popen of another thread (CRIU's) then finds its child gone, which it copes
        with; CRIU says in its answer how it ended."""
        while True:
            # A verb's thread that looks for a server meanwhile must find it running or its status noted.
            with self.servers.reaping:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return
                if pid == 0:
                    return
                with self._lock:
                    is_root = pid == self.root
                    expected = self._expect_end
                    if is_root:
                        self.root = None
                        self._gone_with = status
                    elif not self.servers.note_exit(pid, status) and self._strangers is not None:
                        self._strangers[pid] = status
            if not is_root:
                continue
            self._tree_gone.set()
            if not expected:
                self._note_end(status)

    def _note_end(self, status: int) -> None:
        left = None if self._plain else init.read_status(self.folder.path)
        if left is not None:
            self.code, self.stragglers = left
        else:
            self.code = cmd.shell_status(status)

    def _on_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCHLD:
            return
        terminal = self.stdio.terminal
        if number == signal.SIGWINCH and terminal:
            terminal.note_size()
        if number == signal.SIGCONT and terminal:
            terminal.take()
        reached_it_already = self._plain and self._plain.shares_group and info.si_code == 0x80
        if not reached_it_already:
            self._we_stopped_it = number == signal.SIGTSTP
            self.send(number)
        if number == signal.SIGTSTP:
            self._stop_ourselves()

    def _stop_ourselves(self) -> None:
        """As the shell around us expects; SIGCONT is passed on."""
        if self.stdio.terminal:
            self.stdio.terminal.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _follow_events(self) -> None:
        """Ctrl-Z stops the job inside its own terminal; our shell learns it by our own stop."""
        path = os.path.join(self.folder.path, "init.events")
        with open(os.open(path, os.O_RDWR | os.O_CLOEXEC), encoding="ascii") as events:
            for line in events:
                if line.startswith("stopped") and not self._we_stopped_it:
                    self._stop_ourselves()
                self._we_stopped_it = False

    def end(self, ours: frozenset[int]) -> int:
        """After wait(): what the command left running ends with it. Returns how many processes had to be told."""
        if self._plain:
            return self._plain.end_stragglers(ours, self.servers.note_exit)
        # Killed while it was being restored: the tree that is about to run belongs to nobody.
        self._has_root.wait(RESTORE_ENDS_S)
        with self._lock:
            root = self.root
        if root is not None:
            init.kill_tree(root)
            try:
                os.waitpid(root, 0)
            except ChildProcessError:
                pass
        # Who was told to end must not wait for a reader that does not read.
        self.stdio.finish(GIVEN_UP_S if self._told_to_end else None)
        return self.stragglers
