# SPDX-License-Identifier: Apache-2.0
"""What the control services and the CLI know of a job: the coordinator's verbs and the facts they answer.

No third-party import here: the supervisor loads this module while a job starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from devproxy.node.history import Span
from devproxy.node.stages import Report

# The phases of a job, as JobStatus.phase says them. The coordinator is their only writer.
STARTING = "starting"
RUNNING = "running"
CUTTING = "cutting"  # the servers stop at a message boundary
QUIESCED = "quiesced"  # nothing is outstanding; the job stands still
DUMPED = "dumped"  # device and host state are in the staging folder
COMMITTING = "committing"  # the job runs again; chunks and the manifest go to the store
SUSPENDED = "suspended"
RESTORING = "restoring"
ENDING = "ending"
STOPPED = "stopped"  # never the coordinator's word: others see that a signal, as Ctrl-Z's, has stopped the job (client.py)
GONE = "gone"
PHASES = (
    STARTING,
    RUNNING,
    CUTTING,
    QUIESCED,
    DUMPED,
    COMMITTING,
    SUSPENDED,
    RESTORING,
    ENDING,
    STOPPED,
    GONE,
)


@dataclass(frozen=True)
class ImageFacts:
    """One image: what it holds, what it cost. Times in seconds, sizes in bytes before compression unless said."""

    id: str
    job: str
    job_id: str
    created_unix_s: float
    device_bytes: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0  # segments and pinned windows
    files_bytes: int = 0
    new_bytes: int = 0  # of chunks that the store did not have
    deduplicated_bytes: int = 0  # of chunks that it had
    stored_bytes: int = 0  # written to the store, compressed
    still_s: float = 0.0  # the job stood still
    freeze_s: float = 0.0  # CRIU's part of it
    total_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    whole: bool = True
    store: str = ""


@dataclass(frozen=True)
class JobStatus:
    """One job now. gpus[k] is the machine's GPU behind the job's ordinal k."""

    job: str
    job_id: str
    phase: str
    device: str
    gpus: list[int]
    pid: int
    command: list[str]
    started_unix_s: float
    images: int = 0
    last_image: str = ""
    last_error: str = ""
    next_checkpoint_unix_s: float | None = None
    checkpointable: bool = True
    why_not: str = ""
    steps: int = 0
    here: list[int] = field(default_factory=list)  # of gpus, those of the host that answers
    nodes: list[str] = field(default_factory=list)  # of a job of several nodes, a line for each
    step_s: float = 0.0  # one optimizer step of late; 0: not known
    last_cut: str = ""  # of several ranks: which way they came to it, and why
    # Sums over the verbs of this supervisor.
    still_s: float = 0.0  # the job stood still
    stored_bytes: int = 0  # written to the store, compressed
    failures: int = 0  # verbs that failed, without refused ones
    image_problem: str = (
        ""  # the newest image that is there, where it is known not to be whole, and why
    )


@dataclass(frozen=True)
class NodeServers:
    """What the servers of another host of the job count: an object for each GPU there. problem: why it is not known."""

    node: str
    servers: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class JobNews:
    """What the coordinator tells the job's other nodes, for those who look at the job there. Fields as in JobStatus."""

    phase: str = STARTING
    images: int = 0
    last_image: str = ""
    last_error: str = ""


class Coordinator(Protocol):
    """The only writer of a job's phase. Called from many threads; it serialises the verbs itself.

    Each verb raises a DevproxyError; one that failed in the middle an OperationFailed, which says the stage and the
    state that the job is in now.
    """

    def status(self) -> JobStatus: ...

    def history(self, since_ns: int) -> list[Span]:
        """Its phases, verbs and stages that had not ended by then (CLOCK_MONOTONIC)."""
        ...

    def elsewhere(self) -> list[NodeServers]:
        """Of the job's other hosts, as far as they answer soon."""
        ...

    def count_images(self) -> None:
        """Somebody has removed images from its store, or found damage."""
        ...

    def checkpoint(
        self, *, cut_wait_ms: int | None, strict: bool, report: Report
    ) -> ImageFacts: ...

    def check(self, *, strict: bool, report: Report) -> list[str]:
        """What a checkpoint does before it stops anything. Answers what an image would lose; raises what it would raise."""
        ...

    def suspend(self, *, strict: bool, cut_wait_ms: int | None, report: Report) -> ImageFacts: ...

    def resume(self, *, gpus: list[int] | None, report: Report) -> None: ...

    def migrate(self, *, to: list[int], report: Report, anew: bool = False) -> dict[str, Any]:
        """Answers what a summary shows: times in seconds (…_s) and sizes (…_bytes). Where the job is there already, nothing
        is done; anew: all the same, with fresh servers."""
        ...

    def resize(
        self, *, gpus: list[int], report: Report, onto: list[int] | None = None
    ) -> dict[str, Any]:
        """The same. gpus: as many as the job has; several of them may be one of the machine's."""
        ...

    def kill(self, signal: int) -> None: ...

    def follow_log(self, offset: int) -> Iterator[bytes]:
        """The job's output from that byte on; goes on until the job has ended.

        Yields b"" at least once a second while there is nothing new: a reader that went away is noticed then.
        """
        ...
