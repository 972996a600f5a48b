# SPDX-License-Identifier: Apache-2.0
"""Jobs that have the same files: who counts as one, and what putting an image's files back does beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from devproxy import runtime
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.image import Image, TreeImage
from devproxy.control import member
from devproxy.errors import Refused
from devproxy.node import kin, restore
from devproxy.node.restore import Wishes
from devproxy.node.spec import JobSpec, write_job_file
from devproxy.node.stages import Stages

Make = Callable[..., runtime.JobFolder]


def spec(job: str, job_id: str, **more: str) -> JobSpec:
    return JobSpec(
        job=job, job_id=job_id, command=["a"], program="/a", cwd="/", device="soft",
        gpu_memory_bytes=1, build="cafe", abi="00", store="/s", **more,
    )  # fmt: skip


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Jobs that live as long as the test."""
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    monkeypatch.setenv("DEVPROXY_SHM_DIR", str(shm))
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    made: list[runtime.JobFolder] = []

    def one(name: str, job_id: str, **more: str) -> runtime.JobFolder:
        folder = runtime.create_job(name)
        made.append(folder)
        write_job_file(folder.path, spec(name, job_id, **more), [0], os.getpid())
        return folder

    yield one
    for folder in made:
        runtime.remove_job(folder)


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A file that is not there in the image."""
    return tmp_path / "later"


@pytest.fixture
def whole(later: Path) -> Image:
    files = [FileEntry(str(later), "absent", "C")]
    tree = TreeImage("i", "host", [0], {}, {}, {}, files, {}, {}, [])
    return Image("i", "o", "ab", 1.0, {}, {}, {}, [tree])


def names(whole: Image, node: int = 0, but: str = "") -> list[str]:
    return [other.name for other in kin.living(whole, node, but)]


def test_who_has_the_same_files(make: Make, whole: Image) -> None:
    make("o", "ab")
    make("copy", "cd", copy_of="ab")
    make("apart", "ef", copy_of="ab", files_dir="/d")
    make("node1", "ab.1")
    make("other", "gh")
    assert names(whole) == ["copy", "o"]
    assert names(whole, but="o") == ["copy"]
    assert names(whole, node=1) == ["node1"]
    of_copy = Image("i", "copy", "cd", 1.0, {"copy_of": "ab"}, {}, {}, whole.trees)
    assert names(of_copy, but="copy") == ["o"]


def tree_restore(whole: Image, folder: runtime.JobFolder, wishes: Wishes) -> restore.TreeRestore:
    one = object.__new__(restore.TreeRestore)
    tree = SimpleNamespace(spec=spec("o", "ab"), folder=folder)
    one.__dict__.update(_image=whole, _part=whole.trees[0], _wishes=wishes, _tree=tree)
    return one


def test_files_are_not_taken_back_under_a_copy(make: Make, whole: Image, later: Path) -> None:
    """The first thing that a resume looks at."""
    own = make("o", "ab")
    make("t0", "cd", copy_of="ab")
    later.write_text("of the copy")
    with pytest.raises(Refused) as caught:
        tree_restore(whole, own, Wishes())._check()
    assert str(caught.value) == (
        f"image i: job 't0', a copy of it, runs and has changed files since: {later}:"
        " end it first (devproxy kill t0): the image needs them as they were"
    )
    assert later.read_text() == "of the copy"


def test_a_copy_takes_nothing_back_under_the_first_job(
    make: Make, whole: Image, later: Path
) -> None:
    make("o", "ab")
    later.write_text("of the first")
    of_copy = Image("i", "t0", "cd", 1.0, {"copy_of": "ab"}, {}, {}, whole.trees)
    [other] = kin.living(of_copy, 0, but="t0")
    with pytest.raises(Refused, match="job 'o', of which it is a copy, runs and has changed files"):
        kin.check_beside(other, of_copy)


def test_files_that_a_copy_may_change_from_now_on_are_left_alone(make: Make, whole: Image) -> None:
    own = make("o", "ab")
    one = tree_restore(whole, own, Wishes())
    one._look_beside()
    assert one._wishes == Wishes(), "nobody is beside it"
    make("t0", "cd", copy_of="ab")
    one._look_beside()
    assert one._wishes == Wishes(put_files=False)


def test_a_node_that_has_waited_for_the_others_looks_again(
    whole: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node tells it what that one has seen on its own host, and before they met."""
    monkeypatch.setattr(member.Store, "open", lambda url: None)
    monkeypatch.setattr(member.image, "load", lambda store, image_id: whole)
    one = object.__new__(member.Member)
    one.__dict__.update(
        _tree=SimpleNamespace(spec=spec("o", "ab.1")),
        _local=SimpleNamespace(restore=lambda *given: given),
    )
    told = asdict(Wishes(looked_beside=True, image_job_id="ab"))
    *_, wishes, _ = one._restoring("i", 1, [0], told, Stages(lambda _: None, "manifest", ""))
    assert wishes == Wishes(looked_beside=False, image_job_id="ab.1")
