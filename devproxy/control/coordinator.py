# SPDX-License-Identifier: Apache-2.0
"""The coordinator of one job: its verbs, one at a time. The only writer of its phase, and of its images' manifest.

A job is one or more trees (node/participant.py). What the verbs do to them stands in coordinate/.

Threads: verbs come from the service's threads and from periodic(); _verb lets one of them through at a time. The phase
is written under it, and read by anyone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from devproxy.checkpoint import image, store
from devproxy.control import coordinator_api as api
from devproxy.control.coordinate import imaging, moving, returning
from devproxy.control.coordinate.images import Images
from devproxy.control.coordinate.job import Job
from devproxy.control.coordinate.standing import Standing
from devproxy.control.coordinate.trees import Trees
from devproxy.control.coordinate.watching import Watch
from devproxy.control.job_log import follow_log
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node.history import History, Span
from devproxy.node.participant import Participant
from devproxy.node.restore import Wishes
from devproxy.node.spec import JobSpec
from devproxy.node.stages import Report, Stages

FINISH_POLL_S = 0.05


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
        together = Trees(spec, trees)
        images = Images(spec, opened)
        self._job = Job(spec, lib, together, images, Standing(together, images, phase))
        self._verb = threading.Lock()
        self._verb_name = ""
        self._is_periodic = False  # the image that is being taken
        self._ended = threading.Event()
        self._watch = Watch(self._job, self._ended, self._take_periodic)

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self._job.standing.phase

    @property
    def gpus(self) -> list[int]:
        """[k]: the machine's GPU behind the job's GPU k, tree after tree."""
        return self._job.trees.gpus

    @property
    def record(self) -> History:
        return self._job.standing.record

    def status(self) -> api.JobStatus:
        job = self._job
        spec, standing, images = job.spec, job.standing, job.images
        trees, pace = job.trees.each, self._watch.pace
        return api.JobStatus(
            job=spec.job,
            job_id=spec.job_id,
            phase=self.phase,
            device=spec.device,
            gpus=self.gpus,
            pid=os.getpid(),
            command=spec.command,
            started_unix_s=spec.started_unix_s,
            images=len(images),
            last_image=images.last,
            image_problem=images.problem,
            last_error=standing.last_error,
            still_s=standing.still_s,
            stored_bytes=standing.stored_bytes,
            failures=standing.failures,
            next_checkpoint_unix_s=self._watch.next_unix_s,
            checkpointable=not job.why_no_image(),
            why_not=job.why_no_image(),
            steps=pace.steps,
            step_s=pace.step_s,
            here=trees[0].gpus,
            nodes=[tree.about() for tree in trees] if len(trees) > 1 else [],
            last_cut=standing.last_cut,
        )

    def history(self, since_ns: int) -> list[Span]:
        return self.record.since(since_ns)

    def elsewhere(self) -> list[api.NodeServers]:
        phase = self.phase
        return [tree.servers(phase) for tree in self._job.trees.elsewhere()]

    def count_images(self) -> None:
        """See coordinator_api.Coordinator. Raises StoreError, OSError."""
        self._job.images.count()

    def tell_nodes(self) -> None:
        self._job.standing.tell_nodes()

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
            return imaging.take(
                self._job, leave=False, wait_ms=cut_wait_ms, strict=strict, report=report
            )

    def check(self, *, strict: bool, report: Report) -> list[str]:
        last_error = self._job.standing.last_error
        with self._one_verb("check", {api.RUNNING}):
            warnings = imaging.check(self._job, strict, report)
        # A check that passes repairs nothing: the error stays.
        self._job.standing.last_error = last_error
        return warnings

    def suspend(self, *, strict: bool, cut_wait_ms: int | None, report: Report) -> api.ImageFacts:
        with self._one_verb("suspend", {api.RUNNING}):
            return imaging.take(
                self._job, leave=True, wait_ms=cut_wait_ms, strict=strict, report=report
            )

    def resume(self, *, gpus: list[int] | None, report: Report) -> None:
        with self._one_verb("resume", {api.SUSPENDED}):
            returning.resume(self._job, gpus, report)

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
        assert self._job.standing.entered == api.RESTORING
        returning.restore(self._job, whole, gpus, wishes, stages, before_it_runs)

    def migrate(self, *, to: list[int], report: Report, anew: bool = False) -> dict[str, Any]:
        with self._one_verb("migrate", {api.RUNNING}):
            return moving.migrate(self._job, to, report, anew)

    def resize(
        self, *, gpus: list[int], report: Report, onto: list[int] | None = None
    ) -> dict[str, Any]:
        with self._one_verb("resize", {api.RUNNING}):
            if onto:
                return moving.resize_onto(self._job, onto, gpus, report)
            return moving.resize(self._job, gpus, report)

    def introduce(self) -> None:
        """Tells all servers where those of the other trees are. Raises Refused."""
        self._job.trees.introduce()

    def kill(self, number: int) -> None:
        for tree in self._job.trees.each:
            tree.send(number)

    def follow_log(self, offset: int) -> Iterator[bytes]:
        return follow_log(self._job.spec.job, offset, self._ended)

    @contextmanager
    def _one_verb(self, name: str, phases: set[str]) -> Iterator[None]:
        job, standing = self._job, self._job.standing
        about = f"{name} of job {job.spec.job}"
        if not self._verb.acquire(blocking=False):
            raise Refused(
                f"{about}: a {self._verb_name} of it is under way",
                "try again when that has ended; the job continues",
            )
        try:
            if (phase := self.phase) not in phases:
                lost = job.trees.lost_servers() if phase == api.ENDING else ""
                raise Refused(
                    f"{about}: {lost and lost + ', so '}the job is {phase}",
                    f"it can be done while the job is {' or '.join(sorted(phases))}",
                )
            if why := job.why_no_verb():
                raise Refused(f"{about}: {why}", "see: devproxy doctor")
            self._verb_name = name
            with self.record.during("verb", name):
                yield
            standing.last_error = ""
        except Refused:
            raise  # its caller knows, and nothing is wrong with the job
        except DevproxyError as error:
            standing.last_error = str(error)
            standing.failures += 1
            raise
        finally:
            self._verb.release()
            self.tell_nodes()

    # -- until the job ends -------------------------------------------------------------------------------------

    def periodic(self) -> None:
        """Runs until the job ends: notes the state of its files, counts its steps, takes images when they are due."""
        self._watch.run()

    def _take_periodic(self) -> api.ImageFacts:
        return self.checkpoint(cut_wait_ms=None, strict=False, report=lambda _: None, periodic=True)

    def finish_image(self, code: int, interrupted: Callable[[], None]) -> None:
        """The job's command has ended with that exit code; its servers have not. Waits while an image is uploaded.

        A periodic image of a job that ended well is not waited for: nobody needs it. interrupted: raises to give the image up.
        """
        # Dumped: the command has ended between the thaw and the next phase.
        is_uploaded = self._job.standing.entered in (api.DUMPED, api.COMMITTING)
        if not is_uploaded or (self._is_periodic and code == 0):
            return
        say(
            f"job {self._job.spec.job} has ended with exit code {code}; waiting until its image is in store"
            f" {self._job.images.store().url} (Ctrl-C gives the image up)"
        )
        while self._verb.locked():
            interrupted()
            time.sleep(FINISH_POLL_S)

    def end(self) -> None:
        """The job has ended. A verb that still runs fails on its own, since its servers and trees are gone."""
        self._ended.set()
        images = self._job.images
        for tree in self._job.trees.each:
            tree.end(has_image=bool(images.last), asleep=bool(images.asleep_in))
