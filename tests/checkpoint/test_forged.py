"""Manifests that are signed with the user's own key and say nonsense: no path in them leaves its folder."""

from __future__ import annotations

import copy
import json
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
    """As much of a manifest as has to do with paths."""
    return {
        "image": "j-1",
        "job": "j",
        "job_id": "ab12",
        "spec": {"job": "j", "job_id": "ab12", "build": "cafe"},
        "build": {"id": "cafe", "path": "/var/tmp/x/builds/cafe", "files": {"pylib/a.py": {}}},
        "shared": {"gpu0.state.json": {}},
        "device": {"gpu0-1.dev": []},
        "host": [{"name": "core-1.img"}],
        "files": [{"path": "", "kind": "mark"}, {"path": "/home/x/log", "kind": "present"}],
        "stdio": {"modes": ["null", "fifo:stdout.fifo", "path:0:0:/x/y"], "outputs": []},
    }


FORGERIES: dict[str, Change] = {
    "shared": lambda b: b["shared"].update({"../../x": {}}),
    "shared in a folder": lambda b: b["shared"].update({"criu/x": {}}),
    "device": lambda b: b["device"].update({"/etc/x": []}),
    "host": lambda b: b["host"].append({"name": "../x"}),
    "host dots": lambda b: b["host"].append({"name": ".."}),
    "host NUL": lambda b: b["host"].append({"name": "a\0b"}),
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
    "file relative": lambda b: b["files"].append({"path": "x", "kind": "present"}),
    "file up": lambda b: b["files"].append({"path": "/a/../b", "kind": "present"}),
    "stream": lambda b: b["stdio"]["modes"].append("fifo:../../x"),
    "stream of no kind": lambda b: b["stdio"]["modes"].append("exec:x"),
    "under another name": lambda b: b.update(image="j-2"),
    "nothing": lambda b: b.clear(),
    "wrong kind": lambda b: b.update(shared=7),
}


def test_what_we_write_is_accepted() -> None:
    image.check(body(), "j-1")


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forgery_is_named(change: Change) -> None:
    forged = body()
    change(forged)
    with pytest.raises(DevproxyError, match="image j-1"):
        image.check(forged, "j-1")


def test_signed_and_refused_and_nothing_written(world: World) -> None:
    world.run(
        sys.executable, str(SUBJECTS / "files.py"), "--steps", "200", "--seconds-per-step", "0.1"
    )
    world.wait_step(3)
    name = str(world.ctl_json("checkpoint", "j")["id"])
    world.kill_everything()
    path = Path(world.store) / "images" / name / "manifest.json"
    key = (world.home / "key").read_bytes()
    whole = manifest.decode(name, path.read_bytes(), key)
    image.check(whole, name)
    some = next(iter(whole["shared"].values()))
    changes: list[tuple[str, Change]] = [
        ("shared", lambda b: b["shared"].update({"../../../escaped": some})),
        ("host", lambda b: b["host"].append({**b["host"][0], "name": "../../../escaped"})),
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
    path.write_bytes(manifest.encode(whole, key))
    world.ctl("restore", name, "--store", str(world.store), "--output", "log")
    assert json.loads(world.ctl("images", "--store", str(world.store), "--json").stdout)
    for private in (next(world.shm.glob("devproxy-*")), world.home / "state", world.home / "key"):
        assert private.stat().st_mode & 0o077 == 0, private
