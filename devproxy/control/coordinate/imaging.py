# SPDX-License-Identifier: Apache-2.0
"""A checkpoint and a suspend, in order: refuse early, cut, dump (device beside host), thaw, store, finish.

The job stands still from the cut to the thaw; everything that can wait (hashing, compressing, uploading: storing.py)
comes after it. A suspend stores while the trees are still frozen, so that nothing is ended before its image is whole.
"""

from __future__ import annotations

from dataclasses import replace

from devproxy.control import coordinator_api as api
from devproxy.control.coordinate import cutting, storing
from devproxy.control.coordinate.image_operation import ImageOperation
from devproxy.control.coordinate.job import Job
from devproxy.control.operation import still_s, words
from devproxy.errors import CheckpointError, OperationFailed, Refused, SuspendError, object_of
from devproxy.node.stages import Report

LEARNT_WAIT = -1  # for the server: two periods of its allocation trace


def check(job: Job, strict: bool, report: Report) -> list[str]:
    """What an image would lose. Raises what would be in its way."""
    op = ImageOperation(job, False, strict, report)
    try:
        _look(job, op, "check")
    finally:
        for dump in op.dumps:
            dump.close(None)
    return op.all_warnings()


def take(
    job: Job, *, leave: bool, wait_ms: int | None, strict: bool, report: Report
) -> api.ImageFacts:
    """leave: a suspend, whose image the job sleeps in."""
    if wait_ms is None:
        wait_ms = job.spec.cut_wait_ms
    op = ImageOperation(job, leave, strict, report)
    enter = job.standing.enter
    error: BaseException | None = None
    try:
        # Nothing has stopped yet. Everything that can be known to be in the way is named here.
        _look(job, op, op.verb)
        job.images.hold_epoch()
        enter(api.CUTTING)
        outcome = cutting.agree(job, op, op.dumps, wait_ms)
        wait = LEARNT_WAIT if wait_ms is None else wait_ms
        # Ranks that are held are at the moment of least memory, or come to none any more.
        op.each(op.dumps, lambda dump: dump.cut(0 if outcome.ranks else wait))
        enter(api.QUIESCED)
        op.each(op.dumps, lambda dump: dump.write())
        cutting.flush(op, op.dumps, outcome)
        enter(api.DUMPED)
        if leave:
            storing.put_away(job, op)
            op.each(op.dumps, lambda dump: dump.end_tree())
            _end_servers(job, op)
        else:
            op.each(op.dumps, lambda dump: dump.thaw())
            enter(api.COMMITTING)
            storing.put_away(job, op)
    except BaseException as caught:
        error = caught
        if all(dump.tree_has_ended() for dump in op.dumps):
            error = _suspended_all_the_same(job, op, caught)
    return _finish(job, op, error)


def _look(job: Job, op: ImageOperation, verb: str) -> None:
    if why := job.why_no_image():
        raise Refused(f"{verb} of job {job.spec.job}: {why}", "see: docs/operators.md")
    op.each(op.dumps, lambda dump: dump.check())


def _suspended_all_the_same(
    job: Job, op: ImageOperation, why: BaseException
) -> BaseException | None:
    """The image is whole and the trees have ended: whatever failed in between, the job is suspended."""
    op.warnings.append(f"{op.stages.name}: {why}")
    try:
        _end_servers(job, op)
    except BaseException as error:
        return error
    return None


def _end_servers(job: Job, op: ImageOperation) -> None:
    """After a suspend's commit: the processes are gone, the servers go."""
    job.images.asleep_in = job.images.last
    try:
        op.each(op.dumps, lambda dump: dump.leave())
    except BaseException:
        job.images.asleep_in = ""
        raise


def _finish(job: Job, op: ImageOperation, error: BaseException | None) -> api.ImageFacts:
    """Decides how the operation ends.

    no error                    checkpoint: the job runs on. suspend: it is suspended, its image whole.
    error before the commit     everything that was stopped goes on; the image does not exist.
    error after it (suspend)    the image is whole and stays; the job runs on where its trees still live.
    the job ended meanwhile     the error says so; the last image stands.
    """
    trees, standing = job.trees, job.standing
    for dump in op.dumps:
        dump.close(error)
    standing.still_s += still_s(op.dumps)
    standing.stored_bytes += op.facts.stored_bytes if op.facts else 0
    if error is None and not op.leave and (gone := trees.lost_servers()):
        remedy = f"devproxy restore {job.spec.job}"
        error = CheckpointError("thaw", gone, remedy, object=op.dumps[0].stages.object)
    if error is None:
        assert op.facts is not None
        for tree, dump in zip(trees.each, op.dumps, strict=True):
            tree.dumped(dump)
        standing.enter(api.SUSPENDED if op.leave else api.RUNNING)
        # A suspend's facts were made while the trees were still frozen.
        return replace(
            op.facts,
            total_s=op.stages.elapsed_s(),
            still_s=still_s(op.dumps),
            freeze_s=max(dump.freeze_s for dump in op.dumps),
            stages=op.stages.seconds,
            warnings=op.all_warnings(),
        )
    alive = trees.live()
    lost = trees.lost_servers() if alive else ""
    if trees.have_processes():
        standing.enter(api.RUNNING)
    now = "the job continues" if alive else "the job has ended"
    if lost:
        now = f"{lost}, so the job ends"
    if op.whole:
        now += f"; image {op.whole} is whole"
    elif job.images.last:
        now += f"; its last whole image is {job.images.last}"
    if isinstance(error, Refused) and op.stages.name == "refuse_early":
        raise error
    if not isinstance(error, Exception):
        raise error
    what, remedy = words(error)
    failed = SuspendError if op.leave else CheckpointError
    stage = error.stage if isinstance(error, OperationFailed) else op.stages.name
    raise failed(stage, what, remedy, now, object_of(error) or op.stages.object) from error
