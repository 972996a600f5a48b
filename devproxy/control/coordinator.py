# SPDX-License-Identifier: Apache-2.0
"""The coordinator of one job: the only writer of its phase, and of its images' manifest.

A job is one or more trees (node/participant.py). A checkpoint, in order: refuse early, cut, dump (device beside host),
thaw, store, finish. The job stands still from the cut to the thaw; everything that can wait (hashing, compressing,
uploading) comes after it. A suspend stores while the trees are still frozen, so that nothing is ended before its image
is whole.

Threads: verbs come from the service's threads and from periodic(); _verb lets one of them through at a time. The phase
is written under it, and read by anyone. _telling is held over what the other nodes are told, so that they hear it in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn

from devproxy import fault, records, state
from devproxy.checkpoint import image, store
from devproxy.checkpoint.errors import DamagedPack, ImageError, StoreError
from devproxy.checkpoint.manifest import Image as StoredImage
from devproxy.checkpoint.writer import Writer
from devproxy.control import barrier
from devproxy.control import coordinator_api as api
from devproxy.control.agreement import Outcome
from devproxy.control.operation import Operation, each, still_s, words
from devproxy.control.pace import Pace
from devproxy.control.remote import RemoteTree
from devproxy.errors import (
    CheckpointError,
    DevproxyError,
    MigrateError,
    OperationFailed,
    Refused,
    ResizeError,
    RestoreError,
    SuspendError,
    object_of,
)
from devproxy.log import say
from devproxy.node.history import History, Span
from devproxy.node.participant import Dump, Move, Participant, Restoring
from devproxy.node.restore import Wishes
from devproxy.node.spec import JobSpec, parse_every
from devproxy.node.stages import Report, Stages
from devproxy.node.together import all_of

LEARNT_WAIT = -1  # for the server: two periods of its allocation trace
STEP_POLL_S = 0.1
FINISH_POLL_S = 0.05
STORE_TRIES = 3  # of one image, each of which may find another damaged pack
NOT_ROOT = (
    "an image needs root: CRIU could not restore one of another user, whatever its capabilities"
)

fault.register("agree", "nothing has stopped, before the ranks are asked for a common point")
fault.register("upload", "before the first chunk goes into the store")
fault.register("before_commit", "all chunks are in the store, the manifest is not")
fault.register("after_commit", "the image is whole, the coordinator has not noted it")
fault.register("prune", "before old images are removed")


class _ImageOperation(Operation):
    """One image on its way."""

    def __init__(
        self,
        spec: JobSpec,
        trees: list[Participant],
        leave: bool,
        strict: bool,
        report: Report,
        record: History,
    ) -> None:
        super().__init__("suspend" if leave else "checkpoint", spec.job, report, record)
        self.leave = leave
        self.dumps: list[Dump] = [
            tree.dump(self.stages.part(), leave=leave, strict=strict) for tree in trees
        ]
        self.whole = ""  # the image, as soon as it is one
        self.facts: api.ImageFacts | None = None

    def all_warnings(self) -> list[str]:
        return [*self.warnings, *(text for dump in self.dumps for text in dump.warnings)]


def is_root() -> bool:
    return os.geteuid() == 0


class JobCoordinator:
    """See coordinator_api.Coordinator.

    phase: RUNNING for a job whose trees run, RESTORING for one that restore() brings back. lib: its build's folder.
    opened: its store, where that is open already.
    """

    def __init__(
        self,
        spec: JobSpec,
        trees: list[Participant],
        *,
        lib: str,
        phase: str = api.RUNNING,
        opened: store.Store | None = None,
    ) -> None:
        self._spec = spec
        self._trees = trees
        self._lib = lib
        self.record = History()
        self._phase = ""
        self._in_phase: object | None = None
        self._verb = threading.Lock()
        self._verb_name = ""
        self._ended = threading.Event()
        self._opened = opened
        self._last_image = ""
        # Whole ones of this job in its store. The lock is held from a look at the store to what follows from it: an image that is
        # committed meanwhile is added behind that.
        self._images: set[str] = set()
        self._images_lock = threading.Lock()
        self._image_problem = ""  # of the newest one
        self._sequence = 0  # of images within the epoch, also of those that came to nothing
        self._created_unix_s = 0.0  # what the last image's clock said
        self._last_error = ""
        self._still_s, self._stored_bytes, self._failures = 0.0, 0, 0
        self._epoch: int | None = None
        self._next_unix_s: float | None = None
        self._suspended_image = ""
        self._failed: set[str] = set()  # names of nodes
        self._is_periodic = False  # the image that is being taken
        self._pace = Pace()
        self._token = os.urandom(32).hex()  # servers of this job know one another by it
        self._key = os.urandom(32).hex()  # what they encrypt with, if they do
        self._last_cut = ""
        self._telling = threading.Lock()
        self._told, self._told_number = api.JobNews(), 0
        self._enter(phase)

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return api.ENDING if any(tree.has_ended() for tree in self._trees) else self._phase

    @property
    def gpus(self) -> list[int]:
        """[k]: the machine's GPU behind the job's GPU k, tree after tree."""
        return [gpu for tree in self._trees for gpu in tree.gpus]

    def _enter(self, phase: str) -> None:
        """The job's phase from now on. Only the verb's thread calls it."""
        if self._in_phase is not None:
            if phase == self._phase:
                return
            self.record.end(self._in_phase)
        self._phase = phase
        self._in_phase = self.record.begin("phase", phase)
        self.tell_nodes()

    def tell_nodes(self) -> None:
        """The other nodes hear how the job is, where that has changed. Asks and waits for nobody: a node that does not answer
        is in no verb's way."""
        others = [tree for tree in self._trees if isinstance(tree, RemoteTree)]
        if not others:
            return
        with self._telling:
            ended = any(
                tree.was_ended() if isinstance(tree, RemoteTree) else tree.has_ended()
                for tree in self._trees
            )
            phase = api.ENDING if ended else self._phase
            news = api.JobNews(phase, len(self._images), self._last_image, self._last_error)
            if news == self._told:
                return
            self._told, self._told_number = news, self._told_number + 1
            for tree in others:
                tree.tell(self._told_number, news)

    def _each_once(self, gpus: list[int]) -> bool:
        """Does each tree get each GPU at most once?"""
        shares = _shares(gpus, [len(tree.gpus) for tree in self._trees])
        return all(len(set(one)) == len(one) for one in shares)

    def status(self) -> api.JobStatus:
        spec = self._spec
        return api.JobStatus(
            job=spec.job,
            job_id=spec.job_id,
            phase=self.phase,
            device=spec.device,
            gpus=self.gpus,
            pid=os.getpid(),
            command=spec.command,
            started_unix_s=spec.started_unix_s,
            images=len(self._images),
            last_image=self._last_image,
            image_problem=self._image_problem,
            last_error=self._last_error,
            still_s=self._still_s,
            stored_bytes=self._stored_bytes,
            failures=self._failures,
            next_checkpoint_unix_s=self._next_unix_s,
            checkpointable=not self._why_no_image(),
            why_not=self._why_no_image(),
            steps=self._pace.steps,
            step_s=self._pace.step_s,
            here=self._trees[0].gpus,
            nodes=[tree.about() for tree in self._trees] if len(self._trees) > 1 else [],
            last_cut=self._last_cut,
        )

    def history(self, since_ns: int) -> list[Span]:
        return self.record.since(since_ns)

    def elsewhere(self) -> list[api.NodeServers]:
        phase = self.phase
        return [tree.servers(phase) for tree in self._trees if isinstance(tree, RemoteTree)]

    def _why_not(self) -> str:
        if self._spec.plain:
            return "the job runs without namespaces (--plain, or no privilege for them)"
        return ""

    def _why_no_image(self) -> str:
        """CRIU 4.2.1 dumps a job for a user with capabilities, and fails to restore it: an image that is none."""
        if self._spec.files_dir:
            return f"its files lie in {self._spec.files_dir} (restore --files), of which an image knows nothing"
        return self._why_not() or ("" if is_root() else NOT_ROOT)

    def _alive(self) -> bool:
        return all(tree.lives() for tree in self._trees)

    def _has_processes(self) -> bool:
        return all(tree.has_processes() for tree in self._trees)

    def _lost_servers(self) -> str:
        """Which servers have ended under the job, and how; "" for none."""
        return ", ".join(filter(None, (tree.lost_servers() for tree in self._trees)))

    # -- verbs --------------------------------------------------------------------------------------------------

    def checkpoint(
        self,
        *,
        cut_wait_ms: int | None,
        strict: bool,
        report: Report,
        periodic: bool = False,
    ) -> api.ImageFacts:
        with self._one_verb("checkpoint", {api.RUNNING}):
            self._is_periodic = periodic
            return self._take_image(False, cut_wait_ms, strict, report)

    def check(self, *, strict: bool, report: Report) -> list[str]:
        last_error = self._last_error
        with self._one_verb("check", {api.RUNNING}):
            strict = strict or self._spec.strict
            op = _ImageOperation(self._spec, self._trees, False, strict, report, self.record)
            try:
                self._look(op)
            finally:
                for dump in op.dumps:
                    dump.close(None)
        self._last_error = last_error  # a check that passes repairs nothing: the error stays
        return op.all_warnings()

    def suspend(self, *, strict: bool, cut_wait_ms: int | None, report: Report) -> api.ImageFacts:
        with self._one_verb("suspend", {api.RUNNING}):
            return self._take_image(True, cut_wait_ms, strict, report)

    def resume(self, *, gpus: list[int] | None, report: Report) -> None:
        with self._one_verb("resume", {api.SUSPENDED}):
            if gpus is not None and len(gpus) != len(self.gpus):
                raise Refused(
                    f"job {self._spec.job} has {len(self.gpus)} GPU(s), {len(gpus)} given",
                    "name as many, one for each of the job's; the job is still suspended",
                )
            self._enter(api.RESTORING)
            stages = Stages(report, "manifest", f"image {self._suspended_image}", self.record)
            try:
                if self._epoch is not None:
                    self._store().check_epoch(self._spec.job_id, self._epoch)
                stages.say("reading the manifest")
                whole = image.load(self._store(), self._suspended_image)
                self._restore_trees(whole, gpus or self.gpus, Wishes(), stages)
            except BaseException as error:
                self._enter(api.SUSPENDED)
                now = "it is still suspended"
                if type(error) is Refused and stages.name == "manifest":
                    remedy = f"{error.remedy}; {now}" if error.remedy else now
                    raise Refused(error.what, remedy, object=error.object) from None
                self._restore_failed(error, stages, self._suspended_image, now)
            self._suspended_image = ""
            self._enter(api.RUNNING)

    def restore(
        self,
        whole: image.Image,
        gpus: list[int],
        wishes: Wishes,
        stages: Stages,
        before_it_runs: Callable[[], None],
    ) -> None:
        """Brings the job back from an image. Only a coordinator that was made for a restore runs it, as its first verb.

        before_it_runs is called when the processes live and their streams have not begun. If this raises, nothing of the
        job runs.
        """
        assert self._phase == api.RESTORING
        self._last_image, self._created_unix_s = whole.id, whole.created
        try:
            self._restore_trees(whole, gpus, wishes, stages)
        except BaseException as error:
            self._restore_failed(error, stages, whole.id, "nothing of it runs")
        # Not before it runs: a restore that fails must not make a job that lives elsewhere stale.
        try:
            self._epoch = self._store().take_epoch(self._spec.job_id)
        except StoreError as error:  # read-only, or full: an image can be read all the same
            say(
                f"{error.what}: until this job's first image, a copy that runs elsewhere goes on taking images of it"
            )
        before_it_runs()
        self._enter(api.RUNNING)
        records.has_image(self._spec.job, whole.id, self._store().url)
        with suppress(OSError, DevproxyError):  # it shows at the next image
            self.count_images()

    def count_images(self) -> None:
        """Those of the job that its store has: somebody else may have removed some, or found damage. Raises StoreError, OSError."""
        with self._images_lock:
            self._note_images(self._store().images_of(self._spec.job_id))

    def _note_images(self, of_job: list[StoredImage]) -> None:
        """The newest last. _images_lock is held."""
        whole = [one.id for one in of_job if one.whole]
        gone = self._images.difference(whole)
        self._images = set(whole)
        newest = of_job[-1] if of_job and not of_job[-1].whole else None
        self._image_problem = f"image {newest.id} is not whole: {newest.problem}" if newest else ""
        if self._last_image in gone and not self._suspended_image:
            self._last_image = whole[-1] if whole else ""

    def migrate(self, *, to: list[int], report: Report, anew: bool = False) -> dict[str, Any]:
        with self._one_verb("migrate", {api.RUNNING}):
            count = len(self.gpus)
            if len(to) != count or not self._each_once(to):
                raise Refused(
                    f"job {self._spec.job} has {count} GPU(s): --to needs as many, each once on its host",
                    "the job continues",
                )
            return self._move("migrate", to, report, MigrateError, anew)

    def resize(
        self, *, gpus: list[int], report: Report, onto: list[int] | None = None
    ) -> dict[str, Any]:
        with self._one_verb("resize", {api.RUNNING}):
            count = len(self.gpus)
            if onto:
                return self._resize_onto(onto, gpus, report)
            if len(gpus) != count:
                raise Refused(
                    f"job {self._spec.job} sees {count} GPU(s), and goes on to: --gpus needs {count} numbers, {len(gpus)} given",
                    f"name one of the machine's for each of the job's, as {','.join(['0'] * count)}; the job continues",
                )
            return self._move("resize", gpus, report, ResizeError)

    def _resize_onto(self, onto: list[int], gpus: list[int], report: Report) -> dict[str, Any]:
        """devproxy chooses which of the job's GPUs go where: on each host, on its GPUs of these numbers."""
        problem = ""
        if gpus:
            problem = "--gpus and --onto exclude each other"
        elif len(set(onto)) != len(onto):
            problem = "--onto names a GPU twice"
        elif len(onto) > (fewest := min(len(tree.gpus) for tree in self._trees)):
            on_a_host = " on one of its hosts" if len(self._trees) > 1 else ""
            problem = (
                f"--onto names {len(onto)} GPUs, and job {self._spec.job} sees {fewest}{on_a_host}"
            )
        if problem:
            remedy = "name each GPU of the machine once, or use --gpus; the job continues"
            raise Refused(problem, remedy)
        places = [tree.place(onto) for tree in self._trees]
        to = [gpu for place, _ in places for gpu in place]
        # A guess that says they are where they should be is no reason to leave them there.
        guessed = not all(known for _, known in places)
        return self._move("resize", to, report, ResizeError, anew=guessed, onto=onto)

    def kill(self, number: int) -> None:
        for tree in self._trees:
            tree.send(number)

    def follow_log(self, offset: int) -> Iterator[bytes]:
        return follow_log(self._spec.job, offset, self._ended)

    def finish_image(self, code: int, interrupted: Callable[[], None]) -> None:
        """The job's command has ended with that exit code; its servers have not. Waits while an image is uploaded.

        A periodic image of a job that ended well is not waited for: nobody needs it. interrupted: raises to give the image up.
        """
        # Dumped: the command has ended between the thaw and the next phase.
        if self._phase not in (api.DUMPED, api.COMMITTING) or (self._is_periodic and code == 0):
            return
        say(
            f"job {self._spec.job} has ended with exit code {code}; waiting until its image is in store {self._store().url}"
            " (Ctrl-C gives the image up)"
        )
        while self._verb.locked():
            interrupted()
            time.sleep(FINISH_POLL_S)

    def end(self) -> None:
        """The job has ended. A verb that still runs fails on its own, since its servers and trees are gone."""
        self._ended.set()
        for tree in self._trees:
            tree.end(has_image=bool(self._last_image), asleep=bool(self._suspended_image))

    @contextmanager
    def _one_verb(self, name: str, phases: set[str]) -> Iterator[None]:
        spec = self._spec
        if not self._verb.acquire(blocking=False):
            raise Refused(
                f"{name} of job {spec.job}: a {self._verb_name} of it is under way",
                "try again when that has ended; the job continues",
            )
        try:
            if (phase := self.phase) not in phases:
                lost = self._lost_servers() if phase == api.ENDING else ""
                raise Refused(
                    f"{name} of job {spec.job}: {lost and lost + ', so '}the job is {phase}",
                    f"it can be done while the job is {' or '.join(sorted(phases))}",
                )
            if why := self._why_not():
                raise Refused(f"{name} of job {spec.job}: {why}", "see: devproxy doctor")
            self._verb_name = name
            with self.record.during("verb", name):
                yield
            self._last_error = ""
        except Refused:
            raise  # its caller knows, and nothing is wrong with the job
        except DevproxyError as error:
            self._last_error = str(error)
            self._failures += 1
            raise
        finally:
            self._verb.release()
            self.tell_nodes()

    def _store(self) -> store.Store:
        if self._opened is None:
            self._opened = store.Store.open(self._spec.store)
        return self._opened

    # -- an image -----------------------------------------------------------------------------------------------

    def _take_image(
        self, leave: bool, wait_ms: int | None, strict: bool, report: Report
    ) -> api.ImageFacts:
        if wait_ms is None:
            wait_ms = self._spec.cut_wait_ms
        op = _ImageOperation(
            self._spec, self._trees, leave, strict or self._spec.strict, report, self.record
        )
        error: BaseException | None = None
        try:
            self._refuse_early(op)
            self._enter(api.CUTTING)
            outcome = self._agree(op, op.dumps, wait_ms)
            wait = LEARNT_WAIT if wait_ms is None else wait_ms
            # Ranks that are held are at the moment of least memory, or come to none any more.
            op.each(op.dumps, lambda dump: dump.cut(0 if outcome.ranks else wait))
            self._enter(api.QUIESCED)
            op.each(op.dumps, lambda dump: dump.write())
            self._flush(op, op.dumps, outcome)
            self._enter(api.DUMPED)
            if leave:
                self._store_image(op)
                op.each(op.dumps, lambda dump: dump.end_tree())
                self._end_servers(op)
            else:
                op.each(op.dumps, lambda dump: dump.thaw())
                self._enter(api.COMMITTING)
                self._store_image(op)
        except BaseException as caught:
            error = caught
            if all(dump.tree_has_ended() for dump in op.dumps):
                error = self._suspended_all_the_same(op, caught)
        return self._finish(op, error)

    def _agree(
        self, op: Operation, parts: Sequence[barrier.Part], aim_ms: int | None = 0
    ) -> Outcome:
        """The ranks come to where the job may be cut."""

        def chose(way: str) -> None:
            op.stages.beside("instead" if chosen else "barrier", way)
            chosen.append(way)

        chosen: list[str] = []
        with op.stages.at("agree", "waiting for a point that all ranks have come to", op.name):
            fault.point("agree")
            outcome = barrier.acquire(parts, self._spec.barrier, chose, aim_ms=aim_ms)
        if chosen:
            self._last_cut = f"{chosen[-1]}; {outcome.seconds:.2f} s"
        return outcome

    @staticmethod
    def _flush(op: Operation, parts: Sequence[barrier.Part], outcome: Outcome) -> None:
        """Every tree knows what the dumps have taken back."""
        if outcome.takes_back:
            with op.stages.at("flush", "waiting for what the trees have said", op.name):
                barrier.flush(parts, op.stages.name)

    def _refuse_early(self, op: _ImageOperation) -> None:
        """Nothing has stopped yet. Everything that can be known to be in the way is named here."""
        self._look(op)
        if self._epoch is None:
            self._epoch = self._store().take_epoch(self._spec.job_id)
        self._store().check_epoch(self._spec.job_id, self._epoch)

    def _look(self, op: _ImageOperation) -> None:
        if why := self._why_no_image():
            raise Refused(
                f"{self._verb_name} of job {self._spec.job}: {why}", "see: docs/operators.md"
            )
        op.each(op.dumps, lambda dump: dump.check())

    def _suspended_all_the_same(
        self, op: _ImageOperation, why: BaseException
    ) -> BaseException | None:
        """The image is whole and the trees have ended: whatever failed in between, the job is suspended."""
        op.warnings.append(f"{op.stages.name}: {why}")
        try:
            self._end_servers(op)
        except BaseException as error:
            return error
        return None

    def _end_servers(self, op: _ImageOperation) -> None:
        """After a suspend's commit: the processes are gone, the servers go."""
        self._suspended_image = self._last_image
        try:
            op.each(op.dumps, lambda dump: dump.leave())
        except BaseException:
            self._suspended_image = ""
            raise

    def _store_image(self, op: _ImageOperation) -> None:
        """Hash, compress, upload; the manifest is the last thing written."""
        for tries_left in reversed(range(STORE_TRIES)):
            try:
                summary, sizes = self._upload(op)
                break
            except DamagedPack as error:
                # The staged data is still there, and the next upload does not rely on that pack.
                if not tries_left:
                    raise
                op.stages.beside("upload", f"once more: pack {error.pack} is damaged")
        spec, stages = self._spec, op.stages
        about = f"image {summary.id} in store {spec.store}"
        op.facts = api.ImageFacts(
            id=summary.id,
            job=spec.job,
            job_id=spec.job_id,
            created_unix_s=summary.created,
            device_bytes=sizes["device"],
            host_bytes=sizes["host"],
            shared_bytes=sizes["shared"],
            files_bytes=sizes["file"],
            new_bytes=sizes["new"],
            deduplicated_bytes=sizes["deduplicated"],
            stored_bytes=sizes["stored"],
            total_s=stages.elapsed_s(),
            store=spec.store,
        )
        with self._images_lock:
            self._images.add(summary.id)
            self._image_problem = ""
        records.has_image(spec.job, summary.id, self._store().url)
        self._look_at_clock(op, summary.created)
        stages.reach("after the commit", "removing old images", about)
        fault.point("after_commit")
        try:
            fault.point("prune")
            with self._images_lock:
                found = self._store().images_of(spec.job_id)
                gone = self._store().prune(
                    spec.job_id, keep=spec.keep, committed=summary.id, images=found
                )
                self._note_images([one for one in found if one.id not in gone])
        except (OSError, DevproxyError) as error:
            op.warnings.append(f"old images were not removed: {error}")

    def _upload(self, op: _ImageOperation) -> tuple[StoredImage, dict[str, Any]]:
        """One try. Raises DamagedPack where another one helps."""
        assert self._epoch is not None
        spec, stages = self._spec, op.stages
        stages.name, stages.object = "upload", f"store {spec.store}"
        with self._store().writer(image.new_id(spec.job)) as writer:
            about = f"image {writer.image_id} in store {spec.store}"
            with stages.at("upload", "storing", about):
                fault.point("upload")
                if (of := len(op.dumps)) > 1:
                    all_of([partial(d.put_share, writer, n, of) for n, d in enumerate(op.dumps)])
                    writer.flush()
                    writer.look_again()
                trees = all_of([partial(self._put, dump, writer, stages) for dump in op.dumps])
                if len(trees) > 1:
                    writer.look_again()  # other hosts have put chunks
                build = image.put_build(writer, self._lib)
            with stages.at("commit", "writing the manifest", about):
                fault.point("before_commit")
                costs = {
                    "still_s": still_s(op.dumps),
                    "freeze_s": max(dump.freeze_s for dump in op.dumps),
                    "total_s": stages.elapsed_s(),
                    "stages": stages.seconds,
                }
                self._sequence += 1
                body = image.manifest(
                    trees,
                    build,
                    spec=spec.as_json(),
                    epoch=self._epoch,
                    sequence=self._sequence,
                    costs=costs,
                    warnings=op.all_warnings(),
                )
                try:
                    summary = writer.commit(body)
                finally:
                    if writer.whole:
                        op.whole = self._last_image = writer.image_id
                self._say_renewed(op, writer)
                return summary, writer.sizes()

    @staticmethod
    def _say_renewed(op: _ImageOperation, writer: Writer) -> None:
        if writer.renewed:
            op.warnings.append(
                f"pack {', '.join(sorted(writer.renewed)[:3])} of the store is damaged, or was changed since it was written:"
                " what this image needs of it was stored anew. devproxy images verify says which images are whole"
            )

    def _look_at_clock(self, op: _ImageOperation, created_unix_s: float) -> None:
        before, self._created_unix_s = self._created_unix_s, created_unix_s
        if created_unix_s < before:
            op.warnings.append(
                f"the clock was set back: this image's time is {before - created_unix_s:.0f} s before that of the image"
                " before it; images are kept in the order in which they were taken"
            )

    @staticmethod
    def _put(dump: Dump, writer: Writer, stages: Stages) -> dict[str, Any]:
        return dump.put(writer, lambda done, total: stages.say("storing", done, total))

    def _finish(self, op: _ImageOperation, error: BaseException | None) -> api.ImageFacts:
        """Decides how the operation ends.

        no error                    checkpoint: the job runs on. suspend: it is suspended, its image whole.
        error before the commit     everything that was stopped goes on; the image does not exist.
        error after it (suspend)    the image is whole and stays; the job runs on where its trees still live.
        the job ended meanwhile     the error says so; the last image stands.
        """
        for dump in op.dumps:
            dump.close(error)
        self._still_s += still_s(op.dumps)
        self._stored_bytes += op.facts.stored_bytes if op.facts else 0
        if error is None and not op.leave and (gone := self._lost_servers()):
            remedy = f"devproxy restore {self._spec.job}"
            error = CheckpointError("thaw", gone, remedy, object=op.dumps[0].stages.object)
        if error is None:
            assert op.facts is not None
            for tree, dump in zip(self._trees, op.dumps, strict=True):
                tree.dumped(dump)
            self._enter(api.SUSPENDED if op.leave else api.RUNNING)
            # A suspend's facts were made while the trees were still frozen.
            return replace(
                op.facts,
                total_s=op.stages.elapsed_s(),
                still_s=still_s(op.dumps),
                freeze_s=max(dump.freeze_s for dump in op.dumps),
                stages=op.stages.seconds,
                warnings=op.all_warnings(),
            )
        alive = self._alive()
        lost = self._lost_servers() if alive else ""
        if self._has_processes():
            self._enter(api.RUNNING)
        now = "the job continues" if alive else "the job has ended"
        if lost:
            now = f"{lost}, so the job ends"
        if op.whole:
            now += f"; image {op.whole} is whole"
        elif self._last_image:
            now += f"; its last whole image is {self._last_image}"
        if isinstance(error, Refused) and op.stages.name == "refuse_early":
            raise error
        if not isinstance(error, Exception):
            raise error
        what, remedy = words(error)
        failed = SuspendError if op.leave else CheckpointError
        stage = error.stage if isinstance(error, OperationFailed) else op.stages.name
        raise failed(stage, what, remedy, now, object_of(error) or op.stages.object) from error

    # -- migrate and resize -------------------------------------------------------------------------------------

    def _move(
        self,
        verb: str,
        to: list[int],
        report: Report,
        failed: type[MigrateError],
        anew: bool = False,
        onto: list[int] | None = None,
    ) -> dict[str, Any]:
        """A fresh server takes over from each old one; the job's processes are not touched. If the job is on these GPUs
        already, only `anew` makes it move. onto: the GPUs that `to` was guessed from."""
        spec, before = self._spec, self.gpus
        if to == before and not anew:
            return {"gpus": to, "from_gpus": before, "still_s": 0.0}
        op = Operation(verb, spec.job, report, self.record)
        shares = _shares(to, [len(tree.gpus) for tree in self._trees])
        moves: list[Move] = [
            tree.move(share, op.stages.part(), onto)
            for tree, share in zip(self._trees, shares, strict=True)
        ]
        error: BaseException | None = None
        try:
            op.each(moves, lambda move: move.check())
            self._enter(api.CUTTING)
            outcome = self._agree(op, moves)
            op.each(moves, lambda move: move.cut())
            self._enter(api.QUIESCED)
            op.each(moves, lambda move: move.copy())
            self._flush(op, moves, outcome)
            op.each(moves, lambda move: move.start())
            self.introduce()
            op.each(moves, lambda move: move.hand_over())
        except BaseException as caught:
            error = caught
        for move in moves:
            move.close()
        if error is not None:
            self._introduce_again()
        self._still_s += still_s(moves)
        if self._has_processes():
            self._enter(api.RUNNING)
        if error is None and (gone := self._lost_servers()):
            stage = moves[0].stages.name
            error = failed(stage, gone, f"devproxy restore {spec.job}")
        if error is None:
            seconds = {f"{stage}_s": took for stage, took in op.stages.seconds.items()}
            return {"gpus": self.gpus, "from_gpus": before, "still_s": still_s(moves), **seconds}
        if isinstance(error, Refused) and op.stages.name == "refuse_early":
            raise error
        if not isinstance(error, Exception):
            raise error
        lost = self._lost_servers()
        at = ", ".join(map(str, self.gpus))
        state_now = "the job continues on its old GPU"
        if any(move.handed_over for move in moves):
            state_now = f"the job continues on GPU {at}"
        if not self._alive():
            state_now = "the job has ended"
        elif lost:
            state_now = f"{lost}, so the job ends"
        if self._last_image:
            state_now += f"; its last whole image is {self._last_image}"
        what, remedy = words(error)
        about = object_of(error) or op.stages.object
        raise failed(op.stages.name, what, remedy, state_now, about) from error

    # -- restore ------------------------------------------------------------------------------------------------

    def _restore_trees(
        self, whole: image.Image, gpus: list[int], wishes: Wishes, stages: Stages
    ) -> None:
        """All trees side by side; the image's trees are this job's, in their order."""
        shares = _shares(gpus, [len(tree.gpus) for tree in whole.trees])
        parts: list[Restoring] = [
            tree.restore(self._store(), whole, number, share, wishes, stages.part())
            for number, (tree, share) in enumerate(zip(self._trees, shares, strict=True))
        ]
        try:
            each(stages, parts, lambda part: part.prepare())
            self.introduce()
            each(stages, parts, lambda part: part.go_on())
        except BaseException:
            for part in reversed(parts):
                part.undo()
            raise
        for part in parts:
            part.settle()

    def introduce(self, check: bool = True) -> None:
        """Tells all servers where those of the other trees are. Only a job of several trees has such.

        Raises Refused where two trees are on a GPU that takes one, if `check`; nobody is told then."""
        if len(self._trees) < 2:
            return
        lines = [f"token {self._token}"]
        if self._spec.encrypt_data:
            lines.append(f"key {self._key}")
        has: dict[str, tuple[str, int]] = {}  # by GPU: who
        for number, tree in enumerate(self._trees):
            found = [address.split() for address in tree.addresses()]
            lines.append(" ".join(["tree", str(number), str(len(found)), *(a for a, *_ in found)]))
            for gpu, (_, *uuids) in enumerate(found):
                for uuid in uuids:
                    name, theirs = has.setdefault(uuid, (tree.name, gpu))
                    if name != tree.name and check:
                        raise Refused(
                            f"GPU {theirs} of {name} and GPU {gpu} of {tree.name} are the same one, and NCCL takes one node for each",
                            "give every node GPUs of its own (--gpu)",
                        )
        table = "".join(line + "\n" for line in lines)
        all_of([partial(tree.meet, table) for tree in self._trees])

    def _introduce_again(self) -> None:
        """Some servers were told of successors that are gone."""
        try:
            self.introduce(check=False)
        except (OSError, ValueError, DevproxyError) as why:
            say(
                f"the servers of job {self._spec.job} could not be told where the others are: {why}"
            )

    def _restore_failed(
        self, error: BaseException, stages: Stages, image_id: str, now: str
    ) -> NoReturn:
        """Raises the error, with the image to use instead if this one is damaged. now: the job's state."""
        if isinstance(error, RestoreError):
            error.state = now
            raise error
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, Refused) and stages.name == "manifest":
            raise error  # nothing was begun
        what, remedy = words(error)
        if isinstance(error, ImageError):
            try:
                older = self._store().older_whole(image_id, stages.say)
                self.count_images()
            except (DevproxyError, OSError):
                older = None
            remedy = (
                f"use the older whole image: {older}" if older else "there is no older whole image"
            )
        about = object_of(error) or stages.object
        raise RestoreError(stages.name, what, remedy, now, about) from error

    # -- periodic -----------------------------------------------------------------------------------------------

    def periodic(self) -> None:
        """Runs until the job ends: notes the state of its files, counts its steps, takes images when they are due."""
        spec = self._spec
        seconds, steps = parse_every(spec.every) if spec.every else (0.0, 0)
        for tree in self._trees:
            tree.begin()
        next_image = time.monotonic() + seconds
        last_steps = 0
        while not self._ended.wait(STEP_POLL_S if steps else 0.5):
            for tree in self._trees:
                tree.look()
            self.tell_nodes()  # what no verb has changed: a node's end, images that somebody removed
            self._say_who_has_failed()
            if self.phase != api.RUNNING:
                self._next_unix_s = None
                self._pace.forget()
                continue
            if (seconds or steps) and (lost := self._lost_servers()):
                seconds, steps = 0.0, 0
                self._next_unix_s = None
                self._say_no_more_images(lost)
            try:
                self._pace.look(time.monotonic(), self._trees[0].steps())
            except (OSError, DevproxyError, IndexError):
                pass  # between two servers, or at the end
            if steps:
                if self._pace.steps // steps > last_steps // steps:
                    last_steps = self._pace.steps
                    self._due()
            elif seconds:
                now = time.monotonic()
                if now >= next_image:
                    next_image = now + seconds
                    self._next_unix_s = None
                    self._due()
                self._next_unix_s = time.time() + max(0.0, next_image - time.monotonic())

    def _say_who_has_failed(self) -> None:
        """Without a launcher that looks after all nodes, the others' ranks may wait for those for ever."""
        if len(self._trees) < 2 or all(tree.has_ended() for tree in self._trees):
            return
        for tree in self._trees:
            if tree.code and tree.name not in self._failed:
                self._failed.add(tree.name)
                say(
                    f"{tree.name}: its command has ended with exit code {tree.code}; "
                    f"the commands of the other nodes go on until they end, or Ctrl-C or devproxy kill {self._spec.job}"
                )

    def _say_no_more_images(self, lost: str) -> None:
        """The job's processes may go on for a while, but what they had on that GPU is gone."""
        job, last = self._spec.job, self._last_image
        remedy = (
            f"its last whole image is {last}: devproxy restore {job}" if last else "it has none"
        )
        say(f"no more images of job {job}: {lost}; {remedy}")

    def _due(self) -> None:
        try:
            facts = self.checkpoint(
                cut_wait_ms=None, strict=False, report=lambda _: None, periodic=True
            )
        except DevproxyError as error:
            if not self._ended.is_set() and self._alive():
                self._last_error = str(error)
                say(f"no image now: {error}")
            return
        except OSError as error:
            say(f"no image now: {error}; the job continues")
            return
        for warning in facts.warnings:
            say(warning)


def follow_log(job: str, offset: int, ended: threading.Event) -> Iterator[bytes]:
    """See coordinator_api.Coordinator."""
    path = state.log_path(job)
    if not os.path.exists(path):
        return
    log = open(path, "rb")  # noqa: SIM115  # closed where the next part takes its place
    try:
        log.seek(offset)
        over = False
        while True:
            replaced = _is_replaced(log.fileno(), path)
            piece = log.read(1 << 16)
            if piece:
                yield piece
            elif replaced:  # it was long (node/transcript.py), and all of it is read
                log.close()
                log = open(path, "rb")  # noqa: SIM115
            elif over:
                return
            else:
                over = ended.wait(0.1)  # what was written until then is still read
                yield b""  # a reader that went away is noticed
    finally:
        log.close()


def _is_replaced(fd: int, path: str) -> bool:
    try:
        return not os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False  # between two parts


def _shares(gpus: list[int], sizes: list[int]) -> list[list[int]]:
    """The job's GPUs, tree by tree."""
    rest = iter(gpus)
    return [list(islice(rest, size)) for size in sizes]
