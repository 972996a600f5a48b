# SPDX-License-Identifier: Apache-2.0
"""How the coordinator carries the ranks' reports (control/agreement.py). The rules themselves: tests/model/agreement_model.cc."""

from __future__ import annotations

from typing import Any

import pytest

from devproxy.control import agreement
from devproxy.errors import CheckpointError
from devproxy.node.answer import Answer


def report(client: int, count: int, launches: int = 0) -> dict[str, Any]:
    return {"client": client, "members": [{}], "counts": [[1, 1, -1, -1, 0, count]],
            "launches": launches, "host_functions": 0}  # fmt: skip


class Tree:
    """Answers from a list; the last answer stays."""

    def __init__(self, held: list[dict[str, Any]], *answers: Answer) -> None:
        self.held, self.answers = held, list(answers)
        self.asked: list[list[dict[str, Any]]] = []
        self.lifts = 0

    def hold(self) -> list[dict[str, Any]]:
        return self.held

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        self.asked.append(reports)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def lift(self) -> None:
        self.lifts += 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.02)
    monkeypatch.setattr(agreement, "PAUSES_S", (0.0, 0.0))


def test_a_job_without_communicators_is_not_held() -> None:
    tree = Tree([report(1, 0) | {"members": []}], Answer(True))
    assert agreement.acquire([tree]) == agreement.Outcome()
    assert tree.asked == []
    assert tree.lifts == 1


def test_every_tree_gets_the_reports_of_all() -> None:
    behind = Tree(
        [report(1, 6)],
        Answer(False, [report(1, 7)], debt="rank 0 owes"),
        Answer(True, [report(1, 7)]),
    )
    ahead = Tree([report(2, 7)], Answer(True, [report(2, 7)]))
    outcome = agreement.acquire([behind, ahead])
    assert (outcome.ranks, outcome.rounds, outcome.attempts) == (2, 2, 1)
    assert (
        behind.asked == ahead.asked == [[report(1, 6), report(2, 7)], [report(1, 7), report(2, 7)]]
    )
    assert behind.lifts == ahead.lifts == 0  # the cut comes next


def test_no_progress_lifts_tries_again_and_names_the_debtor() -> None:
    tree = Tree(
        [report(1, 6)],
        Answer(False, [report(1, 6)], debt="rank 3 of 4 has submitted 6 of 7 collectives"),
    )
    with pytest.raises(CheckpointError, match="rank 3 of 4 has submitted 6 of 7") as error:
        agreement.acquire([tree])
    assert error.value.stage == "cut"
    assert tree.lifts == 3  # as many as attempts


def test_kernels_of_the_debtor_are_progress() -> None:
    slow = [Answer(False, [report(1, 6, launches=n)], debt="rank 0 owes") for n in range(60)]
    tree = Tree([report(1, 6)], *slow, Answer(True, [report(1, 7)]))
    assert agreement.acquire([tree]).attempts == 1


def test_a_communicator_that_cannot_go_on_fails_at_once() -> None:
    tree = Tree(
        [report(1, 6)], Answer(False, failure="rank 1 of 2: rank 0 on GPU 0 cannot be reached")
    )
    with pytest.raises(CheckpointError, match="rank 0 on GPU 0 cannot be reached"):
        agreement.acquire([tree])
    assert len(tree.asked) == 1
    assert tree.lifts == 1


def test_a_server_that_is_gone_lifts_the_others() -> None:
    class Gone(Tree):
        def agree(self, reports: list[dict[str, Any]]) -> Answer:
            raise OSError("it hung up")

    gone, other = Gone([report(1, 6)]), Tree([report(2, 6)], Answer(True))
    with pytest.raises(OSError, match="hung up"):
        agreement.acquire([gone, other])
    assert (gone.lifts, other.lifts) == (1, 1)
