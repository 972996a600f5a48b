# SPDX-License-Identifier: Apache-2.0
"""Which way the ranks of a job come to a point where it may be cut, and the way in band.

agree     the coordinator carries reports between the servers (agreement.py).
meta      the servers find the point themselves, beside the job's own collectives (csrc/server/meta_barrier.h). It is for
          data-parallel jobs: all ranks have one communicator, and what goes over it.
takeback  there is no such point: the servers let nothing of a communicator begin, and what has not begun is stored with
          the job and submitted again where it goes on (hal/pending.h). For devices that can do that.
auto      meta where the servers see such a job at work, else agreement. Where the devices take back, both have SOON_S,
          since a rank may wait for a minute before it comes to the point where the others are. Elsewhere agreement also
          follows a meta that found no point.

Whichever of the first two found it, the counts of all ranks are looked at before anything parks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from devproxy.control import agreement
from devproxy.control.agreement import NoPoint, flat, lift, looks
from devproxy.errors import CheckpointError
from devproxy.node.answer import Marked, Met, Still
from devproxy.node.together import all_of

# A job at work has had a collective within this time.
RECENT_MS = 5_000
# Three of its collectives are enough (need, acknowledge, and one for whoever was asked late), and a minibatch of a
# data-parallel job has at least one. So it has found no point when there was none for as long as a job at work lets pass
# between two, or for two of the job's rhythms where the servers know it.
PATIENCE_S = RECENT_MS / 1000
ATTEMPT_S = 60.0
# Where there is another way. The point is worth this much: an image from there has nothing that had not begun.
SOON_S = 0.5
CLOSED_S = 1.0  # all ranks stand: what is owed now is not paid any more, but for host functions
MOST_ATTEMPTS = 1 << 20  # csrc/server/meta_barrier.h
MOST_NUMBERS = 1 << 48  # of marks
AIM_MOST_S = 30.0  # as csrc/server/control.cc for one rank
STILL_S = 30.0  # for what is about to begin, or on its way

Comm = tuple[int, int]
Say = Callable[[str], None]


class Part(agreement.Part, Protocol):
    """A tree's side of it."""

    def ranks(self) -> list[dict[str, Any]]: ...

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]: ...

    def barrier(self, comm: Comm, attempt: int) -> Met: ...

    def withhold(self) -> Still: ...

    def mark(self, number: int) -> Marked: ...


@dataclass(frozen=True)
class Choice:
    """comm: None where meta is not the way."""

    comm: Comm | None
    why: str


def acquire(
    parts: Sequence[Part], way: str, say: Say, *, aim_ms: int | None = 0
) -> agreement.Outcome:
    """Returns with all parts held where they may be cut. Raises CheckpointError with nothing held.

    way: auto, meta, agree or takeback. say: hears which one it is and why, of a job that has ranks. aim_ms: how long ranks
    may take to come to where they have the least device memory; None: as long as they need for two of their steps. Not
    with meta and takeback.
    """
    if way == "agree" and aim_ms == 0:
        return _agree(parts, "--barrier agree", say)
    reports = flat(all_of([part.ranks for part in parts]))
    members = [report for report in reports if report["members"]]
    if len(members) < 2:
        return _agree(parts, "fewer than two ranks", say)
    if way in ("auto", "agree") and _aimed(parts, members, aim_ms):
        try:
            return _agree(parts, "all ranks have the least device memory", say, once_s=SOON_S)
        except NoPoint:
            pass  # which has let them go
    if way == "agree":
        return _agree(parts, "--barrier agree", say)
    able = all(report["takes_back"] for report in members)
    if way == "takeback":
        if not able:
            lift(parts)
            raise CheckpointError(
                "cut",
                "--barrier takeback: this job's devices do not take back what has not begun",
                "run it with --barrier auto",
            )
        return _take_back(parts, "--barrier takeback", len(members), say)
    soon_s = SOON_S if able and way == "auto" else 0.0
    choice = choose(members) if way == "auto" else over_all(members)
    if choice.comm is None:
        if way == "meta":
            lift(parts)
            raise CheckpointError(
                "cut", f"--barrier meta: {choice.why}", "run it with --barrier auto"
            )
        try:
            return _agree(parts, choice.why, say, once_s=soon_s)
        except NoPoint as why:
            return _take_back(parts, f"agreement found no point: {why}", len(members), say)
    say(f"meta over communicator {name(choice.comm)}: {choice.why}")
    try:
        return _meet(parts, choice.comm, members, soon_s)
    except NoPoint as why:
        lift(parts)
        if soon_s:
            return _take_back(parts, f"meta found no point: {why}", len(members), say)
        if way == "meta":
            raise CheckpointError(
                "cut",
                f"--barrier meta: {why}",
                "try again while all ranks train, or use --barrier auto",
            ) from None
        return _agree(parts, f"meta found no point: {why}", say)
    except BaseException:
        lift(parts)
        raise


def _aimed(parts: Sequence[Part], members: list[dict[str, Any]], aim_ms: int | None) -> bool:
    """All ranks rest where they have the least device memory, whatever they have submitted; or nobody does."""
    steps_us = [report["period_us"] for report in members]
    if aim_ms == 0 or not all(steps_us):  # of one that has no rhythm nobody knows where that is
        return False
    most_s = min(2 * max(steps_us) / 1e6, AIM_MOST_S) if aim_ms is None else aim_ms / 1000
    began = time.monotonic()
    reports: list[dict[str, Any]] = []
    try:
        for _ in looks():
            reports = flat(all_of([partial(part.aim, reports) for part in parts]))
            found = [report for report in reports if report["members"]]
            if len(found) == len(members) and all(report["rests"] for report in found):
                return True
            at_work = all(_idle_ms(report) <= 1000 * most_s for report in found)
            if not at_work or time.monotonic() - began > most_s:
                break
    except BaseException:
        lift(parts)
        raise
    lift(parts)
    return False


def _idle_ms(report: dict[str, Any]) -> float:
    """Since the rank's last communication; without end where there was none."""
    ago = [ms for _, _, *both in report["traffic"] for ms in both if ms >= 0]
    return min(ago, default=float("inf"))


def choose(members: list[dict[str, Any]]) -> Choice:
    """For auto: a communicator of all ranks, which had collectives just now, and nothing else had."""
    choice = over_all(members)
    if choice.comm is None:
        return choice
    for report in members:
        for low, high, with_metas_ms, without_ms in report["traffic"]:
            if (low, high) != choice.comm and _recent(with_metas_ms, without_ms):
                return Choice(None, f"traffic over communicator {name((low, high))} too")
            if (low, high) == choice.comm and _recent(without_ms):
                return Choice(
                    None, f"sends, receives or graphs over communicator {name(choice.comm)}"
                )
        quiet_ms = _quiet_ms(report, choice.comm)
        if not _recent(quiet_ms):
            quiet = "not used yet" if quiet_ms < 0 else f"idle for {quiet_ms / 1000:.1f} s"
            return Choice(
                None, f"communicator {name(choice.comm)} is {quiet} on GPU {report['gpu']}"
            )
    return choice


def over_all(members: list[dict[str, Any]]) -> Choice:
    """The communicator that all of them are in; the one used last, where there are several."""
    shared: set[Comm] | None = None
    for report in members:
        own = {
            (m["comm"][0], m["comm"][1])
            for m in report["members"]
            if m["ranks"] == len(members)
            and m["complete"]
            and not m["aborted"]
            and not m["failure"]
        }
        shared = own if shared is None else shared & own
    if not shared:
        return Choice(None, f"no communicator has all {len(members)} ranks")

    def last_used(comm: Comm) -> tuple[float, Comm]:
        quiet = [_quiet_ms(report, comm) for report in members]
        return (max(q if q >= 0 else float("inf") for q in quiet), comm)

    return Choice(min(shared, key=last_used), f"all {len(members)} ranks, and their collectives")


def name(comm: Comm) -> str:
    return f"{comm[0] & 0xFFFFFFFF:08x}"


def _recent(*ago_ms: int) -> bool:
    return any(0 <= ms <= RECENT_MS for ms in ago_ms)


def _quiet_ms(report: dict[str, Any], comm: Comm) -> int:
    return next((t[2] for t in report["traffic"] if (t[0], t[1]) == comm), -1)


def _meet(
    parts: Sequence[Part], comm: Comm, members: list[dict[str, Any]], soon_s: float
) -> agreement.Outcome:
    began = time.monotonic()
    rounds = _all_stand(parts, comm, members, soon_s)
    # The agreement holds beside the barrier, and says whether everything else is closed too.
    reports = flat(all_of([part.hold for part in parts]))
    more, debt = agreement.settle(parts, reports, soon_s or CLOSED_S)
    if debt:
        raise NoPoint(f"the ranks have met, and {debt}")
    seconds = time.monotonic() - began
    return agreement.Outcome(len(members), rounds + more, 1, seconds, "meta")


def _all_stand(
    parts: Sequence[Part], comm: Comm, members: list[dict[str, Any]], soon_s: float
) -> int:
    """Rounds, until all members stand at one point of that communicator. Raises NoPoint."""
    began = moved = time.monotonic()
    rhythm_s = max(report["period_us"] for report in members) / 1e6
    attempt_s = soon_s or ATTEMPT_S
    patience_s = min(max(PATIENCE_S, 2 * rhythm_s), attempt_s)
    seen, attempt = -1, random.randint(1, MOST_ATTEMPTS)
    for rounds in looks():
        answers = all_of([partial(part.barrier, comm, attempt) for part in parts])
        if sum(answer.members for answer in answers) != len(members):
            raise NoPoint(f"a rank has left communicator {name(comm)}")
        if why := next((f for answer in answers if (f := _failure(answer.reports, comm))), ""):
            raise NoPoint(why)
        acquired = sum(answer.acquired for answer in answers)
        if acquired == len(members):
            return rounds
        now, done = time.monotonic(), sum(_submitted(answer.reports, comm) for answer in answers)
        if done != seen:
            moved, seen = now, done
        if now - moved > patience_s or now - began > attempt_s:
            raise NoPoint(
                f"{acquired} of {len(members)} ranks have met over communicator {name(comm)}, "
                f"after {now - began:.1f} s, of which nothing was submitted to it for {now - moved:.1f} s"
            )
    raise AssertionError  # looks() has no end


def _failure(reports: list[dict[str, Any]], comm: Comm) -> str:
    return next(
        (
            m["failure"]
            for r in reports
            for m in r["members"]
            if m["failure"] and tuple(m["comm"]) == comm
        ),
        "",
    )


def _submitted(reports: list[dict[str, Any]], comm: Comm) -> int:
    return sum(c[5] for r in reports for c in r["counts"] if (c[0], c[1]) == comm and c[2] < 0)


def _agree(parts: Sequence[Part], why: str, say: Say, once_s: float = 0.0) -> agreement.Outcome:
    outcome = agreement.acquire(parts, once_s=once_s)
    if outcome.ranks:
        say(f"agreement: {why}")
    return replace(outcome, way="agreement")


def _take_back(parts: Sequence[Part], why: str, ranks: int, say: Say) -> agreement.Outcome:
    """When the last of them withholds, what has not begun at one rank has begun at none."""
    say(f"take-back: {why}")
    began = time.monotonic()
    try:
        rounds = _withhold(parts)
        flush(parts, "cut")
    except BaseException:
        lift(parts)
        raise
    return agreement.Outcome(ranks, rounds, 1, time.monotonic() - began, "take-back")


def _withhold(parts: Sequence[Part]) -> int:
    """Rounds, until nothing is about to begin any more."""
    began = time.monotonic()
    for rounds in looks():
        answers = all_of([part.withhold for part in parts])
        members = [m for a in answers for report in a.reports for m in report["members"]]
        if failure := next((m["failure"] for m in members if m["failure"]), ""):
            raise CheckpointError("cut", failure, "the ranks that wait must end or abort it")
        if all(answer.still for answer in answers):
            return rounds
        if time.monotonic() - began > STILL_S:
            raise CheckpointError("cut", "a collective neither begins nor waits", "try again")
    raise AssertionError  # looks() has no end


def flush(parts: Sequence[Part], stage: str) -> None:
    """Returns when all that the servers of different trees have said to one another has come: behind a withhold, and
    again when dumps have taken back what had not begun. Raises CheckpointError of that stage."""
    number, began = random.randint(1, MOST_NUMBERS), time.monotonic()
    for _ in looks():
        answers = all_of([partial(part.mark, number) for part in parts])
        servers = {server["server"]: server for answer in answers for server in answer.servers}
        # Who is not there any more has nothing on its way that counts.
        missing = [
            (name, to)
            for name, server in servers.items()
            for to in server["to"]
            if to in servers and name not in servers[to]["from"]
        ]
        if not missing and all(answer.still for answer in answers):
            return
        if time.monotonic() - began > STILL_S:
            raise CheckpointError(
                stage,
                f"what servers of different trees say to one another does not come ({len(missing)} connections)",
                "try again",
            )
