# SPDX-License-Identifier: Apache-2.0
"""A script from the list, undisturbed and with a life: an image in the middle, kill -9 of everything, restore."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tomllib

from tests.checkpoint.world import World

HERE = Path(__file__).resolve().parent
LIST = HERE / "public.toml"
FOLDER = os.environ.get("DEVPROXY_SCRIPTS", "")
PYTHON = os.environ.get("DEVPROXY_SCRIPTS_PYTHON") or sys.executable
# What a clock decides: numbers with a unit of time, and rates.
CLOCKS = [
    r"\d+(\.\d+)?(e[-+]?\d+)? ?(ms|s|sec|secs|seconds|it/s|s/it)\b", r"ms/batch +\S+", r"time:? *\S+", r"mfu \S+",
    r"SPS: *\d+", r"\d\d:\d\d(:\d\d(\.\d+)?)?",
]  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One entry of public.toml, whose head says what the fields mean."""

    name: str
    of: str
    command: list[str]
    folder: str = "."
    before: list[list[str]] = field(default_factory=list)
    path: str = ""
    ignore: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    seeded: bool = False
    pause_ms: int = 0
    plain: bool = False
    unseeded: bool = False
    unordered: bool = False
    brief: bool = False
    timeout_s: int = 300

    @property
    def source(self) -> Path:
        return HERE / "stand_ins" if self.of == "stand-in" else Path(FOLDER) / self.of

    def words(self, home: Path) -> list[str]:
        at, before = 0, []
        if self.seeded:  # a launcher of several processes gives each of them the wrapper
            scripts = [at for at, word in enumerate(self.command) if word.endswith(".py")]
            at = scripts[0] if scripts else self.command.index("-m")
            before = [str(HERE / "seeded.py")]
            if self.pause_ms:
                before += ["--pause-ms", str(self.pause_ms)]
        command = [*self.command[:at], *before, *self.command[at:]]
        return ["env", "-C", str(home / "work" / self.folder), PYTHON, "-u", *command]

    def environment(self, home: Path) -> dict[str, str]:
        path = {"PYTHONPATH": str(home / "work" / self.path)} if self.path else {}
        return path | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"} | self.variables

    def lines(self, text: str, home: Path) -> list[str]:
        """What it said, without what a clock decided. devproxy's own lines are not the script's."""
        found = []
        text = text.replace(str(home), "HOME")
        for line in re.split(r"[\n\r]", text):
            if line.startswith(("devproxy:", "devproxy-run:")) or not line.strip():
                continue
            if "%|" in line:  # a bar of tqdm: which of them are drawn is a matter of time
                continue
            for pattern in [*CLOCKS, *self.ignore]:
                line = re.sub(pattern, "-", line)
            found.append(line)
        return found


def every() -> list[Script]:
    with open(LIST, "rb") as file:
        return [Script(**entry) for entry in tomllib.load(file)["script"]]


def start(world: World, script: Script) -> None:
    shutil.copytree(
        script.source,
        world.home / "work",
        symlinks=True,
        ignore=shutil.ignore_patterns(".git"),
    )
    for line in script.before:
        if line[0] == "prepare.py":  # data of ours, made without a GPU
            words = [PYTHON, str(HERE / "prepare.py"), *line[1:]]
            subprocess.run(
                words, cwd=world.home / "work" / script.folder, check=True, timeout=script.timeout_s
            )
            continue
        alone = Script(script.name, script.of, line, script.folder, path=script.path)
        job = world.run(
            *alone.words(world.home),
            log="before",
            name="before",
            **alone.environment(world.home),
        )
        assert job.wait(script.timeout_s) == 0, world.tail("before")


def run(world: World, script: Script) -> subprocess.Popen[bytes]:
    env = script.environment(world.home)
    return world.run(*script.words(world.home), options=tuple(script.options), **env)


def undisturbed(script: Script) -> list[str]:
    world = World()
    try:
        start(world, script)
        job = run(world, script)
        assert job.wait(script.timeout_s) == 0, world.tail()
        return script.lines(world.text(), world.home)
    finally:
        world.close()


def plain(script: Script) -> list[str]:
    """What it says without devproxy, on the CPU."""
    world = World()
    try:
        start(world, script)
        done = subprocess.run(
            script.words(world.home),
            env=world.env | script.environment(world.home) | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=script.timeout_s,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return script.lines(done.stdout, world.home)
    finally:
        world.close()


def life(script: Script, wanted: list[str]) -> list[str]:
    """wanted: what it says undisturbed; the image is taken at a third of that, or later: once it has used the GPU."""
    world = World()
    try:
        start(world, script)
        job = run(world, script)
        cut = max(1, len(wanted) // 3)

        def said() -> int:
            return len(script.lines(world.text(), world.home))

        while True:
            world.wait(lambda: said() >= cut or job.poll() is not None, script.timeout_s)  # noqa: B023
            assert job.poll() is None, f"it ended before its image\n{world.tail()}"
            image = world.ctl_json("checkpoint", "j")
            if image["device_bytes"]:
                break
            cut = said() + 1
        world.kill_everything()  # it may just have ended: the image brings it back all the same
        world.ctl("restore", "j", "--store", str(world.store), "--wait", timeout_s=script.timeout_s)
        return script.lines(world.text(), world.home)
    finally:
        world.close()
