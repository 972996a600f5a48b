# SPDX-License-Identifier: Apache-2.0
"""What programs use: devproxy.Client, for schedulers and scripts.

    import devproxy

    with devproxy.Client() as client:
        for job in client.jobs():
            if job.phase is devproxy.Phase.RUNNING:
                print(job.name, client.checkpoint(job.name).image)

Times are in seconds, sizes in bytes, GPUs are the numbers that the machine gives them. Every method raises DevproxyError:
error.name says which one, error.what and error.remedy what failed and what to do. Refused means that nothing was begun;
an OperationFailed (CheckpointError, MigrateError, ...) has the stage and the state that the job is in now. The verbs are
those of the command `devproxy`, over the same gRPC service (devproxy/control/job.proto). A Client may be used from several
threads.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any

from devproxy import machine, runtime
from devproxy.control import client
from devproxy.control import coordinator_api as api
from devproxy.control import stores as stores_
from devproxy.control.coordinator_api import ImageFacts
from devproxy.errors import Refused
from devproxy.node.stages import Progress

__all__ = ["Client", "ImageFacts", "Job", "Outcome", "Phase", "Progress", "StoredImage"]


class Phase(str, Enum):
    """What a job is doing. The values are the words that `devproxy status --json` shows."""

    STARTING = api.STARTING
    RUNNING = api.RUNNING
    CUTTING = api.CUTTING
    QUIESCED = api.QUIESCED
    DUMPED = api.DUMPED
    COMMITTING = api.COMMITTING
    SUSPENDED = api.SUSPENDED
    RESTORING = api.RESTORING
    ENDING = api.ENDING
    STOPPED = api.STOPPED
    GONE = api.GONE
    UNKNOWN = "unknown"
    """A word of a newer devproxy."""

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        return cls.UNKNOWN

    @property
    def busy(self) -> bool:
        """Does an operation have the job? A verb would be refused."""
        return self in (
            Phase.STARTING,
            Phase.CUTTING,
            Phase.QUIESCED,
            Phase.DUMPED,
            Phase.COMMITTING,
            Phase.RESTORING,
        )


@dataclass(frozen=True)
class Job:
    """One job at the moment of the call.

    gpus[k] is the machine's GPU behind the job's GPU k. images: whole ones in its store. still_s, stored_bytes and
    failures are sums over all verbs of this supervisor: how long the job stood still, what was written to the store, how many
    verbs failed. step_s: one optimizer step of late, None where it is not known. image_problem: the newest image that is there,
    where it is known not to be whole, and why.
    """

    name: str
    id: str
    phase: Phase
    device: str
    gpus: tuple[int, ...]
    pid: int
    command: tuple[str, ...]
    started_unix_s: float
    steps: int = 0
    step_s: float | None = None
    images: int = 0
    last_image: str = ""
    last_error: str = ""
    next_checkpoint_unix_s: float | None = None
    checkpointable: bool = True
    why_not: str = ""
    still_s: float = 0.0
    stored_bytes: int = 0
    failures: int = 0
    image_problem: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a verb ended well. image: of checkpoint and suspend. facts: times (..._s) and sizes (..._bytes) of the others."""

    image: ImageFacts | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    job: Job | None = None


@dataclass(frozen=True)
class StoredImage:
    """An image in a store. problem: why it is not whole; "" where it is."""

    id: str
    job: str
    store: str
    created_unix_s: float
    whole: bool
    problem: str
    sizes: dict[str, Any]


Watcher = Callable[[Progress], None]


def _silent(progress: Progress) -> None:
    pass


class Client:
    """The jobs of one user on one host.

    address: "" talks to this host's devproxyd, and starts one where none runs; "HOST:PORT" talks to one that was started with
    --listen, by mTLS with the certificate that `devproxy trust` made (docs/hosts.md).
    Raises DevproxyError where no daemon can be had, Refused for an address that is none or without a certificate.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._client = client.Client(address)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Each call has a connection of its own: there is nothing to close."""

    def jobs(self) -> list[Job]:
        """All jobs of this user, also dead ones whose folder is still there (phase GONE)."""
        return [_job(status) for status in self._client.list_jobs()]

    def status(self, job: str) -> Job:
        """One living job. Raises Refused where it does not live."""
        return _job(self._client.status(_named(job)))

    def checkpoint(
        self,
        job: str,
        *,
        cut_wait_s: float | None = None,
        strict: bool = False,
        watcher: Watcher = _silent,
    ) -> Outcome:
        """An image while the job goes on. cut_wait_s: how long to wait for a moment of little memory; None: devproxy chooses.

        Raises Refused (something that an image cannot hold, or a verb is under way), CheckpointError.
        """
        wait = None if cut_wait_s is None else round(cut_wait_s * 1000)
        done = self._client.checkpoint(_named(job), cut_wait_ms=wait, strict=strict, report=watcher)
        return _outcome(done)

    def check(self, job: str, *, strict: bool = False) -> list[str]:
        """What an image of the job would lose, as warnings; stops nothing. Raises Refused with what is in an image's way."""
        return self._client.check(_named(job), strict=strict)

    def suspend(
        self,
        job: str,
        *,
        cut_wait_s: float | None = None,
        strict: bool = False,
        watcher: Watcher = _silent,
    ) -> Outcome:
        """An image, and the job's processes and servers gone until resume. Raises Refused, SuspendError."""
        wait = None if cut_wait_s is None else round(cut_wait_s * 1000)
        done = self._client.suspend(_named(job), cut_wait_ms=wait, strict=strict, report=watcher)
        return _outcome(done)

    def resume(self, job: str, *, gpus: Sequence[int] = (), watcher: Watcher = _silent) -> Outcome:
        """A suspended job goes on; on the GPUs that it had, or on as many others. Raises Refused, RestoreError."""
        return _outcome(self._client.resume(_named(job), gpus=list(gpus), report=watcher))

    def migrate(
        self, job: str, to: Sequence[int], *, anew: bool = False, watcher: Watcher = _silent
    ) -> Outcome:
        """The job goes on, on these GPUs. Where it is there already nothing is done; anew: fresh servers all the same.

        Raises Refused, MigrateError.
        """
        done = self._client.migrate(_named(job), to=list(to), report=watcher, anew=anew)
        return _outcome(done)

    def resize(
        self,
        job: str,
        gpus: Sequence[int] = (),
        *,
        onto: Sequence[int] = (),
        watcher: Watcher = _silent,
    ) -> Outcome:
        """The job's GPUs share fewer of the machine's, or have more again. gpus[k]: for the job's GPU k; or onto: these GPUs,
        and devproxy chooses who goes where. Raises Refused, ResizeError."""
        if bool(gpus) == bool(onto):
            raise Refused("resize takes either gpus or onto", "give one of the two")
        done = self._client.resize(_named(job), gpus=list(gpus), report=watcher, onto=list(onto))
        return _outcome(done)

    def kill(self, job: str, signal: int = signals.SIGTERM) -> None:
        """Sends the job's command a signal, as from a terminal. Raises Refused."""
        self._client.kill(_named(job), int(signal))

    def watch(self, job: str, watcher: Watcher) -> Outcome:
        """Follows the verb under way, or tells how the last one ended: raises what that raised."""
        return _outcome(self._client.watch(_named(job), watcher))

    def logs(self, job: str, *, offset: int = 0, follow: bool = False) -> Iterator[bytes]:
        """What the job has said from that byte on; follow: until it ends."""
        return self._client.logs(_named(job), offset=offset, follow=follow)

    def images(self, store: str = "") -> list[StoredImage]:
        """The images in that store (folder or fsspec URL), or in all that this user's jobs have used, the oldest first.

        Reads the stores from this host, whatever the client's address is. Raises Refused, StoreError.
        """
        return [
            StoredImage(
                one.id, one.job, place.url, one.created, one.whole, one.problem, dict(one.sizes)
            )
            for place, one in stores_.images_of(stores_.open_stores(store or None))
        ]

    def restore(
        self,
        image: str,
        *,
        store: str = "",
        name: str = "",
        gpus: Sequence[int] = (),
        output: str = "",
        files: str = "",
        device: str = "",
        strict: bool = False,
        watcher: Watcher = _silent,
    ) -> Outcome:
        """A job back from an image; returns when it runs. image: an id, its beginning, a job's name, or "latest".

        store: where the image is; "": wherever this user's jobs have put images. name: of the job, "" for its own. output:
        file for what it says. files: an empty folder for the files of a copy beside the living job (docs/files.md). device: "soft" or "cuda" instead of the image's.
        Raises Refused, RestoreError, StoreError.
        """
        from devproxy.control import messages  # protobuf: loaded by the first call
        from devproxy.control._pb import job_pb2 as pb

        found = stores_.open_stores(store or None)
        if not found:
            raise Refused("there are no images yet", "take one, or name the store")
        place, meant = stores_.find_image(found, image)
        here = not self._address  # another host has an environment of its own
        request = pb.RestoreRequest(
            image=meant.id,
            store=messages.packed(place.url),
            name=runtime.check_job_name(name or meant.job),
            gpus=list(gpus),
            output=messages.packed(os.path.abspath(output)) if output else "",
            files=messages.packed(os.path.abspath(files)) if files else "",
            strict=strict,
            device=device,
            environment=messages.packed(dict(os.environ)) if here else {},
            cwd=messages.packed(machine.working_folder()) if here else "",
        )
        return _outcome(next(self._client.restore(request, watcher)))


def _named(job: str) -> str:
    """The daemon takes no name for "the only job"; a program says which one it means."""
    if not job:
        raise Refused("the name of the job is empty", "give one of client.jobs()")
    return job


def _job(status: api.JobStatus) -> Job:
    return Job(
        name=status.job,
        id=status.job_id,
        phase=Phase(status.phase),
        device=status.device,
        gpus=tuple(status.gpus),
        pid=status.pid,
        command=tuple(status.command),
        started_unix_s=status.started_unix_s,
        steps=status.steps,
        step_s=status.step_s or None,
        images=status.images,
        last_image=status.last_image,
        last_error=status.last_error,
        next_checkpoint_unix_s=status.next_checkpoint_unix_s,
        checkpointable=status.checkpointable,
        why_not=status.why_not,
        still_s=status.still_s,
        stored_bytes=status.stored_bytes,
        failures=status.failures,
        image_problem=status.image_problem,
    )


def _outcome(result: client.Result) -> Outcome:
    return Outcome(result.image, result.facts, _job(result.job) if result.job else None)
