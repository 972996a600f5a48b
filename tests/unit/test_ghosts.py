# SPDX-License-Identifier: Apache-2.0
"""What a restore that was ended in the middle has left is removed, and two restores keep out of each other's way."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from devproxy.checkpoint import criu_image
from devproxy.node import init, processes

CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def ghost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one that the image `a` makes; that of the image `b` lies beside it."""
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(criu_image, "ghosts", lambda images: [f"{tmp_path}/{images}.ghost"])
    return tmp_path / "a.ghost"


def test_before_and_after_a_failure(ghost: Path) -> None:
    ghost.touch()
    with processes.no_ghosts("a", "/job"):
        assert not ghost.exists()
        ghost.touch()  # CRIU's own, which it removes itself where all goes well
    assert ghost.exists()
    with pytest.raises(KeyError), processes.no_ghosts("a", "/job"):
        ghost.touch()
        raise KeyError
    assert not ghost.exists()


def test_a_place_that_cannot_be_looked_at_is_left_to_criu(ghost: Path) -> None:
    ghost.mkdir()
    with processes.no_ghosts("a", "/job"):
        assert ghost.is_dir()


def test_in_the_job_s_own_folder(tmp_path: Path) -> None:
    inside = f"{init.mount_point()}/sub/x.cr.1.ghost"
    assert processes._seen_from_here(inside, "/jobs/j") == "/jobs/j/sub/x.cr.1.ghost"
    assert processes._seen_from_here("/dev/shm/x.cr.1.ghost", "/jobs/j") == "/dev/shm/x.cr.1.ghost"


@pytest.mark.parametrize(("other", "waits"), [("a", True), ("b", False)])
def test_two_restores_at_once(ghost: Path, other: str, waits: bool) -> None:
    """Of the same names one after the other; of others side by side."""
    inside, leave, second = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Event()

    def hold(images: str, entered: Event, until: Event) -> None:
        with processes.no_ghosts(images, "/job"):
            entered.set()
            assert until.wait(30)

    first = CONTEXT.Process(target=hold, args=("a", inside, leave))
    first.start()
    assert inside.wait(30)
    twin = CONTEXT.Process(target=hold, args=(other, second, leave))
    twin.start()
    assert second.wait(0.5 if waits else 30) is not waits
    leave.set()
    first.join(30)
    assert second.wait(30)
    twin.join(30)
    assert (first.exitcode, twin.exitcode) == (0, 0)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_mount_point_is_made(tmp_path: Path, is_folder: bool) -> None:
    place = tmp_path / "a" / "b"
    processes._make_mount_points({"mounts": [[str(place), is_folder]]})
    assert place.is_dir() == is_folder and place.exists()
