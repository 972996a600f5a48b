# SPDX-License-Identifier: Apache-2.0
"""Manifests that are signed with the user's own key and say nonsense: no path in them leaves its folder."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devproxy.checkpoint import image, manifest
from devproxy.errors import DevproxyError
from tests.checkpoint.world import SUBJECTS, World

Change = Callable[[dict[str, Any]], object]


def body() -> dict[str, Any]:
    """As much of a manifest of format 2 as has to do with paths."""
    return {
        "image": "j-1",
        "job": "j",
        "job_id": "ab12",
        "created": 1.0,
        "sizes": {},
        "spec": {"job": "j", "job_id": "ab12", "build": "cafe"},
        "build": {"id": "cafe", "path": "/var/tmp/x/builds/cafe", "files": {"pylib/a.py": {}}},
        "trees": [tree()],
    }


def tree() -> dict[str, Any]:
    return {
        "host": "h",
        "gpus": [0, 1],
        "facts": {},
        "criu": {},
        "shared": {"gpu0.state.json": {}},
        "device": {"gpu0-1.dev": []},
        "processes": [{"name": "core-1.img"}],
        "files": [{"path": "", "kind": "mark"}, {"path": "/home/x/log", "kind": "present"}],
        "stdio": {"modes": ["null", "fifo:stdout.fifo", "path:0:0:/x/y"], "outputs": []},
    }


def as_format_1(whole: dict[str, Any]) -> dict[str, Any]:
    """The same image as the first format told it: one tree, in the body."""
    (one,) = whole["trees"]
    rest = {key: value for key, value in whole.items() if key != "trees"}
    flat = {key: value for key, value in one.items() if key not in ("host", "gpus", "processes")}
    spec = whole["spec"] | {"gpus": one["gpus"]}
    return rest | flat | {"host": one["processes"], "spec": spec}


def of_tree(change: Change) -> Change:
    return lambda b: change(b["trees"][0])


FORGERIES: dict[str, Change] = {
    "shared": of_tree(lambda t: t["shared"].update({"../../x": {}})),
    "shared in a folder": of_tree(lambda t: t["shared"].update({"criu/x": {}})),
    "device": of_tree(lambda t: t["device"].update({"/etc/x": []})),
    "processes": of_tree(lambda t: t["processes"].append({"name": "../x"})),
    "processes dots": of_tree(lambda t: t["processes"].append({"name": ".."})),
    "processes NUL": of_tree(lambda t: t["processes"].append({"name": "a\0b"})),
    "processes of a second tree": lambda b: b["trees"].append(tree() | {"processes": [{"name": "../x"}]}),
    "no tree": lambda b: b["trees"].clear(),
    "GPUs": of_tree(lambda t: t["gpus"].append("x")),
    "build file": lambda b: b["build"]["files"].update({"../../x": {}}),
    "build file in the middle": lambda b: b["build"]["files"].update({"a/../../x": {}}),
    "build file absolute": lambda b: b["build"]["files"].update({"/etc/x": {}}),
    "build id": lambda b: (b["build"].update(id="../x"), b["spec"].update(build="../x")),
    "build elsewhere": lambda b: b["build"].update(path="/usr/lib/cafe"),
    "build up": lambda b: b["build"].update(path="/var/tmp/../../usr/builds/cafe"),
    "build relative": lambda b: b["build"].update(path="builds/cafe"),
    "build of another": lambda b: b["spec"].update(build="beef"),
    "job": lambda b: b.update(job="../x"),
    "job id": lambda b: (b.update(job_id="../x"), b["spec"].update(job_id="../x")),
    "job id of another": lambda b: b["spec"].update(job_id="cd34"),
    "file relative": of_tree(lambda t: t["files"].append({"path": "x", "kind": "present"})),
    "file up": of_tree(lambda t: t["files"].append({"path": "/a/../b", "kind": "present"})),
    "stream": of_tree(lambda t: t["stdio"]["modes"].append("fifo:../../x")),
    "stream of no kind": of_tree(lambda t: t["stdio"]["modes"].append("exec:x")),
    "under another name": lambda b: b.update(image="j-2"),
    "nothing": lambda b: b.clear(),
    "wrong kind": of_tree(lambda t: t.update(shared=7)),
}  # fmt: skip


def test_what_we_write_is_accepted() -> None:
    two = body()
    one = as_format_1(body())
    assert image.understand(two, "j-1").trees[0].processes == [{"name": "core-1.img"}]
    assert image.understand(one, "j-1").trees[0].processes == [{"name": "core-1.img"}]
    assert image.understand(one, "j-1").gpus == 2


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forgery_is_named(change: Change) -> None:
    forged = body()
    change(forged)
    with pytest.raises(DevproxyError, match="image j-1"):
        image.understand(forged, "j-1")


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["host"].append({"name": "../x"}),
        lambda b: b["shared"].update({"../../x": {}}),
        lambda b: b["files"].append({"path": "x", "kind": "present"}),
        lambda b: b["spec"].update(gpus="all"),
    ],
)
def test_a_forgery_of_format_1_is_named(change: Change) -> None:
    forged = as_format_1(body())
    change(forged)
    with pytest.raises(DevproxyError, match="image j-1"):
        image.understand(forged, "j-1")


def test_signed_and_refused_and_nothing_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(
        sys.executable, str(SUBJECTS / "files.py"), "--steps", "200", "--seconds-per-step", "0.1"
    )
    world.wait_step(3)
    name = str(world.ctl_json("checkpoint", "j")["id"])
    world.kill_everything()
    path = Path(world.store) / "images" / name / "manifest.json"
    key = (world.home / "key").read_bytes()
    whole = manifest.decode(name, path.read_bytes(), key)
    image.understand(whole, name)
    some = next(iter(whole["trees"][0]["shared"].values()))
    changes: list[tuple[str, Change]] = [
        ("shared", of_tree(lambda t: t["shared"].update({"../../../escaped": some}))),
        ("processes", of_tree(lambda t: t["processes"].append({**t["processes"][0], "name": "../../../escaped"}))),
        ("build", lambda b: b["build"]["files"].update({"../../../escaped": some | {"mode": 448, "mtime_ns": 1}})),
    ]  # fmt: skip
    for what, change in changes:
        forged = copy.deepcopy(whole)
        change(forged)
        path.write_bytes(manifest.encode(forged, key))
        refused = world.ctl(
            "restore", name, "--store", str(world.store), "--output", "log", check=False
        )
        assert refused.returncode != 0, what
        assert "escaped" in refused.stderr, refused.stderr
        world.wait(lambda: not world.processes(), what="the end of the refused restore")
        assert not [p for top in (world.shm, world.home) for p in top.rglob("escaped")], what
    # One byte of the body with the old signature: not even that far.
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"job":"j"', b'"job":"k"'))
    refused = world.ctl(
        "restore", name, "--store", str(world.store), "--output", "log", check=False
    )
    assert refused.returncode != 0
    assert "escaped" not in refused.stderr
    # What an older devproxy wrote is restored: the same image, told as the first format did.
    monkeypatch.setattr(manifest, "FORMAT", 1)
    path.write_bytes(manifest.encode(as_format_1(whole) | {"format": 1}, key))
    world.ctl("restore", name, "--store", str(world.store), "--output", "log")
    world.wait_step(5)
    assert world.images()
    for private in (next(world.shm.glob("devproxy-*")), world.home / "state", world.home / "key"):
        assert private.stat().st_mode & 0o077 == 0, private
