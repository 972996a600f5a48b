# SPDX-License-Identifier: Apache-2.0
"""One tree of an image back to life: its servers, its files, its processes.

A list of steps, each with its undo. A step that fails is undone, then those before it, in reverse: nothing of the tree
runs then. Files that were put back stay, with the newer ones kept beside them.

The last step is apart: servers and connections between trees go on when all trees of the job stand there.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from devproxy import config, fault, folders, state
from devproxy.checkpoint import criu, criu_image, facts, image, netdiag, overlay
from devproxy.checkpoint.files import apart
from devproxy.checkpoint.files.put_back import FetchMany
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.overlay import Overlay
from devproxy.checkpoint.store import Store
from devproxy.errors import Refused
from devproxy.folders import UNSAFE_REMEDY
from devproxy.log import say
from devproxy.node import build, kin, processes, shared, staging
from devproxy.node.network import inside
from devproxy.node.stages import Stages
from devproxy.node.tree import LAST_PROCESS_S, Tree
from devproxy.proxy import server_set
from devproxy.proxy.server import Server

fault.register("restore_fetch", "the manifest is read, nothing is fetched")
fault.register(
    "restore_files", "all is fetched, the servers are there, the job's files are not put back"
)
fault.register("restore_device", "device state is fetched, no server is started")
fault.register("restore_host", "the servers have the device state, the processes are not restored")
fault.register("restore_go_on", "processes and servers are back, the servers stand still")


OVERLAYS = ".devproxy-overlays"  # what the kernel needs for them


@dataclass(frozen=True)
class Wishes:
    """How a restore differs from putting everything back as it was."""

    put_files: bool = True  # False: a copy beside a living job, whose files they are
    looked_beside: bool = False  # whoever asks has looked for living jobs that have these files
    files_dir: str = ""  # they get places of their own below it
    files_of: tuple[str, str] = ("", "")  # then: folder and id of the living job that has them
    cut_back: tuple[str, ...] = ()  # output files, which get their length back at the end
    image_job_id: str = ""  # of the job that the image is of, where this one is another
    other_device: tuple[str, str] | None = None  # the image's kind of GPU, and this restore's
    allow_other_gpu: bool = False


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Step:
    do: Callable[[], None]
    undo: Callable[[], None] = _nothing


def _end(root: int) -> None:
    """root: a pidfd. Returns when the tree is gone, or is late. The first process of a PID namespace ends last."""
    try:
        signal.pidfd_send_signal(root, signal.SIGKILL)
        poll = select.poll()
        poll.register(root, select.POLLIN)
        poll.poll(LAST_PROCESS_S * 1000)
    except ProcessLookupError:
        pass
    finally:
        os.close(root)


def _taken(sockets: Sequence[criu_image.BoundSocket]) -> list[str]:
    """Of the names and ports that the job had bound, those that another process has now."""
    found = []
    for one in sockets:
        if isinstance(one.local, tuple):
            name = "the UDP port {}:{}".format(*one.local)
        elif one.local[:1] == b"\0":
            name = f"the abstract unix socket @{os.fsdecode(one.local[1:])}"
        else:
            continue  # CRIU takes the place of a socket of this name
        if not netdiag.is_free(*one):
            found.append(f"the job has {name}, which another process has now")
    return found


class TreeRestore:
    """gpus: [k] is the machine's GPU for the tree's GPU k. In this order: prepare, go_on, settle; whoever runs it calls undo()
    after a failure of one of the first two, of this or another tree.

    Precondition: no server and no process of the tree lives; its FIFOs exist; its streams are paused or not begun.

    ready is called with the image's files before a process runs.
    """

    def __init__(
        self,
        tree: Tree,
        store: Store,
        whole: image.Image,
        part: image.TreeImage,
        gpus: list[int],
        wishes: Wishes,
        stages: Stages,
        ready: Callable[[list[FileEntry]], None],
    ) -> None:
        self.stages = stages
        self._tree, self._store, self._image, self._part = tree, store, whole, part
        self._wishes = wishes
        self._ready = ready
        self._about = f"image {whole.id}"
        self._servers = f"GPU {', '.join(map(str, gpus))}"
        self._processes = f"the processes of job {tree.spec.job}"
        self._other_gpu = False
        self._staging = ""
        self._kept_log = ""  # CRIU's, of a failure
        self._started: list[Server] = []
        self._root: int | None = None
        self._held = False  # what the processes write waits
        self._before = tree.gpus
        tree.gpus = gpus
        self._begun: list[_Step] = []
        self._overlays: list[Overlay] = []
        self._has_base = self._made_base = False  # of wishes.files_dir

    def prepare(self) -> None:
        """All but the last step. Raises what the step raised, with the stage and object in self.stages."""
        steps = [
            _Step(self._check, self._drop_files),
            _Step(self._fetch_device, self._keep_log),
            _Step(self._start_servers, self._end_servers),
            _Step(self._check_open_files),
            _Step(self._put_files),
            _Step(self._restore_processes, self._kill_processes),
        ]
        try:
            for step in steps:
                self._begun.append(step)
                step.do()
        except BaseException as error:
            self.undo()
            if isinstance(error, criu.CriuError):  # its own words are about a path that goes now
                error.remedy = f"CRIU's log is {self._kept_log}" if self._kept_log else ""
            raise

    def go_on(self) -> None:
        """After prepare(): the servers go on. The tree may have to go all the same, where another cannot go on: then the
        ranks here lose their peers, and may end before undo() comes. So the tree's end is not yet the job's."""
        self._go_on()
        staging.remove(self._staging)

    def settle(self) -> None:
        """After every tree's go_on(): the tree is the job's from here on, and so is what it has written since."""
        tree = self._tree
        self._held = False
        tree.stdio.restored()
        if tree.stdio.terminal:
            tree.send(signal.SIGWINCH)  # this one may have another size
        tree.expect_no_end()

    def undo(self) -> None:
        """Nothing of the tree runs. May be called at any time, and more than once."""
        begun, self._begun = self._begun, []
        if begun:
            self._tree.gpus = self._before
        for step in reversed(begun):
            step.undo()
        staging.remove(self._staging)

    # -- steps --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """What holds on this machine. Nothing was begun when it raises Refused."""
        if self._wishes.put_files and not self._wishes.looked_beside:
            self._look_beside()
        part, wishes = self._part, self._wishes
        put_back = {entry.path for entry in part.files if not entry.listed_only}
        findings = facts.check_restore(part.facts, put_back=put_back)
        device = self._tree.spec.device
        here = [server_set.describe(config.server_path(), device, gpu) for gpu in self._tree.gpus]
        findings += facts.check_gpus(part.facts, here, wishes.other_device, wishes.allow_other_gpu)
        self._other_gpu = bool(wishes.other_device) or facts.is_other_gpu(part.facts, here)
        refusals = [finding.text for finding in findings if finding.refuse]
        for finding in findings:
            if not finding.refuse:
                say(finding.text)
        # destroy_tcp must not reach connections that live: a twin of a running job would end that one's.
        refusals += [
            f"the connection {ends} is inside of the image and of a running job too"
            for ends in netdiag.established(self._own_tcp())
        ]
        if self._tree.place is None:
            refusals += [
                f"the job listens on {local}, where another process does so now"
                for local in netdiag.taken(part.criu.get("listeners", []))
            ]
        if refusals:
            raise Refused("; ".join(refusals[:5]))
        if wishes.files_dir:
            self._check_files_dir(wishes.files_dir)
        if wishes.put_files and (unsafe := self._tracker().unsafe(part.files)):
            raise Refused("; ".join(unsafe[:5]), UNSAFE_REMEDY)

    def _look_beside(self) -> None:
        """A copy may have begun while this job slept, or while its nodes met. Raises Refused where that has changed files.

        Where it has not yet, it may before we come to them: they are as the image has them, and are left alone.
        """
        _, _, number = self._tree.spec.job_id.partition(".")
        beside = kin.living(self._image, int(number or 0), but=self._tree.folder.name)
        for other in beside:
            kin.check_beside(other, self._image)
        if beside:
            self._wishes = replace(self._wishes, put_files=False)

    def _check_files_dir(self, base: str) -> None:
        """Raises Refused. What is made here goes with undo()."""
        mounts = [path for path, _ in self._part.facts.get("mounts", [])]
        self._check_tops(base, self._tracker().apart_needs(self._part.files), mounts)
        try:
            self._made_base = apart.make_base(base)
            self._has_base = True
            with tempfile.TemporaryDirectory(prefix=".devproxy-try-", dir=base) as place:
                one = Overlay("/", "/", *(os.path.join(place, n) for n in ("upper", "work", "at")))
                for name in one[2:]:
                    os.mkdir(name, 0o700)
                why = overlay.why_not([one])
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise Refused(
                f"--files {base}: the job's files cannot be given places there: {why}",
                "name an empty folder, or none, on a file system that an overlay can be made on (ext4, xfs, btrfs, tmpfs)",
                object=base,
            )

    def _fetch_device(self) -> None:
        self.stages.reach("fetch", "fetching", self._about)
        fault.point("restore_fetch")
        tree, need = self._tree, self._image.staged_bytes
        self._staging = staging.make(tree.folder, tree.spec.job_id, need, refuse=False)
        self._fetch = image.Fetch(self._store, self._part, self._staging, need, self._fetched)
        with self.stages.timed("fetch_device"):
            self._fetch.device()
            build.ensure(self._store, self._image)

    def _fetched(self, done: int, total: int) -> None:
        self.stages.beside("fetch", "fetching", done, total)

    def _start_servers(self) -> None:
        """They fill device memory, segments and pinned windows while the rest is fetched, and stay parked."""
        self.stages.reach("device", "starting servers with the device memory", self._servers)
        fault.point("restore_device")
        shared.remove(self._tree.folder.path)
        more = ["--restore", self._staging, "--restore-shared"]
        if self._other_gpu:
            more.append("--other-gpu")

        def fetch_processes() -> None:
            with self.stages.timed("fetch_host"):
                self._fetch.processes()

        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as pool:
            fetched = pool.submit(fetch_processes)
            with self.stages.timed("servers"):
                self._started = self._tree.start_servers(self._tree.gpus, tuple(more))
        self.stages.name, self.stages.object = "fetch", self._about
        fetched.result()

    def _end_servers(self) -> None:
        if self._started:
            self._tree.servers.dismiss(self._started, grace_s=0.5)

    def _check_open_files(self) -> None:
        """The processes' images, which name these files, have just come. None of the job's files was touched yet.

        A copy beside a living job is not looked at: it sees other files under these names, or the job's as they are.
        """
        wishes = self._wishes
        if "open" not in self._part.facts or not wishes.put_files or wishes.files_dir:
            return
        self.stages.reach("files", "looking at the job's open files", self._about)
        ours = self._tracker().may_change(self._part.files) | set(wishes.cut_back)
        images = os.path.join(self._staging, "criu")
        sockets = criu_image.bound_sockets(images)
        names = [os.fsdecode(one.local) for one in sockets if isinstance(one.local, bytes)]
        names = [name for name in names if name.startswith("/")]
        findings = facts.check_open_files(
            self._part.facts, criu_image.named_files(images), ours, names
        )
        for finding in findings:
            if not finding.refuse:
                say(finding.text)
        refusals = [finding.text for finding in findings if finding.refuse]
        if self._tree.place is None:
            refusals += _taken(sockets)
        if refusals:
            raise Refused("; ".join(refusals[:5]))

    def _put_files(self) -> None:
        """What the job wrote, as it was at the cut; what somebody else changed since is kept beside."""
        if not self._wishes.put_files:
            return
        self.stages.reach("files", "putting the job's files back", self._about)
        fault.point("restore_files")

        def fetch(entry: FileEntry, to: int) -> None:
            self._store.fetch_file(entry.refs, to, name=f"{self._about}: file {entry.path}")

        def fetch_many(files: Sequence[tuple[FileEntry, int]]) -> None:
            self._store.fetch_files(
                (entry.refs, to, f"{self._about}: file {entry.path}") for entry, to in files
            )

        if self._wishes.files_dir:
            with self.stages.timed("files"):
                self._put_apart(self._wishes.files_dir, fetch_many)
            return
        with self.stages.timed("files"):
            done = self._tracker().put_back(
                self._part.files,
                fetch,
                say,
                image_time=self._image.created,
                fetch_many=fetch_many,
            )
        for path in done.not_rolled_back:
            say(f"{path} is not part of the image and stays as it is")

    def _put_apart(self, base: str, fetch_many: FetchMany) -> None:
        over = self._tracker().put_apart(self._part.files, base, fetch_many, say)
        criu_images = os.path.join(self._staging, "criu")
        self._check_tops(base, list(over), criu_image.mount_points(criu_images))
        # Beside what has the name of a folder of the job.
        places = os.path.join(base, OVERLAYS)
        for number, (top, hides) in enumerate(over.items()):
            lower, work, at = (
                os.path.join(places, str(number), n) for n in ("lower", "work", "at")
            )
            for name in (lower, work, at):
                os.close(folders.open_folder(name, make=True, mode=0o700))
            self._overlays.append(Overlay(top, lower if hides else top, base + top, work, at))

    @staticmethod
    def _check_tops(base: str, tops: list[str], mounts: list[str]) -> None:
        """Raises Refused where a folder cannot have an overlay."""
        for top in tops:
            below = sorted({at for at in mounts if at != top and apart.is_in(at, top)})
            why = ""
            if not os.path.isdir(top):
                why = "is not there any more"
            elif below:
                why = f"has mounted file systems in it ({', '.join(below[:3])})"
            elif apart.is_in(base, top):
                why = f"has {base} in it"
            if why:
                raise Refused(
                    f"--files {base}: {top}, where the job has files, {why}: they cannot be given other places",
                    "end the job that lives, and restore without --files",
                    object=top,
                )

    def _drop_files(self) -> None:
        if self._has_base:
            apart.drop(self._wishes.files_dir, self._made_base)
            self._has_base = False

    def _tracker(self) -> FilesTracker:
        folder, job_id = self._wishes.files_of
        if folder:
            return FilesTracker(folder, state.state_dir(), job_id=job_id)
        job_id = self._wishes.image_job_id or self._tree.spec.job_id
        return FilesTracker(self._tree.folder.path, state.state_dir(), job_id=job_id)

    def _restore_processes(self) -> None:
        tree = self._tree
        self.stages.reach("host", "restoring the processes", self._processes)
        fault.point("restore_host")
        processes.forget_end(tree.folder.path)
        if not self._wishes.files_dir:
            self._ready(self._part.files)
        tree.await_root()
        for local, remote in self._own_tcp():
            netdiag.destroy_tcp(local, remote)  # in TIME_WAIT after a kill, it would keep the port
        namespace = tree.fresh_network()
        # A server that goes on lets its clients run, and the next may refuse.
        self._held = True
        tree.stdio.hold()
        with self.stages.timed("processes"):
            self._root = processes.restore(
                tree, self._part, self._staging, namespace, self._overlays
            )

    def _own_tcp(self) -> list[list[str]]:
        """Connections of the image that our network namespace may have as well; a fresh one has none."""
        pairs: list[list[str]] = self._part.criu.get("inside_tcp", [])
        return pairs if self._tree.place is None else []

    def _kill_processes(self) -> None:
        if self._root is not None and (lives := self._tree.hold_root(self._root)) is not None:
            _end(lives)
        self._tree.no_root()
        if self._held:
            self._tree.stdio.drop()
            self._held = False
        self._tree.close_network()

    def _in_network(self, action: Callable[[], object]) -> None:
        own = self._tree.network
        if own is None:
            action()
        else:
            inside(own.namespace, action)

    def _keep_log(self) -> None:
        log = os.path.join(self._staging, "criu-restore.log")
        if self._staging:
            self._kept_log = staging.keep_log(log, self._tree.spec.job)

    def _go_on(self) -> None:
        tree, tcp = self._tree, self._part.criu
        self.stages.reach("go on", "letting the servers go on", self._servers)
        fault.point("restore_go_on")
        if tcp["tcp"] == "established":
            # CRIU keeps all connections or none; those that lead outside have lost their other end.
            self._in_network(
                lambda: [netdiag.destroy_tcp(*ends) for ends in tcp.get("outside_tcp", [])]
            )
        for server in self._started:
            with tree.channel(server) as channel:
                channel.resume()
        assert self._root is not None
        tree.restored(self._root)
        tree.release_network()
