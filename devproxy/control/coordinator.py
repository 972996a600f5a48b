"""The coordinator of one job: the only writer of its phase.

A checkpoint, in order: refuse early, cut, dump (device beside host), thaw, store, finish. The job stands still from the
cut to the thaw; everything that can wait (hashing, compressing, uploading) comes after it. A suspend stores while the
tree is still frozen, so that nothing is ended before its image is whole.

Threads: verbs come from the service's threads and from periodic(); _verb lets one of them through at a time. Phase is
written under it.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from devproxy import fault, machine, proctree, state
from devproxy.checkpoint import criu, dumpable, facts, image, store
from devproxy.checkpoint.files import FanotifyWatch, FileEntry, FilesTracker
from devproxy.control import coordinator_api as api
from devproxy.control import restore, tree
from devproxy.control.job import Job
from devproxy.control.spec import parse_every
from devproxy.errors import (
    CheckpointError,
    DevproxyError,
    MigrateError,
    OperationFailed,
    Refused,
    RestoreError,
    SuspendError,
    object_of,
)
from devproxy.log import say
from devproxy.proxy.control_channel import ControlChannel
from devproxy.proxy.server import Server
from devproxy.proxy.supervisor import STOP_GRACE_S

DRAIN_MS = 10_000  # without progress
LEARNT_WAIT = -1  # for the server: two periods of its allocation trace
NOTE_S = 2.0  # how often the state of the job's files is noted
STEP_POLL_S = 0.1
DYING_S = 1.0  # between a server's hanging up and its end
TREE_ENDS_S = 5.0  # CRIU kills it as its last act
MARGIN_BYTES = 256 << 20
_OLD_GPU = "the job continues on its old GPU"

fault.register("refuse_early", "nothing has stopped yet")
fault.register("cut", "before the servers are told to stop")
fault.register("quiesced", "servers and relays have stopped")
fault.register("device", "before device memory is copied, beside CRIU")
fault.register("frozen", "CRIU has written its images, the tree is frozen")
fault.register("thaw", "the tree runs again, servers and relays do not")
fault.register("upload", "before the first chunk goes into the store")
fault.register("before_commit", "all chunks are in the store, the manifest is not")
fault.register("after_commit", "the image is whole, the coordinator has not noted it")
fault.register("prune", "before old images are removed")
fault.register("suspend_leave", "the image is whole, the tree has ended, the servers have not")
fault.register("migrate_start", "device memory is copied, the new servers are not started")
fault.register("migrate_hand_over", "the new servers are ready, the old ones have not left")


class _Operation:
    """One image on its way."""

    def __init__(
        self, job: Job, verb: str, leave: bool, strict: bool, wait_ms: int, report: api.Report
    ):
        self.verb = verb
        self.name = f"job {job.spec.job}"
        self.servers = f"GPU {', '.join(str(s.gpu) for s in job.supervisor.servers)}"
        self.object = self.name  # what the stage works on
        self.whole = ""  # the image, as soon as it is one
        self.leave = leave
        self.strict = strict
        self.wait_ms = wait_ms
        self.stage = "refuse_early"
        self.stages: dict[str, float] = {}
        self.warnings: list[str] = []
        self.started = time.monotonic()
        self.stood_still_from: float | None = None
        self.still_s = 0.0
        self.freeze_s = 0.0
        self.dumped_device_s = 0.0
        self.killed_before: set[int] = set()
        self.parked: list[ControlChannel] = []
        self.relays_paused = False
        self.ends_tree = False  # a suspend whose image is whole: CRIU ends the tree
        self.staging = ""
        self.files_dir = ""
        self.host_facts: dict[str, Any] = {}
        self.tcp: dict[str, Any] = {}
        self.parts: image.Parts | None = None
        self.facts: api.ImageFacts | None = None
        self._report = report

    def say(self, text: str, done: int = 0, total: int = 0) -> None:
        self._report(api.Progress(self.stage, text, done, total))

    def beside(self, stage: str, text: str) -> None:
        """News of a stage that runs beside the one that errors are about."""
        self._report(api.Progress(stage, text))

    def reach(self, stage: str, text: str, object: str) -> None:
        """Names the stage, and what it works on, for errors."""
        self.stage = stage
        self.object = object
        self.say(text)

    @contextmanager
    def at(self, stage: str, text: str, object: str) -> Iterator[None]:
        """The same, and adds its time."""
        self.reach(stage, text, object)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.stages[stage] = self.stages.get(stage, 0.0) + time.monotonic() - begin


class JobCoordinator:
    """See coordinator_api.Coordinator."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._verb = threading.Lock()
        self._verb_name = ""
        self._ended = threading.Event()
        self._opened: store.Store | None = None
        self._last_image = ""
        self._images = 0
        self._last_error = ""
        self._epoch: int | None = None
        self._next_unix_s: float | None = None
        self._previous_files: list[FileEntry] = []
        self._began = False
        self._suspended_image = ""
        self._steps = 0
        self.tracker = FilesTracker(job.folder.path, state.state_dir(), job_id=job.spec.job_id)
        self._watch = FanotifyWatch(self.tracker, lambda: job.root or 0, lambda text: None)

    def adopt(self, image_id: str, files: list[FileEntry]) -> None:
        """Before a restored process runs: what the image says is where this job goes on."""
        self._last_image, self._previous_files = image_id, files
        self.tracker.adopt(files)

    def take_epoch(self) -> None:
        """From here on the job is this one, and images of another that claims to be it are refused."""
        self._epoch = self._store().take_epoch(self._job.spec.job_id)

    # -- facts --------------------------------------------------------------------------------------------------

    def status(self) -> api.JobStatus:
        job, spec = self._job, self._job.spec
        return api.JobStatus(
            job=spec.job,
            job_id=spec.job_id,
            phase=job.phase,
            device=spec.device,
            gpus=spec.gpus,
            pid=os.getpid(),
            command=spec.command,
            started_unix_s=spec.started_unix_s,
            images=self._images,
            last_image=self._last_image,
            last_error=self._last_error,
            next_checkpoint_unix_s=self._next_unix_s,
            checkpointable=not self._why_not(),
            why_not=self._why_not(),
            steps=self._steps,
        )

    def _why_not(self) -> str:
        if self._job.spec.plain:
            return "the job runs without namespaces (--plain, or no privilege for them)"
        return ""

    # -- verbs --------------------------------------------------------------------------------------------------

    def checkpoint(
        self, *, cut_wait_ms: int | None, strict: bool, report: api.Report
    ) -> api.ImageFacts:
        with self._one_verb("checkpoint", {api.RUNNING}):
            return self._take_image("checkpoint", False, cut_wait_ms, strict, report)

    def suspend(
        self, *, strict: bool, cut_wait_ms: int | None, report: api.Report
    ) -> api.ImageFacts:
        with self._one_verb("suspend", {api.RUNNING}):
            return self._take_image("suspend", True, cut_wait_ms, strict, report)

    def resume(self, *, gpus: list[int] | None, report: api.Report) -> None:
        with self._one_verb("resume", {api.SUSPENDED}):
            job = self._job
            if gpus is not None and len(gpus) != len(job.spec.gpus):
                raise Refused(
                    f"job {job.spec.job} has {len(job.spec.gpus)} GPU(s), {len(gpus)} given",
                    "name as many; the job is still suspended",
                )
            job.phase = api.RESTORING
            before = job.spec.gpus
            try:
                if self._epoch is not None:
                    self._store().check_epoch(job.spec.job_id, self._epoch)
                job.spec.gpus = gpus or before
                restore.into(
                    job,
                    self._store(),
                    self._suspended_image,
                    report,
                    put_files=True,
                    ready=self.tracker.adopt,
                )
            except BaseException as error:
                job.spec.gpus = before
                job.phase = api.SUSPENDED
                now = "it is still suspended"
                if isinstance(error, RestoreError):
                    error.state = now
                elif isinstance(error, OSError | DevproxyError) and not isinstance(error, Refused):
                    what, remedy = _words(error)
                    name = f"job {job.spec.job}"
                    raise RestoreError(
                        "manifest", what, remedy, now, object_of(error) or name
                    ) from error
                raise
            self._suspended_image = ""
            job.phase = api.RUNNING

    def migrate(self, *, to: list[int], report: api.Report) -> dict[str, Any]:
        with self._one_verb("migrate", {api.RUNNING}):
            return self._migrate(to, report)

    def kill(self, number: int) -> None:
        self._job.send(number)

    def follow_log(self, offset: int) -> Iterator[bytes]:
        path = state.log_path(self._job.spec.job)
        if not os.path.exists(path):
            return
        with open(path, "rb") as log:
            log.seek(offset)
            ended = False
            while True:
                piece = log.read(1 << 16)
                if piece:
                    yield piece
                elif ended:
                    return
                else:
                    ended = self._ended.wait(0.1)  # what was written until then is still read
                    yield b""  # a reader that went away is noticed

    def end(self) -> None:
        """The job has ended. A verb that still runs fails on its own, since its servers and tree are gone."""
        self._ended.set()
        self._watch.stop()
        # A restore that failed has not written the files as they are now; nor has a job that sleeps.
        if self._began and not self._suspended_image:
            try:
                if self._last_image:
                    self.tracker.note_state(ended=True)
                else:
                    self.tracker.forget()
            except (OSError, DevproxyError) as error:
                say(f"the state of the job's files cannot be kept: {error}")

    @contextmanager
    def _one_verb(self, name: str, phases: set[str]) -> Iterator[None]:
        spec = self._job.spec
        if not self._verb.acquire(blocking=False):
            raise Refused(
                f"{name} of job {spec.job}: a {self._verb_name} of it is under way",
                "try again when that has ended; the job continues",
            )
        try:
            if self._job.phase not in phases:
                raise Refused(
                    f"{name} of job {spec.job}: the job is {self._job.phase}",
                    f"it can be done while the job is {' or '.join(sorted(phases))}",
                )
            if why := self._why_not():
                raise Refused(f"{name} of job {spec.job}: {why}", "see: devproxy doctor")
            self._verb_name = name
            yield
        except DevproxyError as error:
            self._last_error = str(error)
            raise
        finally:
            self._verb.release()

    def _store(self) -> store.Store:
        if self._opened is None:
            self._opened = store.Store.open(self._job.spec.store)
        return self._opened

    # -- an image -----------------------------------------------------------------------------------------------

    def _take_image(
        self, verb: str, leave: bool, wait_ms: int | None, strict: bool, report: api.Report
    ) -> api.ImageFacts:
        if wait_ms is None:
            wait_ms = self._job.spec.cut_wait_ms
        op = _Operation(
            self._job,
            verb,
            leave,
            strict or self._job.spec.strict,
            LEARNT_WAIT if wait_ms is None else wait_ms,
            report,
        )
        error: BaseException | None = None
        try:
            self._refuse_early(op)
            self._cut(op)
            self._dump(op)
            if not leave:
                self._thaw(op)
                self._store_image(op)
            else:
                self._leave(op)
        except BaseException as caught:
            error = caught
            if op.ends_tree and self._job.wait_tree_gone(TREE_ENDS_S):
                error = self._suspended_all_the_same(op, caught)
        return self._finish(op, error)

    def _suspended_all_the_same(self, op: _Operation, why: BaseException) -> BaseException | None:
        """The image is whole and the tree has ended: whatever failed in between, the job is suspended."""
        op.warnings.append(f"{op.stage}: {why}")
        try:
            self._leave(op)
        except BaseException as error:
            return error
        return None

    def _refuse_early(self, op: _Operation) -> None:
        """Nothing has stopped yet. Everything that can be known to be in the way is named here."""
        job = self._job
        with op.at("refuse_early", "looking for what cannot be stored", op.name):
            fault.point("refuse_early")
            criu.find()
            if job.root is None or not self._alive():
                raise Refused(f"job {job.spec.job} has no processes any more", "the job has ended")
            known = {job.stdio.stdin_pipe} if job.stdio.stdin_pipe else set()
            verdict = dumpable.check_tree(
                job.root, job.folder.path, strict=op.strict, known_pipes=known
            )
            op.warnings += [warning.text for warning in verdict.warnings]
            if verdict.refusals:
                raise Refused(
                    "; ".join(obstacle.text for obstacle in verdict.refusals[:5]),
                    "the job continues",
                )
            op.tcp = {
                "tcp": verdict.tcp,
                "inside_tcp": verdict.inside_tcp,
                "outside_tcp": [(one.local, one.remote) for one in verdict.outside_tcp],
            }
            device_bytes, gpus = 0, []
            for server in job.supervisor.servers:
                answer = self._ask(server, "can_dump")
                gpus.append(facts.gpu_of(answer))
                if answer["refusals"]:
                    raise Refused(
                        f"GPU {server.gpu}: {'; '.join(answer['refusals'])}", "the job continues"
                    )
                device_bytes += sum(c["live_bytes"] + c["pinned_bytes"] for c in answer["clients"])
            host_bytes = image.resident_bytes(job.root)
            op.killed_before = proctree.killed(job.root)
            op.host_facts = facts.collect(job.root, job.lib, job_dir=restore.mount_point())
            op.host_facts["gpus"] = gpus
            op.staging = self._make_staging(device_bytes + host_bytes)
            op.files_dir = self._make_files_dir(op.staging)
            if self._epoch is None:
                self._epoch = self._store().take_epoch(job.spec.job_id)
            self._store().check_epoch(job.spec.job_id, self._epoch)

    def _make_staging(self, need_bytes: int) -> str:
        """In memory where there is plenty of it, else on disk."""
        path = os.path.join(self._job.folder.path, "staging")
        available = machine.available_memory_bytes()
        space = shutil.disk_usage(self._job.folder.path).free
        if min(available // 2, space) < need_bytes + MARGIN_BYTES:
            path = os.path.join(state.subfolder("staging"), self._job.spec.job_id)
            if shutil.disk_usage(os.path.dirname(path)).free < need_bytes + MARGIN_BYTES:
                raise Refused(
                    f"neither memory nor {os.path.dirname(path)} has room for"
                    f" {machine.show_bytes(need_bytes)} of this job's state",
                    "free some, or set DEVPROXY_STATE_DIR; the job continues",
                )
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(os.path.join(path, "criu"), mode=0o700)
        return path

    def _make_files_dir(self, staging: str) -> str:
        """For copies of the job's files, which may be many times its memory: then on disk."""
        total = 0
        if self._job.root is not None:
            self.tracker.mention_open(self._job.root)
        for path in self.tracker.changed():
            try:
                size = os.lstat(path).st_size
            except OSError:
                continue
            total += size if size <= self._job.spec.files_max_bytes else 0
        folder = os.path.join(staging, "files")
        if total > MARGIN_BYTES:
            folder = os.path.join(state.subfolder("staging"), f"{self._job.spec.job_id}-files")
            if shutil.disk_usage(os.path.dirname(folder)).free < total + MARGIN_BYTES:
                raise Refused(
                    f"{os.path.dirname(folder)} has no room for copies of"
                    f" {machine.show_bytes(total)} of files that the job wrote",
                    "free some, or start the job with a smaller --files-max; the job continues",
                )
            shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    def _cut(self, op: _Operation) -> None:
        """The servers stop between two messages and drain; then our relays stop."""
        job = self._job
        job.phase = api.CUTTING
        with op.at("cut", "waiting for the moment of least device memory", op.servers):
            channels = [self._channel(server) for server in job.supervisor.servers]
            op.parked = channels
            fault.point("cut")
            # All at once: each learns its own least, and none should wait for another's.
            answers = _all([partial(c.cut, op.wait_ms, DRAIN_MS) for c in channels])
            op.stood_still_from = (
                time.monotonic() - max((a["drained_us"] for a in answers), default=0) / 1e6
            )
            op.stages["cut_wait"] = max((a["waited_us"] for a in answers), default=0) / 1e6
            op.relays_paused = True
            job.stdio.prepare()
        job.phase = api.QUIESCED
        fault.point("quiesced")

    def _dump(self, op: _Operation) -> None:
        """Device memory is copied while CRIU writes the tree; what both share follows while the tree is frozen."""
        job = self._job
        failed: list[BaseException] = []

        def copy_device() -> None:
            begin = time.monotonic()
            try:
                op.beside("device", "copying device memory")
                fault.point("device")
                _all([partial(c.dump, op.staging) for c in op.parked])
            except BaseException as error:
                failed.append(error)
            op.dumped_device_s = time.monotonic() - begin

        device = threading.Thread(target=copy_device, name="dump-device")

        def while_frozen() -> None:
            begin = time.monotonic()
            device.join()
            if failed:
                op.stage, op.object = "device", op.servers
                raise failed[0]
            if not self._alive():
                # What it left running was frozen while devproxy-init ended it. The image would be the newest whole one,
                # and no job could be restored from it.
                raise CheckpointError("host", "the job's command has ended", object=processes)
            assert root is not None
            if killed := proctree.killed(root) - op.killed_before:
                # Say a loader worker by the OOM killer, while its parent stood still: the parent does not know yet, and
                # will end of it, in each job that is restored from such an image.
                names = f"process {', '.join(map(str, sorted(killed)))}"
                raise CheckpointError(
                    "host",
                    f"{names} of the job was killed while the image was taken",
                    "take the image again, if the job lives on without it",
                    object=names,
                )
            fault.point("frozen")
            with op.at("shared", "copying what the job shares with its servers", op.servers):
                for channel in op.parked:
                    channel.dump_shared(op.staging)
            with op.at("files", "copying the files that the job wrote", f"the files of {op.name}"):
                self.tracker.mention_open(root)
                entries = self.tracker.snapshot(
                    op.files_dir,
                    previous=self._previous_files,
                    files_max=job.spec.files_max_bytes,
                )
            op.parts = image.Parts(op.staging, entries, job.stdio.describe(), op.host_facts)
            op.stages["while_frozen"] = time.monotonic() - begin  # what is not CRIU's own
            if op.leave:
                self._store_image(op)
                job.expect_end()
                op.ends_tree = True
            writing()  # what fails now is CRIU again

        processes = f"the processes of {op.name}"
        writing = partial(op.reach, "host", "writing the processes", processes)
        root = job.root
        if root is None:
            raise CheckpointError("host", "the job has ended", "", "the job has ended")
        with op.at("host", "writing the processes", processes):
            device.start()
            try:
                dumped = criu.find().dump(
                    root,
                    os.path.join(op.staging, "criu"),
                    on_freeze=job.stdio.make_room,
                    on_frozen=while_frozen,
                    leave_running=not op.leave,
                    tcp=op.tcp["tcp"],
                    mount_at=restore.mount_point(),
                    work_log=os.path.join(op.staging, "criu-dump.log"),
                )
            finally:
                device.join()
            op.freeze_s = dumped.frozen_s
            op.stages["device"] = op.dumped_device_s
        job.phase = api.DUMPED

    def _thaw(self, op: _Operation) -> None:
        op.reach("thaw", "letting the job go on", op.servers)
        fault.point("thaw")
        self._go_on(op)
        self._job.phase = api.COMMITTING

    def _go_on(self, op: _Operation) -> None:
        """The servers and relays go on, as far as they were stopped."""
        for channel in op.parked:
            try:
                channel.resume()
            except (OSError, DevproxyError) as error:
                op.warnings.append(f"a server did not go on: {error}")
                same = [s for s in self._job.supervisor.servers if s.gpu == channel.gpu]
                self._job.supervisor.wait_gone(same, DYING_S)
            channel.close()
        op.parked = []
        if op.relays_paused:
            self._job.stdio.go_on()
            op.relays_paused = False
        if op.stood_still_from is not None:
            op.still_s = time.monotonic() - op.stood_still_from
            op.stood_still_from = None

    def _store_image(self, op: _Operation) -> None:
        """Hash, compress, upload; the manifest is the last thing written."""
        job = self._job
        assert op.parts is not None
        assert self._epoch is not None
        op.stage, op.object = "upload", f"store {job.spec.store}"
        opened = self._store()
        with opened.writer(image.new_id(job.spec.job)) as writer:
            about = f"image {writer.image_id} in store {job.spec.store}"
            with op.at("upload", "storing", about):
                fault.point("upload")
                image.put(
                    writer,
                    op.parts,
                    job.lib,
                    lambda done, total: op.say("storing", done, total),
                )
            with op.at("commit", "writing the manifest", about):
                fault.point("before_commit")
                costs = {
                    "still_s": op.still_s,
                    "freeze_s": op.freeze_s,
                    "total_s": time.monotonic() - op.started,
                    "stages": op.stages,
                }
                body = image.manifest(
                    op.parts,
                    spec=job.spec.as_json(),
                    epoch=self._epoch,
                    criu=op.tcp,
                    costs=costs,
                    warnings=op.warnings,
                )
                try:
                    summary = writer.commit(body)
                finally:
                    if writer.whole:
                        op.whole = self._last_image = writer.image_id
                sizes = writer.sizes()
        op.facts = api.ImageFacts(
            id=summary.id,
            job=job.spec.job,
            job_id=job.spec.job_id,
            created_unix_s=summary.created,
            device_bytes=sizes["device"],
            host_bytes=sizes["host"],
            shared_bytes=sizes["shared"],
            files_bytes=sizes["file"],
            new_bytes=sizes["new"],
            deduplicated_bytes=sizes["deduplicated"],
            stored_bytes=sizes["stored"],
            still_s=op.still_s,
            freeze_s=op.freeze_s,
            total_s=time.monotonic() - op.started,
            stages=op.stages,
            warnings=op.warnings,
            store=job.spec.store,
        )
        self._previous_files = op.parts.files
        self._images += 1
        op.reach("after the commit", "removing old images", about)
        fault.point("after_commit")
        try:
            fault.point("prune")
            self._store().prune(job.spec.job_id, keep=job.spec.keep)
        except (OSError, DevproxyError) as error:
            op.warnings.append(f"old images were not removed: {error}")

    def _leave(self, op: _Operation) -> None:
        """After a suspend's commit: the tree is gone, the servers go, their files too."""
        job = self._job
        with op.at("leave", "ending the servers", op.servers):
            if not job.wait_tree_gone(10):
                raise CheckpointError("leave", "the job's processes did not end", "", "unknown")
            self._suspended_image = self._last_image
            grace_s = STOP_GRACE_S
            try:
                fault.point("suspend_leave")
                for channel in op.parked:
                    channel.leave()
            except (OSError, DevproxyError) as error:
                grace_s = 0.0  # the image has all that they hold
                op.warnings.append(f"a server did not leave and was killed: {error}")
            for channel in op.parked:
                channel.close()
            op.parked = []
            job.supervisor.dismiss(list(job.supervisor.servers), grace_s)
            job.stdio.discard_input()
            restore.remove_shared(job.folder.path)
            job.stdio.go_on()
            op.relays_paused = False
        if op.stood_still_from is not None:
            op.still_s = time.monotonic() - op.stood_still_from

    def _finish(self, op: _Operation, error: BaseException | None) -> api.ImageFacts:
        """Decides how the operation ends.

        no error                    checkpoint: the job runs on. suspend: it is suspended, its image whole.
        error before the commit     everything that was stopped goes on; the image does not exist.
        error after it (suspend)    the image is whole and stays; the job runs on where its tree still lives.
        the job ended meanwhile     said; the last image stands.
        """
        job = self._job
        self._go_on(op)
        if isinstance(error, criu.CriuError):
            kept = restore.keep_log(error.log, job.spec.job)
            error.remedy = f"CRIU's log is {kept}" if kept else ""
        for folder in (op.files_dir, op.staging):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        if error is None and not op.leave and (gone := self._lost_servers()):
            error = CheckpointError(
                "thaw", gone, f"devproxy restore {job.spec.job}", object=op.servers
            )
        if error is None:
            assert op.facts is not None
            if job.phase not in (api.ENDING, api.GONE):
                job.phase = api.SUSPENDED if op.leave else api.RUNNING
            self._last_error = ""
            # A suspend's were made while the tree was still frozen.
            return replace(op.facts, still_s=op.still_s, freeze_s=op.freeze_s, stages=op.stages)
        self._previous_files = []  # should it have been these that could not be found in the store
        if op.leave:
            job.expect_no_end()
        alive = self._alive()
        lost = self._lost_servers() if alive else ""
        if job.root is not None and job.phase not in (api.ENDING, api.GONE):
            job.phase = api.RUNNING
        now = "the job continues" if alive else "the job has ended"
        if lost:
            now = f"{lost}, so the job ends"
        if op.whole:
            now += f"; image {op.whole} is whole"
        elif self._last_image:
            now += f"; its last whole image is {self._last_image}"
        if isinstance(error, Refused) and op.stage == "refuse_early":
            raise error
        if not isinstance(error, Exception):
            raise error
        what, remedy = _words(error)
        failed = SuspendError if op.leave else CheckpointError
        stage = error.stage if isinstance(error, OperationFailed) else op.stage
        raise failed(stage, what, remedy, now, object_of(error) or op.object) from error

    # -- migrate ------------------------------------------------------------------------------------------------

    def _migrate(self, to: list[int], report: api.Report) -> dict[str, Any]:
        """A fresh server takes over from each old one; the job's processes are not touched."""
        job, spec = self._job, self._job.spec
        if len(to) != len(spec.gpus) or len(set(to)) != len(to):
            raise Refused(
                f"job {spec.job} has {len(spec.gpus)} GPU(s): --to needs as many, each once",
                "the job continues",
            )
        op = _Operation(job, "migrate", False, False, 0, report)
        old = list(job.supervisor.servers)
        fresh: list[Server] = []
        handed_over = False
        error: BaseException | None = None
        try:
            op.staging = self._make_staging(self._device_bytes(old))
            job.phase = api.CUTTING
            with op.at("cut", "stopping the servers between two messages", op.servers):
                op.parked = [self._channel(server) for server in old]
                answers = _all([partial(c.cut, 0, DRAIN_MS) for c in op.parked])
                drained_s = max((a["drained_us"] for a in answers), default=0) / 1e6
                op.stood_still_from = time.monotonic() - drained_s
            job.phase = api.QUIESCED
            with op.at("device", "copying device memory", op.servers):
                _all([partial(c.dump, op.staging) for c in op.parked])
            there = f"GPU {', '.join(map(str, to))}"
            with op.at("restore", f"starting servers on {there}", there):
                fault.point("migrate_start")
                fresh = restore.start_servers(job, to, ("--restore", op.staging))
                channels = [self._channel(server) for server in fresh]
            with op.at("hand_over", "the new servers take over", there):
                fault.point("migrate_hand_over")
                handed_over = True
                leaving, op.parked = op.parked, channels
                for channel, server in zip(leaving, old, strict=True):
                    try:
                        channel.leave()
                    except (OSError, DevproxyError) as refusal:  # the new one has all that it held
                        say(f"GPU {channel.gpu}: the old server did not leave: {refusal}")
                        if server.status is None:  # it would go on when we hang up
                            os.kill(server.pid, signal.SIGKILL)
                for channel in leaving:
                    channel.close()
                job.supervisor.dismiss(old)
                spec.gpus = to
        except BaseException as caught:
            error = caught
        if error is not None and not handed_over and fresh:
            job.supervisor.dismiss(fresh)
        self._go_on(op)
        shutil.rmtree(op.staging, ignore_errors=True)
        job.phase = api.RUNNING if job.root is not None else job.phase
        if error is None and (gone := self._lost_servers()):
            error = MigrateError(op.stage, gone, f"devproxy restore {job.spec.job}")
        if error is None:
            return {
                "gpus": to,
                "still_s": op.still_s,
                **{f"{k}_s": v for k, v in op.stages.items()},
            }
        if isinstance(error, Refused) and op.stage == "refuse_early":
            raise error
        if not isinstance(error, Exception):
            raise error
        lost = self._lost_servers()
        at = ", ".join(map(str, spec.gpus))
        state_now = f"the job continues on GPU {at}" if handed_over else _OLD_GPU
        if not self._alive():
            state_now = "the job has ended"
        elif lost:
            state_now = f"{lost}, so the job ends"
        if self._last_image:
            state_now += f"; its last whole image is {self._last_image}"
        what, remedy = _words(error)
        about = object_of(error) or op.object
        raise MigrateError(op.stage, what, remedy, state_now, about) from error

    def _alive(self) -> bool:
        root = self._job.root
        return root is not None and tree.command_lives(root)

    def _lost_servers(self) -> str:
        """Which servers have ended under the job, and how; "" for none."""
        lost = self._job.supervisor.lost(self._job.folder)
        return ", ".join(f"the server of GPU {s.gpu} {s.how_it_ended()}" for s in lost)

    def _device_bytes(self, servers: list[Server]) -> int:
        total = 0
        for server in servers:
            answer = self._ask(server, "can_dump")
            if answer["refusals"]:
                raise Refused(
                    f"GPU {server.gpu}: {'; '.join(answer['refusals'])}", "the job continues"
                )
            total += sum(c["live_bytes"] for c in answer["clients"])
        return total

    # -- servers ------------------------------------------------------------------------------------------------

    def _channel(self, server: Server) -> ControlChannel:
        return ControlChannel(self._job.folder.path, server.gpu, bytes.fromhex(self._job.spec.abi))

    def _ask(self, server: Server, op: str) -> dict[str, Any]:
        with self._channel(server) as channel:
            answer: dict[str, Any] = getattr(channel, op)()
            return answer

    # -- periodic -----------------------------------------------------------------------------------------------

    def periodic(self) -> None:
        """Until the job ends: notes the state of its files, counts its steps, takes images when they are due."""
        spec = self._job.spec
        seconds, steps = parse_every(spec.every) if spec.every else (0.0, 0)
        self._began = True
        self._watch.start()
        next_note = time.monotonic() + NOTE_S
        next_image = time.monotonic() + seconds
        last_steps = 0
        said = False
        channel: ControlChannel | None = None
        while not self._ended.wait(STEP_POLL_S if steps else 0.5):
            now = time.monotonic()
            if (
                now >= next_note and self._job.root is not None
            ):  # without processes it changes nothing
                next_note = now + NOTE_S
                try:
                    self.tracker.note_state()
                    self._watch.refresh()
                except (OSError, DevproxyError) as error:
                    if not said:
                        say(f"the state of the job's files cannot be noted: {error}")
                    said = True
            if self._job.phase != api.RUNNING:
                channel = None
                continue
            if steps:
                try:
                    if channel is None:
                        channel = self._channel(self._job.supervisor.servers[0])
                    self._steps = channel.steps()
                except (OSError, DevproxyError, IndexError):
                    channel = None
                if self._steps // steps > last_steps // steps:
                    last_steps = self._steps
                    self._due()
            elif seconds:
                self._next_unix_s = time.time() + next_image - now
                if now >= next_image:
                    next_image = now + seconds
                    self._due()

    def _due(self) -> None:
        try:
            facts = self.checkpoint(cut_wait_ms=None, strict=False, report=lambda _: None)
        except DevproxyError as error:
            if not self._ended.is_set() and self._alive():
                say(f"no image now: {error}")
            return
        except OSError as error:
            say(f"no image now: {error}; the job continues")
            return
        for warning in facts.warnings:
            say(warning)


def _words(error: Exception) -> tuple[str, str]:
    """What failed, and what to do."""
    if isinstance(error, DevproxyError):
        return error.what, error.remedy
    return f"{type(error).__name__}: {error}", ""


def _all(actions: list[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs them side by side; raises the first failure after all have ended."""
    if len(actions) == 1:
        return [actions[0]()]
    results: list[dict[str, Any]] = [{} for _ in actions]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = actions[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
