# SPDX-License-Identifier: Apache-2.0
"""Restore and resume: all trees of a job come back from an image side by side, or none does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from devproxy.checkpoint import image
from devproxy.checkpoint.errors import ImageError
from devproxy.control import coordinator_api as api
from devproxy.control.coordinate.job import Job
from devproxy.control.coordinate.trees import shares
from devproxy.control.operation import each, words
from devproxy.errors import DevproxyError, Refused, RestoreError, object_of
from devproxy.node.participant import Restoring
from devproxy.node.restore import Wishes
from devproxy.node.stages import Report, Stages


def restore(
    job: Job,
    whole: image.Image,
    gpus: list[int],
    wishes: Wishes,
    stages: Stages,
    before_it_runs: Callable[[], None],
) -> None:
    """Of a job of which nothing lives. See JobCoordinator.restore."""
    job.images.came_from(whole.id, whole.created)
    try:
        _restore_trees(job, whole, gpus, wishes, stages)
    except BaseException as error:
        _failed(job, error, stages, whole.id, "nothing of it runs")
    # Not before it runs: a restore that fails must not make a job that lives elsewhere stale.
    job.images.take_new_epoch()
    before_it_runs()
    job.standing.enter(api.RUNNING)
    job.images.record(whole.id)
    with suppress(OSError, DevproxyError):  # it shows at the next image
        job.images.count()


def resume(job: Job, gpus: list[int] | None, report: Report) -> None:
    images, standing = job.images, job.standing
    if gpus is not None and len(gpus) != len(job.trees.gpus):
        raise Refused(
            f"job {job.spec.job} has {len(job.trees.gpus)} GPU(s), {len(gpus)} given",
            "name as many, one for each of the job's; the job is still suspended",
        )
    standing.enter(api.RESTORING)
    stages = Stages(report, "manifest", f"image {images.asleep_in}", standing.record)
    try:
        images.check_epoch()
        stages.say("reading the manifest")
        whole = image.load(images.store(), images.asleep_in)
        _restore_trees(job, whole, gpus or job.trees.gpus, Wishes(), stages)
    except BaseException as error:
        standing.enter(api.SUSPENDED)
        now = "it is still suspended"
        if type(error) is Refused and stages.name == "manifest":
            remedy = f"{error.remedy}; {now}" if error.remedy else now
            raise Refused(error.what, remedy, object=error.object) from None
        _failed(job, error, stages, images.asleep_in, now)
    images.asleep_in = ""
    standing.enter(api.RUNNING)


def _restore_trees(
    job: Job, whole: image.Image, gpus: list[int], wishes: Wishes, stages: Stages
) -> None:
    """All trees side by side; the image's trees are this job's, in their order."""
    parts: list[Restoring] = [
        tree.restore(job.images.store(), whole, number, share, wishes, stages.part())
        for number, (tree, share) in enumerate(
            zip(job.trees.each, shares(gpus, [len(tree.gpus) for tree in whole.trees]), strict=True)
        )
    ]
    try:
        each(stages, parts, lambda part: part.prepare())
        job.trees.introduce()
        each(stages, parts, lambda part: part.go_on())
    except BaseException:
        for part in reversed(parts):
            part.undo()
        raise
    for part in parts:
        part.settle()


def _failed(job: Job, error: BaseException, stages: Stages, image_id: str, now: str) -> NoReturn:
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
        older = job.images.older_whole(image_id, stages.say)
        remedy = f"use the older whole image: {older}" if older else "there is no older whole image"
    about = object_of(error) or stages.object
    raise RestoreError(stages.name, what, remedy, now, about) from error
