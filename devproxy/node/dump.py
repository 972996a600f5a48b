# SPDX-License-Identifier: Apache-2.0
"""One tree's part of an image, from looking for what is in the way to letting the tree go on.

In order: check, cut, write, then put (the staging folder into the store) and, for a checkpoint, thaw before it, for a
suspend end_tree after it. go_on() and close() undo whatever was stopped, from any point, and may always be called.

Threads: the methods belong to the operation's thread. CRIU runs in a thread of its own, device memory is copied in
another. CRIU's last notification, when the tree is frozen and its images are written, waits in CRIU's thread until
the operation's thread releases it: thaw and end_tree do so with the verdict None, close() with an error, on which CRIU
lets the tree go on. So no path leaves CRIU waiting.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from devproxy import fault, proctree
from devproxy.checkpoint import criu, facts, image
from devproxy.checkpoint.dumpable.check import check_tree
from devproxy.checkpoint.dumpable.verdict import Verdict
from devproxy.checkpoint.files.cut import Cut
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.writer import Writer
from devproxy.errors import CheckpointError, DevproxyError, Refused
from devproxy.node import init, scheduling, shared, staging
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.network import inside
from devproxy.node.parked import Parked, may_dump
from devproxy.node.stages import Stages
from devproxy.node.tree import LAST_PROCESS_S, Tree
from devproxy.proxy.server_set import STOP_GRACE_S

TREE_ENDS_S = 5.0  # CRIU kills it as its last act

fault.register("refuse_early", "nothing has stopped yet")
fault.register("cut", "before the servers are told to stop")
fault.register("quiesced", "servers and relays have stopped")
fault.register("device", "before device memory is copied, beside CRIU")
fault.register("freeze", "CRIU is about to freeze the tree; the freeze's limit has begun")
fault.register("frozen", "CRIU has written its images, the tree is frozen")
fault.register("thaw", "the tree runs again, servers and relays do not")
fault.register("suspend_leave", "the image is whole, the tree has ended, the servers have not")


class _Abandoned(Exception):
    """CRIU's notification raises it, so that the tree goes on."""


class TreeDump:
    """See participant.Dump.

    leave: the tree and its servers end when the image is whole (suspend).
    """

    def __init__(
        self,
        tree: Tree,
        tracker: FilesTracker,
        previous_files: list[FileEntry],
        stages: Stages,
        *,
        leave: bool,
        strict: bool,
    ) -> None:
        self.stages = stages
        self.warnings: list[str] = []
        self.freeze_s = 0.0
        self.files: list[FileEntry] = []
        self._tree = tree
        self._tracker = tracker
        self._previous_files = previous_files
        self._leave = leave
        self._strict = strict
        self._parked = Parked(tree)
        self._name = f"job {tree.spec.job}"
        self._servers = f"GPU {', '.join(str(s.gpu) for s in tree.servers.members)}"
        self._processes = f"the processes of {self._name}"
        self._staging = ""
        self._files_dir = ""
        self._files_cut: Cut | None = None
        self._facts: dict[str, Any] = {}
        self._stdio: dict[str, Any] = {}
        self._tcp: dict[str, Any] = {}
        self._criu = _Criu(tree.spec.freeze_limit_s, self._processes)
        self._begun_s = 0.0
        self._ends_tree = False

    @property
    def still_s(self) -> float:
        return self._parked.still_s

    # -- before anything has stopped ----------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that can be known to be in the way is named here. Raises Refused."""
        tree, spec = self._tree, self._tree.spec
        with self.stages.at("refuse_early", "looking for what cannot be stored", self._name):
            fault.point("refuse_early")
            criu.find()
            if tree.root is None or not tree.lives():
                raise Refused(f"job {spec.job} has no processes any more", "the job has ended")
            known = {tree.stdio.stdin_pipe} if tree.stdio.stdin_pipe else set()
            verdict = self._look(tree.root, known)
            self.warnings += [warning.text for warning in verdict.warnings]
            unsafe = self._tracker.unsafe()
            self.warnings += [f"a restore will refuse this image: {why}" for why in unsafe[:5]]
            if verdict.refusals:
                raise Refused(
                    "; ".join(obstacle.text for obstacle in verdict.refusals[:5]),
                    "the job continues",
                )
            self._tcp = {
                "tcp": verdict.tcp,
                "inside_tcp": verdict.inside_tcp,
                "listeners": verdict.listeners,
                "outside_tcp": [(one.local, one.remote) for one in verdict.outside_tcp],
            }
            answers = may_dump(tree)
            device_bytes = sum(
                client["live_bytes"] + client["pinned_bytes"]
                for answer in answers
                for client in answer["clients"]
            )
            host_bytes = image.resident_bytes(tree.root)
            self._facts = facts.collect(tree.root, tree.lib, job_dir=init.mount_point())
            clients = [client for answer in answers for client in answer["clients"]]
            self._facts["ranks"] = sum(client.get("ranked", False) for client in clients)
            self._facts["gpus"] = [facts.gpu_of(answer) for answer in answers]
            self._staging = staging.make(
                tree.folder, spec.job_id, device_bytes + host_bytes, refuse=True
            )
            self._files_dir = staging.make_for_files(
                self._staging, spec.job_id, self._changed_bytes()
            )
            self._files_cut = self._tracker.prepare(
                self._files_dir,
                previous=self._previous_files,
                files_max=spec.files_max_bytes,
            )

    def _look(self, root: int, known_pipes: set[int]) -> Verdict:
        tree = self._tree
        own = tree.network

        def look() -> Verdict:
            return check_tree(
                root,
                tree.folder.path,
                strict=self._strict,
                known_pipes=known_pipes,
                network=tree.place.network if tree.place else "",
            )

        return look() if own is None else inside(own.namespace, look)

    def _changed_bytes(self) -> int:
        """Of files that will be copied."""
        total = 0
        if self._tree.root is not None:
            self._tracker.mention_open(self._tree.root)
        for path in self._tracker.changed():
            try:
                size = os.lstat(path).st_size
            except OSError:
                continue
            total += size if size <= self._tree.spec.files_max_bytes else 0
        return total

    # -- the job stands still -----------------------------------------------------------------------------------

    def ranks(self) -> list[dict[str, Any]]:
        return self._parked.ranks()

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        return self._parked.barrier(comm, attempt)

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._parked.aim(reports)

    def hold(self) -> list[dict[str, Any]]:
        return self._parked.hold()

    def withhold(self) -> Still:
        return self._parked.withhold()

    def mark(self, number: int) -> Marked:
        return self._parked.mark(number)

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        return self._parked.agree(reports)

    def lift(self) -> None:
        self._parked.lift()

    def cut(self, wait_ms: int) -> None:
        """The servers stop between two messages and drain; then our relays stop."""
        text = "waiting for the moment of least device memory"
        with self.stages.at("cut", text, self._servers):
            self._parked.open()
            fault.point("cut")
            asked_s = time.monotonic()
            self._parked.cut(wait_ms)
            # All trees' networks are held before the first of them is written, and until all are.
            self._tree.hold_network()
            self.stages.took("cut_wait", asked_s, asked_s + self._parked.waited_s)
            self._parked.pause_relays()
        fault.point("quiesced")

    def write(self) -> None:
        """Everything into the staging folder. Returns with the tree frozen.

        Device memory is copied while CRIU writes the tree; what both share follows while the tree is frozen.
        """
        tree, root = self._tree, self._tree.root
        if root is None:
            raise CheckpointError("host", "the job has ended", "", "the job has ended")
        self._begun_s = time.monotonic()
        killed_before = proctree.killed(root)
        self.stages.reach("host", "writing the processes", self._processes)
        device = _Beside("dump-device", self._copy_device)
        try:
            self._criu.start(lambda frozen: self._run_criu(root, frozen))
            self._criu.wait_frozen()
        except criu.CriuError as error:
            # The tree runs again: its parent may have waited for a process that was killed, but CRIU has named it.
            self._refuse_killed(error.killed() | (proctree.killed(root) - killed_before))
            raise
        finally:
            device.join()
        frozen_from = time.monotonic()
        if device.failure:
            self.stages.name, self.stages.object = "device", self._servers
            raise device.failure
        if not tree.lives():
            # What it left running was frozen while devproxy-init ended it. The image would be the newest whole one,
            # and no job could be restored from it.
            raise CheckpointError("host", "the job's command has ended", object=self._processes)
        # Say a loader worker by the OOM killer, while its parent stood still: the parent does not know yet, and will
        # end of it, in each job that is restored from such an image.
        self._refuse_killed(proctree.killed(root) - killed_before)
        fault.point("frozen")
        self._criu.check()
        self._facts["threads"] = scheduling.collect(root)
        with self.stages.at(
            "shared", "copying what the job shares with its servers", self._servers
        ):
            for channel in self._parked.channels:
                channel.dump_shared(self._staging)
        files_of = f"the files of {self._name}"
        with self.stages.at("files", "copying the files that the job wrote", files_of):
            self._tracker.mention_open(root)
            self.files = self._tracker.snapshot(self._files_dir, cut=self._files_cut)
        self._stdio = (
            tree.stdio.describe()
        )  # which takes what is left in the FIFOs: nobody writes now
        self._criu.check()
        if self._leave:  # it is stored while the tree is frozen, however long that takes
            self._criu.limit_ends()
        self.stages.took("while_frozen", frozen_from, time.monotonic())  # not CRIU's own

    def _refuse_killed(self, killed: set[int]) -> None:
        if killed:
            names = f"process {', '.join(map(str, sorted(killed)))}"
            raise CheckpointError(
                "host",
                f"{names} of the job was killed while the image was taken",
                "take the image again, if the job lives on without it",
                object=names,
            )

    def _copy_device(self) -> None:
        self.stages.beside("device", "copying device memory")
        with self.stages.timed("device"):
            fault.point("device")
            self._parked.dump(self._staging)

    def _run_criu(self, root: int, frozen: Callable[[], None]) -> criu.DumpFacts:
        return criu.find().dump(
            root,
            os.path.join(self._staging, "criu"),
            on_freeze=self._on_freeze,
            on_frozen=frozen,
            give_up=self._criu.give_up,
            leave_running=not self._leave,
            tcp=self._tcp["tcp"],
            network=self._tree.network.inode if self._tree.network else 0,
            mount_at=init.mount_point(),
            work_log=os.path.join(self._staging, "criu-dump.log"),
        )

    def _on_freeze(self) -> None:
        self._tree.stdio.make_room()
        self._criu.limit_begins()

    def _release(self) -> None:
        """CRIU ends: the tree runs, or has ended."""
        self.stages.reach(
            "host", "writing the processes", self._processes
        )  # what fails now is CRIU again
        self.freeze_s = self._criu.release().frozen_s
        try:
            self._tracker.keep_state()
        except OSError as error:  # the next look keeps it
            self.warnings.append(f"the state of the job's files cannot be kept: {error}")
        self.stages.took("host", self._begun_s, time.monotonic())

    # -- into the store -----------------------------------------------------------------------------------------

    def put_share(self, writer: Writer, number: int, of: int) -> None:
        """Raises StoreError or OSError."""
        image.put_share(writer, self._staging, number, of)

    def put(self, writer: Writer, report: Callable[[int, int], None]) -> dict[str, Any]:
        """The tree's entry in the manifest. Raises StoreError or OSError."""
        part = image.TreePart(
            self._staging,
            socket.gethostname(),
            self._tree.gpus,
            self.files,
            self._stdio,
            self._facts,
            self._tcp,
        )
        return image.put_tree(writer, part, report)

    # -- the job goes on, or ends -------------------------------------------------------------------------------

    def thaw(self) -> None:
        self._release()
        self.stages.reach("thaw", "letting the job go on", self._servers)
        fault.point("thaw")
        self.go_on()

    def end_tree(self) -> None:
        """Precondition: the image is whole. From here on the tree ends, and that is not the job's end."""
        self._tree.expect_end()
        self._ends_tree = True
        self._release()

    def tree_has_ended(self) -> bool:
        """After end_tree() failed: did the tree end all the same?"""
        return self._ends_tree and self._tree.wait_tree_gone(TREE_ENDS_S)

    def leave(self) -> None:
        """The tree is gone, the servers go, their files too."""
        tree = self._tree
        with self.stages.at("leave", "ending the servers", self._servers):
            if not tree.wait_tree_gone(LAST_PROCESS_S):
                raise CheckpointError("leave", "the job's processes did not end", "", "unknown")
            grace_s = STOP_GRACE_S
            leaving = list(tree.servers.members)
            try:
                fault.point("suspend_leave")
                tree.servers.retire(leaving)
                self._parked.leave()
            except (OSError, DevproxyError) as error:
                grace_s = 0.0  # the image has all that they hold
                self.warnings.append(f"a server did not leave and was killed: {error}")
            self._parked.close()
            tree.servers.dismiss(leaving, grace_s)
            tree.stdio.discard_input()
            tree.close_network()
            shared.remove(tree.folder.path)
            self._parked.go_on()  # the relays

    def go_on(self) -> None:
        """Whatever still stands, goes on."""
        self._criu.abandon()
        self._tree.release_network()
        self._parked.go_on()
        self.warnings += self._parked.warnings
        self._parked.warnings = []

    def close(self, error: BaseException | None) -> None:
        """The end, however it came: nothing stands still, nothing is left. CRIU's log of a failure is kept and named."""
        self.go_on()
        if isinstance(error, criu.CriuError):
            kept = staging.keep_log(error.log, self._tree.spec.job)
            error.remedy = f"CRIU's log is {kept}" if kept else ""
        if error is not None and self._leave:
            self._tree.expect_no_end()
        staging.remove(self._files_dir, self._staging)


class _Beside:
    """A thread whose failure is asked for when it has ended."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._action = action
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self.failure = error

    def join(self) -> None:
        self._thread.join()


class _Criu:
    """CRIU in a thread, which waits with a frozen tree until it is released or abandoned.

    The freeze has a limit, whoever is in the way: after it a timer's thread abandons CRIU, and the tree goes on at once.
    """

    def __init__(self, limit_s: float, processes: str) -> None:
        self.give_up = threading.Event()
        self._limit_s, self._processes = limit_s, processes
        self._timer: threading.Timer | None = None
        self._overdue = False
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()  # frozen, or ended
        self._released = threading.Event()
        self._abandoned = False
        self._result: criu.DumpFacts | None = None
        self._failure: BaseException | None = None

    def start(self, run: Callable[[Callable[[], None]], criu.DumpFacts]) -> None:
        def work() -> None:
            try:
                self._result = run(self._frozen)
            except BaseException as error:
                self._failure = error
            self._stopped.set()

        self._thread = threading.Thread(target=work, name="criu", daemon=True)
        self._thread.start()

    def limit_begins(self) -> None:
        """In CRIU's thread, right before the freeze; again where CRIU tries again."""
        self.limit_ends()
        self._timer = threading.Timer(self._limit_s, self._too_long)
        self._timer.daemon = True
        self._timer.start()
        fault.point("freeze")

    def limit_ends(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _too_long(self) -> None:
        self._overdue = self._abandoned = True
        self.give_up.set()
        self._released.set()

    def check(self) -> None:
        """Raises where the tree was let go, so that what is read of it now does not fit what was."""
        if self._overdue:
            raise DevproxyError(
                f"{self._processes} stood frozen for {self._limit_s:g} s, which is the limit",
                "is a disk or the machine slow? another limit: devproxy-run --freeze-limit TIME",
                object=self._processes,
            )

    def _frozen(self) -> None:
        """CRIU's notification, in its thread."""
        self._stopped.set()
        self._released.wait()
        if self._abandoned:
            raise _Abandoned

    def wait_frozen(self) -> None:
        """Raises what CRIU failed with."""
        self._stopped.wait()
        self.check()
        if self._failure:
            raise self._failure

    def release(self) -> criu.DumpFacts:
        assert self._thread is not None
        self._released.set()
        self._thread.join()
        self.limit_ends()
        self.check()
        if self._failure:
            raise self._failure
        assert self._result is not None
        return self._result

    def abandon(self) -> None:
        """Lets the tree go on, where it still stands."""
        if self._thread is None:
            return
        if not self._released.is_set():
            self._abandoned = True
            self._released.set()
        self._thread.join()
        self.limit_ends()
