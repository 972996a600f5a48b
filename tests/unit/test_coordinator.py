# SPDX-License-Identifier: Apache-2.0
"""The coordinator over trees that are told how to behave: the order of steps, and how a verb ends, with one tree and two."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devproxy import state
from devproxy.checkpoint import criu, image
from devproxy.checkpoint.errors import DamagedChunk, DamagedPack, StoreError
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.control import coordinator_api as api
from devproxy.control.coordinate import job, watching
from devproxy.control.coordinate.storing import STORE_TRIES
from devproxy.control.coordinator import JobCoordinator
from devproxy.control.job_log import follow_log
from devproxy.control.pace import Pace
from devproxy.errors import (
    CheckpointError,
    DevproxyError,
    MigrateError,
    Refused,
    ResizeError,
    RestoreError,
    SuspendError,
)
from devproxy.node import transcript
from devproxy.node.dump import _Criu
from devproxy.node.placement import place
from devproxy.node.restore import Wishes
from devproxy.node.spec import JobSpec
from devproxy.node.stages import Stages
from tests.unit.test_distrust import rot as rot_pack

STEPS = (
    "check",
    "cut",
    "write",
    "thaw",
    "end_tree",
    "leave",
    "copy",
    "start",
    "ready",
    "hand_over",
)


@pytest.fixture(autouse=True)
def of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests: another user's job gets no images (tests/integration/test_other_user.py)."""
    monkeypatch.setattr(job, "is_root", lambda: True)


class FakePart:
    """A dump or a move: notes each step, and fails at the one that its tree names."""

    def __init__(self, tree: FakeTree, stages: Stages, to: list[int] | None = None) -> None:
        self.stages = stages
        self.warnings: list[str] = []
        self.still_s = 1.0 + tree.number
        self.freeze_s = 0.5
        self.handed_over = False
        self._tree = tree
        self._to = to

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in STEPS:
            raise AttributeError(name)

        def step(*_: object) -> None:
            self._tree.note(name)
            # As the real ones: looking for what is in the way is the stage refuse_early.
            self.stages.reach(
                "refuse_early" if name == "check" else name, "", f"tree {self._tree.number}"
            )
            if name == "end_tree":  # CRIU kills it as its last act, and may say no all the same
                self._tree.alive = False
            if name == self._tree.fails_at:
                raise self._tree.error
            if name == "hand_over":
                self.handed_over = True
                self._tree.gpus = self._to or []

        return step

    def ranks(self) -> list[dict[str, Any]]:
        """A job without communicators."""
        return []

    def hold(self) -> list[dict[str, Any]]:
        return []

    def lift(self) -> None:
        pass

    def put_share(self, writer: Writer, number: int, of: int) -> None:
        assert number == self._tree.number and of > 1

    def put(self, writer: Writer, report: Callable[[int, int], None]) -> dict[str, Any]:
        self._tree.note("put")
        chunks = writer.put_bytes(self._tree.text + b"%d" % self._tree.number, kind="host")
        return {
            "host": f"host{self._tree.number}",
            "gpus": self._tree.gpus,
            "stdio": {"modes": []},
            "facts": {},
            "criu": {},
            "files": [],
            "device": {},
            "shared": {},
            "processes": [{"name": "core.img", "chunks": chunks}],
        }

    def tree_has_ended(self) -> bool:
        return not self._tree.alive

    def go_on(self) -> None:
        pass

    def close(self, error: BaseException | None = None) -> None:
        self._tree.note("close")


class FakeTree:
    def __init__(self, number: int, gpus: list[int], seen: list[str]) -> None:
        self.number, self.gpus = number, gpus
        self.alive = True
        self.ended = False
        self.fails_at = ""
        self.known = False
        self.text = b"tree "
        self.error: Exception = OSError(5, "broken")
        self.whole: list[object] = []
        self._seen = seen

    def note(self, what: str) -> None:
        self._seen.append(f"{what}{self.number}")

    def has_processes(self) -> bool:
        return self.alive

    def lives(self) -> bool:
        return self.alive

    def has_ended(self) -> bool:
        return self.ended

    def lost_servers(self) -> str:
        return ""

    def dump(self, stages: Stages, *, leave: bool, strict: bool) -> FakePart:
        return FakePart(self, stages)

    def dumped(self, dump: object) -> None:
        self.whole.append(dump)

    def place(self, onto: list[int]) -> tuple[list[int], bool]:
        nobody_knows = [[0] * len(self.gpus)] * len(self.gpus)
        return place(nobody_knows, onto, self.gpus), self.known

    def move(self, to: list[int], stages: Stages, onto: list[int] | None = None) -> FakePart:
        return FakePart(self, stages, onto[::-1] if onto else to)

    def restore(
        self,
        store: Store,
        whole: image.Image,
        number: int,
        gpus: list[int],
        wishes: Wishes,
        stages: Stages,
    ) -> FakeRestoring:
        assert whole.trees[number].host == f"host{self.number}"
        return FakeRestoring(self, gpus, stages)

    def about(self) -> str:
        return f"tree {self.number}"

    def addresses(self) -> list[str]:
        return [f"10.0.0.{self.number}:{gpu}" for gpu in self.gpus]

    def meet(self, table: str) -> None:
        self.note("meet")
        self.table = table


class FakeRestoring:
    def __init__(self, tree: FakeTree, gpus: list[int], stages: Stages) -> None:
        self.stages = stages
        self._tree, self._gpus = tree, gpus
        self._before = tree.gpus

    def prepare(self) -> None:
        self._tree.note("prepare")
        self.stages.reach("host", "", f"tree {self._tree.number}")
        if self._tree.fails_at == "restore":
            raise self._tree.error
        self._tree.gpus, self._tree.alive = self._gpus, True

    def go_on(self) -> None:
        self._tree.note("go_on")
        if self._tree.fails_at == "go_on":
            raise self._tree.error

    def settle(self) -> None:
        self._tree.note("settle")

    def undo(self) -> None:
        self._tree.note("undo")
        self._tree.gpus, self._tree.alive = self._before, False


class World:
    def __init__(self, folder: Path, trees: int) -> None:
        build = folder / "builds" / "cafe"
        build.mkdir(parents=True)
        (build / "libcuda.so.1").write_bytes(b"library")
        self.folder = folder
        self.seen: list[str] = []
        self.trees = [FakeTree(n, [2 * n, 2 * n + 1], self.seen) for n in range(trees)]
        self.store = Store.open(str(folder / "store"))
        self.lib = str(build)
        self.spec = spec = JobSpec(
            job="j", job_id="ab12", command=["a"], program="/a", cwd="/", device="soft",
            gpu_memory_bytes=1, build="cafe", abi="00", store=str(folder / "store"),
        )  # fmt: skip
        self.job = JobCoordinator(spec, self.trees, lib=self.lib, opened=self.store)  # type: ignore[arg-type]

    def checkpoint(self) -> api.ImageFacts:
        return self.job.checkpoint(cut_wait_ms=0, strict=False, report=lambda _: None)

    def suspend(self) -> api.ImageFacts:
        return self.job.suspend(cut_wait_ms=0, strict=False, report=lambda _: None)

    def resume(self, gpus: list[int] | None = None) -> None:
        self.job.resume(gpus=gpus, report=lambda _: None)

    def migrate(self, to: list[int], anew: bool = False) -> dict[str, Any]:
        return self.job.migrate(to=to, anew=anew, report=lambda _: None)

    def resize(self, gpus: list[int], onto: list[int] | None = None) -> dict[str, Any]:
        return self.job.resize(gpus=gpus, onto=onto, report=lambda _: None)

    def order(self) -> list[str]:
        """Each step once, where all trees have it before the next."""
        found: list[str] = []
        for entry in self.seen:
            if not found or found[-1] != entry[:-1]:
                found.append(entry[:-1])
        return found

    def images(self) -> list[str]:
        return [one.id for one in self.store.images()]


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    return World(tmp_path, request.param)


def test_a_checkpoint_stores_behind_the_thaw(world: World) -> None:
    facts = world.checkpoint()
    assert world.order() == ["check", "cut", "write", "thaw", "put", "close"]
    whole = image.load(world.store, facts.id)
    assert [tree.host for tree in whole.trees] == [f"host{t.number}" for t in world.trees]
    assert [tree.gpus for tree in whole.trees] == [t.gpus for t in world.trees]
    assert facts.still_s == len(world.trees)  # its slowest tree's
    assert world.job.phase == api.RUNNING
    assert all(len(tree.whole) == 1 for tree in world.trees)


class Given(Exception):
    """Somebody has pressed Ctrl-C."""


def ends_while_it_uploads(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    *,
    periodic: bool,
    gives_up: bool = False,
) -> tuple[bool, list[str]]:
    """The command ends at the upload. Whether its end waited for the image, and the images once all is over."""
    uploading, go_on = threading.Event(), threading.Event()
    looks: list[float] = []
    put_build = image.put_build

    def slow(writer: Writer, lib: str) -> Any:
        uploading.set()
        assert go_on.wait(20)
        return put_build(writer, lib)

    def interrupted() -> None:
        looks.append(time.monotonic())
        if gives_up:
            raise Given
        if len(looks) == 3:
            go_on.set()

    monkeypatch.setattr(image, "put_build", slow)
    verb = threading.Thread(
        target=lambda: world.job.checkpoint(
            cut_wait_ms=0, strict=False, report=lambda _: None, periodic=periodic
        )
    )
    verb.start()
    assert uploading.wait(20)
    for tree in world.trees:
        tree.alive, tree.ended = False, True
    try:
        world.job.finish_image(code, interrupted)
        waited = bool(looks)
        assert not waited or len(world.images()) == 1
    finally:
        go_on.set()
        verb.join(20)
    return waited, world.images()


@pytest.mark.parametrize(
    ("code", "periodic", "waits"),
    [(0, False, True), (137, False, True), (137, True, True), (0, True, False)],
)
def test_a_job_ends_behind_the_upload_of_its_image(
    world: World, monkeypatch: pytest.MonkeyPatch, code: int, periodic: bool, waits: bool
) -> None:
    waited, _ = ends_while_it_uploads(world, monkeypatch, code, periodic=periodic)
    assert waited is waits


def test_ctrl_c_gives_up_the_upload(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Given):
        ends_while_it_uploads(world, monkeypatch, 137, periodic=False, gives_up=True)


def test_a_job_without_an_image_under_way_just_ends(world: World) -> None:
    def interrupted() -> None:
        raise AssertionError("it waits")

    world.checkpoint()
    world.job.finish_image(137, interrupted)


def test_a_clock_set_back_is_said_and_costs_no_image(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, warnings = [], []
    for now in (5000.0, 5001.0, 1000.0, 1001.0, 1002.0):
        monkeypatch.setattr("devproxy.checkpoint.writer.time.time", lambda now=now: now)
        facts = world.job.checkpoint(cut_wait_ms=None, strict=False, report=print)
        ids.append(facts.id)
        warnings.append([text for text in facts.warnings if "clock" in text])
    assert world.images() == ids[2:]
    assert [len(said) for said in warnings] == [0, 0, 1, 0, 0]
    assert "4001 s before" in warnings[2][0]


def rot(world: World) -> None:
    """A bit of each pack changes, as a disk does it: without a new time."""
    for path in Path(world.store.url.removeprefix("file://")).glob("packs/*.pack"):
        data, before = path.read_bytes(), path.stat()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_image_over_a_damaged_pack_is_stored_once_more(world: World) -> None:
    """What was staged is there still."""
    first = world.checkpoint()
    rot(world)
    second = world.checkpoint()
    assert second.new_bytes == first.new_bytes
    assert any("is damaged, or was changed" in text for text in second.warnings), second.warnings
    assert world.seen.count("put0") == 3
    assert world.store.verify(second.id, full=True).whole
    assert image.load(world.store, second.id)
    assert world.checkpoint().new_bytes == 0
    assert not [text for text in world.checkpoint().warnings if "damaged" in text]


def test_an_image_is_given_up_where_each_try_finds_a_damaged_pack(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.checkpoint()

    def fails(writer: Writer, relied: object) -> None:
        raise DamagedPack(writer.image_id, "0.0", world.store.url)

    monkeypatch.setattr(Writer, "_check_packs", fails)
    with pytest.raises(CheckpointError) as caught:
        world.checkpoint()
    assert world.seen.count("put0") == 1 + STORE_TRIES
    assert "pack 0.0 of store" in str(caught.value)
    assert caught.value.state.startswith("the job continues")
    assert first.id in caught.value.state
    assert world.images() == [first.id]


def test_a_restore_needs_nothing_that_is_written_to_the_store(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Read-only, or full: its first image takes the epoch, and is refused where that cannot be."""
    whole = image.load(world.store, world.checkpoint().id)
    create = world.store.backend.create

    def read_only(name: str, data: bytes, *, stage: str) -> bool:
        raise StoreError(stage, name, "Read-only file system")

    monkeypatch.setattr(world.store.backend, "create", read_only)
    gpus = [gpu for tree in world.trees for gpu in tree.gpus]
    trees: Any = world.trees
    job = JobCoordinator(world.spec, trees, lib=world.lib, phase=api.RESTORING, opened=world.store)
    job.restore(whole, gpus, Wishes(), Stages(lambda _: None, "manifest", ""), lambda: None)
    assert job.phase == api.RUNNING
    assert "take the epoch failed" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match="Read-only"):
        job.checkpoint(cut_wait_ms=None, strict=False, report=print)
    monkeypatch.setattr(world.store.backend, "create", create)
    job.checkpoint(cut_wait_ms=None, strict=False, report=print)
    assert world.store.epoch("ab12") == 2


def test_a_suspend_stores_before_anything_ends(world: World) -> None:
    world.suspend()
    assert world.order() == ["check", "cut", "write", "put", "end_tree", "leave", "close"]
    assert world.job.phase == api.SUSPENDED
    with pytest.raises(Refused, match="the job is suspended"):
        world.checkpoint()
    count = 2 * len(world.trees)
    with pytest.raises(Refused, match=f"has {count} GPU"):
        world.resume([7])
    world.resume(list(range(10, 10 + count)))
    assert world.job.gpus == list(range(10, 10 + count))
    assert world.trees[-1].gpus == [10 + count - 2, 10 + count - 1]
    assert world.job.phase == api.RUNNING


def test_trees_go_on_when_all_stand_and_know_one_another(world: World) -> None:
    world.suspend()
    world.seen.clear()
    world.resume()
    introduced = ["meet"] if len(world.trees) > 1 else []
    assert world.order() == ["prepare", *introduced, "go_on", "settle"]
    if introduced:
        token, *lines = world.trees[0].table.splitlines()
        assert token.split()[0] == "token"
        assert len(bytes.fromhex(token.split()[1])) == 32
        assert lines == ["tree 0 2 10.0.0.0:0 10.0.0.0:1", "tree 1 2 10.0.0.1:2 10.0.0.1:3"]
        assert world.trees[1].table == world.trees[0].table


def test_servers_get_a_key_where_they_encrypt(world: World) -> None:
    """The same for all trees, and another for each life of the job."""
    keys = []
    for _ in range(2):
        job = JobCoordinator(world.spec, world.trees, lib=world.lib, opened=world.store)  # type: ignore[arg-type]
        job.introduce()
        assert not any("key" in tree.table for tree in world.trees if len(world.trees) > 1)
        world.spec.encrypt_data = True
        job.introduce()
        world.spec.encrypt_data = False
        tables = {tree.table for tree in world.trees if len(world.trees) > 1} or {""}
        assert len(tables) == 1
        keys += [line.split()[1] for line in tables.pop().splitlines() if line.startswith("key ")]
    if len(world.trees) > 1:
        assert len(set(keys)) == 2
        assert all(len(bytes.fromhex(key)) == 32 for key in keys)
    else:
        assert not keys


@pytest.mark.parametrize("step", ["cut", "write", "thaw"])
def test_a_failed_checkpoint(world: World, step: str) -> None:
    last = world.trees[-1]
    last.fails_at = step
    with pytest.raises(CheckpointError, match="broken") as caught:
        world.checkpoint()
    assert (caught.value.stage, caught.value.object) == (step, f"tree {last.number}")
    assert caught.value.state == "the job continues"
    assert [s for s in world.seen if s.startswith("close")] == [
        f"close{t.number}" for t in world.trees
    ]
    assert world.job.phase == api.RUNNING
    assert world.images() == []
    assert not any(tree.whole for tree in world.trees)
    last.fails_at = ""
    world.checkpoint()


def test_what_is_in_the_way_is_refused_as_it_is(world: World) -> None:
    world.trees[-1].fails_at, world.trees[-1].error = "check", Refused("a socket", "close it")
    with pytest.raises(Refused, match="a socket: close it"):
        world.checkpoint()
    assert "cut" not in world.order()
    assert world.job.phase == api.RUNNING


def test_a_suspend_that_fails_before_its_image_is_whole(world: World) -> None:
    world.trees[-1].fails_at = "write"
    with pytest.raises(SuspendError):
        world.suspend()
    assert "end_tree" not in world.order()
    assert world.job.phase == api.RUNNING


def test_a_suspend_whose_trees_ended_all_the_same(world: World) -> None:
    """The image is whole: an error while the trees end leaves the job suspended, with a warning."""
    for tree in world.trees:
        tree.fails_at, tree.error = "end_tree", OSError(5, "CRIU said no")
    facts = world.suspend()
    assert any("CRIU said no" in warning for warning in facts.warnings)
    assert world.job.phase == api.SUSPENDED


def test_a_resume_that_fails_can_be_tried_again(world: World) -> None:
    world.suspend()
    world.trees[-1].fails_at = "restore"
    with pytest.raises(RestoreError) as caught:
        world.resume()
    assert (caught.value.stage, caught.value.state) == ("host", "it is still suspended")
    assert world.job.phase == api.SUSPENDED
    assert "go_on" not in world.order()
    assert {s for s in world.seen if s.startswith("undo")} == {
        f"undo{t.number}" for t in world.trees
    }
    world.trees[-1].fails_at = ""
    world.resume()
    assert world.job.phase == api.RUNNING


def test_a_resume_that_is_refused_says_how_the_job_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was begun: it is no failure of the restore."""
    world.suspend()

    def prepare(self: FakeRestoring) -> None:
        raise Refused("job 't0' is in the way", "end it")

    with monkeypatch.context() as patch:
        patch.setattr(FakeRestoring, "prepare", prepare)
        with pytest.raises(Refused) as caught:
            world.resume()
    assert str(caught.value) == "job 't0' is in the way: end it; it is still suspended"
    assert world.job.phase == api.SUSPENDED
    assert "settle" not in world.order()
    world.resume()
    assert world.job.phase == api.RUNNING


def test_a_tree_that_runs_is_undone_where_another_does_not_go_on(world: World) -> None:
    """And is not the job's before."""
    world.suspend()
    world.trees[-1].fails_at = "go_on"
    with pytest.raises(RestoreError):
        world.resume()
    assert world.job.phase == api.SUSPENDED
    assert "settle" not in world.order()
    assert world.order()[-1] == "undo"


def test_a_migrate_gives_each_tree_its_share(world: World) -> None:
    count = 2 * len(world.trees)
    with pytest.raises(Refused, match="--to needs as many"):
        world.migrate([1])
    with pytest.raises(Refused, match="each once"):
        world.migrate([1] * count)
    facts = world.migrate(list(range(20, 20 + count)))
    assert facts["gpus"] == list(range(20, 20 + count)) == world.job.gpus
    introduced = ["meet"] if len(world.trees) > 1 else []
    whole = ["check", "cut", "copy", "start", *introduced, "ready", "hand_over", "close"]
    assert world.order() == whole
    there = world.job.gpus
    assert world.migrate(there) == {"gpus": there, "from_gpus": there, "still_s": 0.0}
    assert world.order() == whole  # it is there
    assert world.migrate(there, anew=True)["gpus"] == there
    assert world.order() == [*whole, *whole]


def test_a_resize_shares_gpus(world: World) -> None:
    count = 2 * len(world.trees)
    with pytest.raises(Refused, match=f"needs {count} numbers, 1 given"):
        world.resize([1])
    with pytest.raises(Refused, match=f"needs {count} numbers, 0 given"):
        world.resize([])
    facts = world.resize([1] * count)
    assert facts["gpus"] == [1] * count == world.job.gpus
    assert [tree.gpus for tree in world.trees] == [[1, 1]] * len(world.trees)
    before = world.order()
    there = [1] * count
    assert world.resize(there) == {"gpus": there, "from_gpus": there, "still_s": 0.0}
    assert world.order() == before  # asked again, it does nothing
    world.trees[-1].fails_at = "start"
    with pytest.raises(ResizeError) as caught:
        world.resize(list(range(count)))
    assert caught.value.state == "the job continues on its old GPU"
    assert str(caught.value).startswith("resize failed at ")
    assert world.job.gpus == [1] * count


def test_a_resize_onto_gpus_goes_where_the_trees_say(world: World) -> None:
    count = 2 * len(world.trees)
    for onto, gpus, says in (
        ([1, 1], [], "names a GPU twice"),
        ([1, 2, 3], [], r"names 3 GPUs, and job j sees 2"),
        ([1], [1] * count, "exclude each other"),
    ):
        with pytest.raises(Refused, match=says):
            world.resize(gpus, onto=onto)
    # The guess was 5, 6; what the trees found in the cut is 6, 5.
    facts = world.resize([], onto=[5, 6])
    assert facts["gpus"] == [6, 5] * len(world.trees) == world.job.gpus
    # Where they are is the guess now: it is looked at all the same, until all trees know.
    facts = world.resize([], onto=[6, 5])
    assert facts["gpus"] == [5, 6] * len(world.trees) == world.job.gpus
    before = world.order()
    for tree in world.trees:
        tree.known = True
    assert world.resize([], onto=[5, 6])["still_s"] == 0.0
    assert world.order() == before


@pytest.mark.parametrize("step", ["start", "ready"])
def test_a_migrate_that_fails_before_the_hand_over(world: World, step: str) -> None:
    """On one of the trees: then none hands over."""
    before = world.job.gpus
    world.trees[-1].fails_at = step
    with pytest.raises(MigrateError) as caught:
        world.migrate(list(range(20, 20 + len(before))))
    assert caught.value.state == "the job continues on its old GPU"
    assert world.job.gpus == before
    assert "hand_over" not in world.order()
    assert world.job.phase == api.RUNNING


def test_the_phase_of_a_job_whose_tree_has_ended(world: World) -> None:
    world.trees[-1].ended = True
    assert world.job.status().phase == api.ENDING
    with pytest.raises(Refused, match="the job is ending"):
        world.checkpoint()


def test_the_last_error_is_of_what_failed_last(world: World) -> None:
    """A user's slip is none of the job's, and one that was got over is over."""
    world.trees[-1].fails_at = "cut"
    with pytest.raises(CheckpointError):
        world.checkpoint()
    with pytest.raises(Refused):
        world.migrate([1])
    assert "checkpoint failed at cut" in world.job.status().last_error
    world.trees[-1].fails_at = ""
    world.migrate(list(range(20, 20 + 2 * len(world.trees))))
    assert world.job.status().last_error == ""
    world.trees[-1].fails_at, world.trees[-1].error = "check", Refused("a socket", "close it")
    world.job._watch.due()
    assert world.job.status().last_error == "a socket: close it"


def test_a_suspend_takes_longer_than_the_job_stands_still(world: World) -> None:
    for tree in world.trees:
        plain = tree.note
        tree.note = lambda what, plain=plain: (plain(what), time.sleep(0.1 * (what == "leave")))
    facts = world.suspend()
    assert facts.total_s >= 0.1  # the ends of processes and servers count, too


def test_images_are_those_in_the_store(world: World) -> None:
    for _ in range(4):
        last = world.checkpoint().id
        time.sleep(0.002)
    status = world.job.status()
    assert (status.images, status.last_image) == (len(world.images()), last)
    assert status.images == 3  # --keep
    again = JobCoordinator(
        world.spec, world.trees, lib=world.lib, phase=api.RESTORING, opened=world.store  # type: ignore[arg-type]
    )  # fmt: skip
    whole = image.load(world.store, last)
    stages = Stages(lambda _: None, "manifest", "")
    again.restore(whole, again.gpus, Wishes(), stages, lambda: None)
    assert (again.status().images, again.status().last_image) == (3, last)


@pytest.mark.parametrize("sleeps", [False, True])
def test_damage_that_somebody_has_found_is_told(world: World, sleeps: bool) -> None:
    """By the status, of the newest image; the last whole one is another. A job that sleeps in the image has no other."""
    first = world.checkpoint().id
    world.trees[0].text = b"other"
    before = set((world.folder / "store/packs").glob("*.pack"))
    last = (world.suspend() if sleeps else world.checkpoint()).id
    [pack] = set((world.folder / "store/packs").glob("*.pack")) - before
    good = pack.read_bytes()
    rot_pack(pack)
    assert not Store.open(world.store.url).verify(last, full=True).whole
    assert world.job.status().image_problem == "", "nobody has told it"
    world.job.count_images()
    status = world.job.status()
    assert (status.images, status.last_image) == (1, last if sleeps else first)
    assert f"image {last} is not whole: chunk " in status.image_problem
    assert f"is damaged in pack {pack.stem}, as was found before" in status.image_problem
    pack.write_bytes(good)
    assert Store.open(world.store.url).verify(last, full=True).whole
    world.job.count_images()
    assert world.job.status().image_problem == ""
    assert world.job.status().images == 2


def test_a_resume_offers_an_image_that_was_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both images rely on the pack that is damaged."""
    world.checkpoint()
    last = world.suspend().id
    rot(world)

    def prepare(self: FakeRestoring) -> None:
        raise DamagedChunk("00" * 32, "host")

    monkeypatch.setattr(FakeRestoring, "prepare", prepare)
    with pytest.raises(RestoreError) as caught:
        world.resume()
    assert caught.value.remedy == "there is no older whole image"
    assert f"image {last} is not whole" in world.job.status().image_problem


class Clock:
    """The periodic thread's, which the test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + 1e9)
        monkeypatch.setattr(watching, "time", clock)


def test_the_next_image_and_the_pace(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer steps are counted also where no image depends on them; the next image is never in the past."""
    clock = Clock(monkeypatch)
    job, seen = world.job, []
    watch = job._watch
    world.spec.every = "30s"
    steps = iter(range(0, 1000, 2))
    for tree in world.trees:
        tree.begin = tree.look = lambda: None  # type: ignore[attr-defined]
        tree.steps = lambda: next(steps)  # type: ignore[attr-defined]
        tree.code = None  # type: ignore[attr-defined]
    monkeypatch.setattr(watch, "due", lambda: (seen.append(watch.next_unix_s), later(50)))

    def later(seconds: float) -> None:
        clock.now += seconds

    looks = []

    def wait(_: float) -> bool:
        status = job.status()
        looks.append((status.next_checkpoint_unix_s, clock.now + 1e9))
        later(10)
        if len(looks) == 8:
            job._job.standing.entered = api.SUSPENDED
        return len(looks) == 10

    monkeypatch.setattr(job._ended, "wait", wait)
    job.periodic()
    assert seen[0] is None  # while one is taken
    assert all(due is None or due >= now for due, now in looks)
    assert looks[1][0] == looks[1][1] + 20
    assert looks[-1][0] is None  # suspended
    assert job.status().steps == 12


@pytest.mark.parametrize("came_back", [False, True])
def test_an_image_every_so_many_steps(
    world: World, monkeypatch: pytest.MonkeyPatch, came_back: bool
) -> None:
    """A job that has come back from an image has its steps from there, of which no image is due."""
    Clock(monkeypatch)
    world.spec.every = "10steps"
    phase = api.RESTORING if came_back else api.RUNNING
    trees: Any = world.trees
    job = JobCoordinator(world.spec, trees, lib=world.lib, phase=phase, opened=world.store)
    job._job.standing.entered = api.RUNNING
    begun = 57 if came_back else 0
    counts = iter([*range(begun, begun + 25)])
    for tree in trees:
        tree.begin = tree.look = lambda: None
        tree.steps = lambda: count
        tree.code = None
    count = begun
    due = []
    monkeypatch.setattr(job._watch, "due", lambda: due.append(count))

    def wait(_: float) -> bool:
        nonlocal count
        count = next(counts, -1)
        return count < 0

    monkeypatch.setattr(job._ended, "wait", wait)
    job.periodic()
    assert due == ([60, 70, 80] if came_back else [10, 20])


def test_pace() -> None:
    pace = Pace()
    assert pace.step_s == 0
    for look in range(100):
        pace.look(look * 0.5, int(look * 0.5 / 0.3))
    assert pace.step_s == pytest.approx(0.3, rel=0.05)
    pace.look(60.0, 5)  # another life
    assert (pace.steps, pace.step_s) == (5, 0)


def test_one_verb_at_a_time(world: World) -> None:
    inside, leave = threading.Event(), threading.Event()

    def report(progress: object) -> None:
        inside.set()
        assert leave.wait(30)

    first = threading.Thread(
        target=lambda: world.job.checkpoint(cut_wait_ms=0, strict=False, report=report)
    )
    first.start()
    assert inside.wait(30)
    with pytest.raises(Refused, match="a checkpoint of it is under way"):
        world.migrate([1])
    leave.set()
    first.join()
    world.checkpoint()


def test_a_log_is_followed_into_its_next_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(transcript, "LIMIT_BYTES", 10)
    path = state.log_path("j")
    log = transcript.Transcript(path, fresh=True)
    log.write(b"first")
    ended = threading.Event()
    said = follow_log("j", 2, ended)
    assert next(said) == b"rst"
    log.write(b" and more")  # with it the part is full
    log.write(b"second")
    ended.set()
    assert b"".join(said) == b" and moresecond"


class TestCriuInItsThread:
    """The handshake of _Criu: whatever happens, CRIU's notification comes back, and nobody waits for ever."""

    FACTS = criu.DumpFacts(0.1, 0.2)

    def test_released(self) -> None:
        seen: list[str] = []

        def run(frozen: Callable[[], None]) -> criu.DumpFacts:
            seen.append("frozen")
            frozen()
            seen.append("let go")
            return self.FACTS

        one = _Criu(60.0, "the processes")
        one.start(run)
        one.wait_frozen()
        assert seen == ["frozen"]
        assert one.release() is self.FACTS
        one.abandon()  # afterwards nothing
        assert seen == ["frozen", "let go"]

    def test_the_freeze_has_a_limit(self) -> None:
        """Nobody releases it, say because a copy hangs: the tree goes on, and the image is given up."""
        let_go = threading.Event()

        def run(frozen: Callable[[], None]) -> criu.DumpFacts:
            one.limit_begins()
            try:
                frozen()
            finally:
                let_go.set()
            return self.FACTS

        one = _Criu(0.1, "the processes")
        one.start(run)
        one.wait_frozen()
        assert let_go.wait(5)
        assert one.give_up.is_set()
        for step in (one.check, one.release):
            with pytest.raises(DevproxyError, match="the processes stood frozen for 0.1 s"):
                step()
        one.abandon()

    def test_abandoned(self) -> None:
        told: list[str] = []

        def run(frozen: Callable[[], None]) -> criu.DumpFacts:
            try:
                frozen()
            except Exception as error:
                told.append(type(error).__name__)
                raise
            return self.FACTS

        one = _Criu(60.0, "the processes")
        one.start(run)
        one.wait_frozen()
        one.abandon()
        one.abandon()
        assert told == ["_Abandoned"]

    def test_it_fails_before_the_freeze(self) -> None:
        def run(frozen: Callable[[], None]) -> criu.DumpFacts:
            raise KeyError("no")

        one = _Criu(60.0, "the processes")
        one.start(run)
        with pytest.raises(KeyError):
            one.wait_frozen()
        one.abandon()

    def test_it_fails_after_the_release(self) -> None:
        def run(frozen: Callable[[], None]) -> criu.DumpFacts:
            frozen()
            raise KeyError("late")

        one = _Criu(60.0, "the processes")
        one.start(run)
        one.wait_frozen()
        with pytest.raises(KeyError):
            one.release()
        one.abandon()

    def test_never_started(self) -> None:
        _Criu(60.0, "the processes").abandon()
