# SPDX-License-Identifier: Apache-2.0
"""Migrate and resize: a fresh server takes over from each old one; the job's processes are not touched."""

from __future__ import annotations

from typing import Any

from devproxy.control import coordinator_api as api
from devproxy.control.coordinate import cutting
from devproxy.control.coordinate.job import Job
from devproxy.control.operation import Operation, still_s, words
from devproxy.errors import MigrateError, Refused, ResizeError, object_of
from devproxy.node.participant import Move
from devproxy.node.stages import Report


def migrate(job: Job, to: list[int], report: Report, anew: bool) -> dict[str, Any]:
    count = len(job.trees.gpus)
    if len(to) != count or not job.trees.each_once(to):
        raise Refused(
            f"job {job.spec.job} has {count} GPU(s): --to needs as many, each once on its host",
            "the job continues",
        )
    return _move(job, "migrate", to, report, MigrateError, anew)


def resize(job: Job, gpus: list[int], report: Report) -> dict[str, Any]:
    count = len(job.trees.gpus)
    if len(gpus) != count:
        raise Refused(
            f"job {job.spec.job} sees {count} GPU(s), and goes on to: --gpus needs {count} numbers, {len(gpus)} given",
            f"name one of the machine's for each of the job's, as {','.join(['0'] * count)}; the job continues",
        )
    return _move(job, "resize", gpus, report, ResizeError)


def resize_onto(job: Job, onto: list[int], gpus: list[int], report: Report) -> dict[str, Any]:
    """devproxy chooses which of the job's GPUs go where: on each host, on its GPUs of these numbers."""
    trees = job.trees.each
    problem = ""
    if gpus:
        problem = "--gpus and --onto exclude each other"
    elif len(set(onto)) != len(onto):
        problem = "--onto names a GPU twice"
    elif len(onto) > (fewest := min(len(tree.gpus) for tree in trees)):
        on_a_host = " on one of its hosts" if len(trees) > 1 else ""
        problem = f"--onto names {len(onto)} GPUs, and job {job.spec.job} sees {fewest}{on_a_host}"
    if problem:
        remedy = "name each GPU of the machine once, or use --gpus; the job continues"
        raise Refused(problem, remedy)
    places = [tree.place(onto) for tree in trees]
    to = [gpu for place, _ in places for gpu in place]
    # A guess that says they are where they should be is no reason to leave them there.
    guessed = not all(known for _, known in places)
    return _move(job, "resize", to, report, ResizeError, anew=guessed, onto=onto)


def _move(
    job: Job,
    verb: str,
    to: list[int],
    report: Report,
    failed: type[MigrateError],
    anew: bool = False,
    onto: list[int] | None = None,
) -> dict[str, Any]:
    """If the job is on these GPUs already, only `anew` makes it move. onto: the GPUs that `to` was guessed from."""
    trees, standing, before = job.trees, job.standing, job.trees.gpus
    if to == before and not anew:
        return {"gpus": to, "from_gpus": before, "still_s": 0.0}
    op = Operation(verb, job.spec.job, report, standing.record)
    moves: list[Move] = [
        tree.move(share, op.stages.part(), onto)
        for tree, share in zip(trees.each, trees.shares(to), strict=True)
    ]
    error: BaseException | None = None
    try:
        op.each(moves, lambda move: move.check())
        standing.enter(api.CUTTING)
        outcome = cutting.agree(job, op, moves)
        op.each(moves, lambda move: move.cut())
        standing.enter(api.QUIESCED)
        op.each(moves, lambda move: move.copy())
        cutting.flush(op, moves, outcome)
        op.each(moves, lambda move: move.start())
        trees.introduce()
        op.each(moves, lambda move: move.ready())
        op.each(moves, lambda move: move.hand_over())
    except BaseException as caught:
        error = caught
    for move in moves:
        move.close()
    if error is not None:
        trees.introduce_again()
    standing.still_s += still_s(moves)
    if trees.have_processes():
        standing.enter(api.RUNNING)
    if error is None and (gone := trees.lost_servers()):
        stage = moves[0].stages.name
        error = failed(stage, gone, f"devproxy restore {job.spec.job}")
    if error is None:
        seconds = {f"{stage}_s": took for stage, took in op.stages.seconds.items()}
        return {"gpus": trees.gpus, "from_gpus": before, "still_s": still_s(moves), **seconds}
    if isinstance(error, Refused) and op.stages.name == "refuse_early":
        raise error
    if not isinstance(error, Exception):
        raise error
    what, remedy = words(error)
    about = object_of(error) or op.stages.object
    raise failed(op.stages.name, what, remedy, _where_it_is(job, moves), about) from error


def _where_it_is(job: Job, moves: list[Move]) -> str:
    """In words, after a move that failed."""
    lost = job.trees.lost_servers()
    at = ", ".join(map(str, job.trees.gpus))
    now = "the job continues on its old GPU"
    if any(move.handed_over for move in moves):
        now = f"the job continues on GPU {at}"
    if not job.trees.live():
        now = "the job has ended"
    elif lost:
        now = f"{lost}, so the job ends"
    if job.images.last:
        now += f"; its last whole image is {job.images.last}"
    return now
