# SPDX-License-Identifier: Apache-2.0
"""Which way to a cut the coordinator takes (control/barrier.py), and what it does where the way in band finds no point."""

from __future__ import annotations

from typing import Any

import pytest

from devproxy.control import agreement, barrier
from devproxy.errors import CheckpointError
from devproxy.node.answer import Answer, Marked, Met, Still

WORLD, HALF = (1, 7), (2, 7)
NEVER = -1


def report(
    client: int,
    *traffic: tuple[tuple[int, int], int, int],
    comms: tuple[tuple[int, int], ...] = (WORLD,),
    count: int = 5,
    takes_back: bool = False,
    failure: str = "",
    period_us: int = 0,
) -> dict[str, Any]:
    """traffic: communicator, how long ago with metas, and without. A job of two ranks."""
    members = [
        {
            "comm": list(c),
            "ranks": 2,
            "rank": client,
            "complete": True,
            "aborted": False,
            "failure": failure,
        }
        for c in comms
    ]
    return {
        "client": client, "gpu": client, "members": members, "launches": 0, "host_functions": 0,
        "period_us": period_us, "rests": False,
        "counts": [[*WORLD, -1, -1, 0, count]],
        "traffic": [[*comm, with_metas, without] for comm, with_metas, without in traffic],
        "takes_back": takes_back,
    }  # fmt: skip


BUSY = (WORLD, 20, NEVER)


class Tree:
    """One rank. met: what barrier() answers, one after the other; the last answer stays."""

    def __init__(self, own: dict[str, Any], *met: bool, settled: bool = True) -> None:
        self.own, self.met, self.settled = own, list(met), settled
        self.lifts = self.held = self.asked = self.withheld = 0
        self.closes, self.stirs = True, 0
        self.aimed, self.rests_at = 0, 0  # 0: never

    def ranks(self) -> list[dict[str, Any]]:
        return [self.own]

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        assert comm == WORLD
        self.asked += 1
        met = self.met.pop(0) if len(self.met) > 1 else self.met[0]
        return Met(1, int(met), [self.own])

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert not reports or len(reports) == 2  # of all ranks
        self.aimed += 1
        self.own["rests"] = 0 < self.rests_at <= self.aimed
        return [self.own]

    def hold(self) -> list[dict[str, Any]]:
        self.held += 1
        return [self.own]

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        # What meta leaves open, the agreement closes.
        open_now = not self.closes or (not self.settled and self.asked and not self.lifts)
        return Answer(not open_now, [self.own], debt="rank 1 owes a receive" if open_now else "")

    def lift(self) -> None:
        self.lifts += 1

    def withhold(self) -> Still:
        self.withheld += 1
        return Still(self.withheld > self.stirs, [self.own])

    def mark(self, number: int) -> Marked:
        return Marked(True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "PATIENCE_S", 0.05)
    monkeypatch.setattr(barrier, "CLOSED_S", 0.02)
    monkeypatch.setattr(barrier, "SOON_S", 0.05)
    monkeypatch.setattr(agreement, "PAUSES_S", (0.0, 0.0))


def acquire(way: str, *trees: Tree, aim_ms: int | None = 0) -> tuple[agreement.Outcome, list[str]]:
    said: list[str] = []
    return barrier.acquire(trees, way, said.append, aim_ms=aim_ms), said


def resting(client: int, at: int, *traffic: Any, period_us: int = 20_000) -> Tree:
    """Busy, with a rhythm; rests when it has been asked so often."""
    own = report(client, *(traffic or (BUSY,)), period_us=period_us, takes_back=True)
    tree = Tree(own, True)
    tree.rests_at = at
    return tree


@pytest.mark.parametrize("way", ["auto", "agree"])
def test_ranks_come_to_their_least_memory_first(way: str) -> None:
    trees = (resting(1, 1), resting(2, 3))
    outcome, said = acquire(way, *trees, aim_ms=None)
    assert (outcome.way, outcome.ranks) == ("agreement", 2)
    assert said == ["agreement: all ranks have the least device memory"]
    assert [t.lifts for t in trees] == [0, 0]
    assert [(t.held, t.aimed) for t in trees] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("one", "other", "aim_ms"),
    [
        (resting(1, 1), resting(2, 0), None),  # it does not come in two steps
        (resting(1, 1), resting(2, 0), 10),  # nor in the time given
        (resting(1, 1), resting(2, 0, (WORLD, 5000, NEVER)), None),  # it is not at work
        (resting(1, 1), resting(2, 1, period_us=0), None),  # nobody knows its rhythm
        (resting(1, 1), resting(2, 1), 0),  # at once
    ],
)
def test_where_they_do_not_the_cut_comes_as_ever(
    one: Tree, other: Tree, aim_ms: int | None
) -> None:
    outcome, said = acquire("agree", one, other, aim_ms=aim_ms)
    assert said == ["agreement: --barrier agree"]
    aimed = aim_ms != 0 and all(t.own["period_us"] for t in (one, other))
    for tree in (one, other):
        assert (tree.lifts, bool(tree.aimed)) == ((1, True) if aimed else (0, False))
        assert tree.held == 1


def test_ranks_at_their_least_memory_that_do_not_settle() -> None:
    """They are let go, and the other ways come."""
    one, other = resting(1, 1), resting(2, 1)
    other.settled = other.closes = False
    outcome, said = acquire("auto", one, other, aim_ms=None)
    assert outcome.way == "take-back"
    assert one.lifts > 0


def test_it_is_for_agreement_and_auto() -> None:
    trees = (resting(1, 1), resting(2, 1))
    assert acquire("meta", *trees, aim_ms=None)[0].way == "meta"
    assert acquire("takeback", *trees, aim_ms=None)[0].way == "take-back"
    assert [t.aimed for t in trees] == [0, 0]


def test_auto_takes_meta_for_a_data_parallel_job_at_work() -> None:
    trees = (Tree(report(1, BUSY), False, True), Tree(report(2, BUSY), True))
    outcome, said = acquire("auto", *trees)
    assert (outcome.way, outcome.ranks) == ("meta", 2)
    assert said == ["meta over communicator 00000001: all 2 ranks, and their collectives"]
    assert [t.lifts for t in trees] == [0, 0]  # the cut comes next
    assert [t.held for t in trees] == [1, 1]  # with the closure looked at


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        ([(WORLD, 9000, NEVER)], [BUSY], "is idle for 9.0 s on GPU 1"),
        ([], [BUSY], "is not used yet on GPU 1"),
        ([BUSY, (HALF, 30, NEVER)], [BUSY], "traffic over communicator 00000002 too"),
        ([BUSY, (HALF, NEVER, 30)], [BUSY], "traffic over communicator 00000002 too"),
        ([(WORLD, 20, 30)], [BUSY], "sends, receives or graphs"),
    ],
)  # fmt: skip
def test_auto_says_why_it_takes_the_agreement(mine: Any, theirs: Any, why: str) -> None:
    outcome, said = acquire("auto", Tree(report(1, *mine), True), Tree(report(2, *theirs), True))
    assert outcome.way == "agreement"
    assert len(said) == 1
    assert said[0].startswith("agreement: ")
    assert why in said[0]


def test_old_traffic_beside_it_does_not_matter() -> None:
    own = (BUSY, (HALF, 60_000, 60_000))
    outcome, _ = acquire("auto", Tree(report(1, *own), True), Tree(report(2, *own), True))
    assert outcome.way == "meta"


def test_no_communicator_of_all_ranks() -> None:
    trees = (Tree(report(1, comms=(HALF,)), True), Tree(report(2, BUSY), True))
    outcome, said = acquire("auto", *trees)
    assert outcome.way == "agreement"
    assert "no communicator has all 2 ranks" in said[0]
    with pytest.raises(CheckpointError, match="--barrier meta: no communicator has all 2 ranks"):
        acquire("meta", *trees)


def test_without_a_point_in_time_auto_goes_on_to_the_agreement() -> None:
    trees = (Tree(report(1, BUSY), True), Tree(report(2, BUSY), False))
    outcome, said = acquire("auto", *trees)
    assert outcome.way == "agreement"
    assert "1 of 2 ranks have met" in said[1]
    assert [t.lifts for t in trees] == [1, 1]


def test_without_a_point_in_time_meta_fails_and_nothing_is_held() -> None:
    trees = (Tree(report(1, BUSY), True), Tree(report(2, BUSY), False))
    with pytest.raises(CheckpointError, match="--barrier meta: 1 of 2 ranks have met") as error:
        acquire("meta", *trees)
    assert error.value.stage == "cut"
    assert [t.lifts for t in trees] == [1, 1]
    assert [t.held for t in trees] == [0, 0]


def test_what_is_not_closed_is_not_cut() -> None:
    trees = (Tree(report(1, BUSY), True, settled=False), Tree(report(2, BUSY), True))
    outcome, said = acquire("auto", *trees)
    assert outcome.way == "agreement"
    assert "the ranks have met, and rank 1 owes a receive" in said[1]
    trees = (Tree(report(1, BUSY), True, settled=False), Tree(report(2, BUSY), True))
    with pytest.raises(CheckpointError, match="rank 1 owes a receive"):
        acquire("meta", *trees)
    assert [t.lifts for t in trees] == [1, 1]


def test_agree_asks_nobody_to_meet() -> None:
    trees = (Tree(report(1, BUSY), True), Tree(report(2, BUSY), True))
    outcome, said = acquire("agree", *trees)
    assert outcome.way == "agreement"
    assert said == ["agreement: --barrier agree"]
    assert [t.asked for t in trees] == [0, 0]


def test_a_job_without_communicators_hears_nothing() -> None:
    alone = Tree(report(1, comms=()), True)
    outcome, said = acquire("auto", alone)
    assert outcome.ranks == 0
    assert said == []


# -- taking back ------------------------------------------------------------------------------------------------------


def able(client: int, *traffic: Any, **more: Any) -> dict[str, Any]:
    return report(client, *traffic, takes_back=True, **more)


def test_auto_takes_back_where_meta_finds_no_point_soon() -> None:
    trees = (Tree(able(1, BUSY), True), Tree(able(2, BUSY), False))
    outcome, said = acquire("auto", *trees)
    assert (outcome.way, outcome.ranks) == ("take-back", 2)
    assert said[1].startswith("take-back: meta found no point: 1 of 2 ranks have met")
    assert [t.lifts for t in trees] == [1, 1]  # of the barrier; what is withheld is not lifted
    assert [t.held for t in trees] == [0, 0]


def test_auto_takes_back_where_the_agreement_finds_no_point_soon() -> None:
    trees = (Tree(able(1), True), Tree(able(2), True))
    trees[1].closes = False
    outcome, said = acquire("auto", *trees)
    assert outcome.way == "take-back"
    assert said == ["take-back: agreement found no point: rank 1 owes a receive"]
    assert [t.lifts for t in trees] == [1, 1]


def test_a_point_is_taken_where_there_is_one() -> None:
    outcome, _ = acquire("auto", Tree(able(1, BUSY), True), Tree(able(2, BUSY), True))
    assert outcome.way == "meta"
    trees = (Tree(able(1), True), Tree(able(2), True))
    assert acquire("auto", *trees)[0].way == "agreement"
    assert [t.withheld for t in trees] == [0, 0]


def test_one_device_that_does_not_take_back_is_enough() -> None:
    trees = (Tree(able(1, BUSY), True), Tree(report(2, BUSY), False))
    assert acquire("auto", *trees)[0].way == "agreement"
    with pytest.raises(CheckpointError, match="do not take back what has not begun"):
        acquire("takeback", *trees)
    assert [t.withheld for t in trees] == [0, 0]


def test_it_waits_for_what_is_about_to_begin() -> None:
    trees = (Tree(able(1), True), Tree(able(2), True))
    trees[1].stirs = 3
    outcome, said = acquire("takeback", *trees)
    assert (outcome.way, outcome.rounds) == ("take-back", 4)
    assert said == ["take-back: --barrier takeback"]
    assert [t.lifts for t in trees] == [0, 0]


def test_a_communicator_that_cannot_go_on_is_named() -> None:
    trees = (
        Tree(able(1, failure="rank 0 of 2: rank 1 on GPU 1 cannot be reached"), True),
        Tree(able(2), True),
    )
    with pytest.raises(CheckpointError, match="rank 1 on GPU 1 cannot be reached"):
        acquire("takeback", *trees)
    assert [t.lifts for t in trees] == [1, 1]
