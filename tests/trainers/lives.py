# SPDX-License-Identifier: Apache-2.0
"""A script of a training stack, run plain, behind devproxy, and through a life; and what of it must be equal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint.world import World

SCRIPTS = Path(__file__).resolve().parent / "scripts"
AHEAD = 30  # steps
PYTHON = os.environ.get("DEVPROXY_TRAINERS_PYTHON", "")
# PYTHONHASHSEED: peft writes a set into its adapter_config.json.
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
# What a clock decided: how long something took, when it began, and names made of that.
CLOCKS = re.compile(r"runtime|per_second|\btime\b")
OF_THE_RUN = re.compile(
    r"wandb/.*(debug.*\.log|latest-run/.*)$|hydra\.yaml$"
)  # pids, times, the working folder
STAMP = re.compile(
    r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_[^/]*|tfevents\..*|\d{8}_\d{6}-\w+|run-\w+(?=\.wandb)"
    r"|\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"
)
LINE_STAMP = re.compile(rb"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d+")


@dataclass(frozen=True)
class Script:
    name: str
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()  # words between Python and the script
    steps: int = 120
    # What it needs besides to compute what a plain CPU process does. None: it draws numbers on the device.
    cpu: tuple[str, ...] | None = ("--dropout", "0")

    def command(self) -> tuple[str, ...]:
        return (PYTHON, *self.launcher, str(SCRIPTS / f"{self.name}.py"), *self.arguments)

    def __str__(self) -> str:
        return "-".join([self.name, *(w.lstrip("-") for w in self.arguments)])


@dataclass(frozen=True)
class Ended:
    """What a run left: everything in it must be equal in two runs that are called equal."""

    digest: str
    files: dict[str, str]

    def must_be(self, other: Ended) -> None:
        names = self.files.keys() | other.files.keys()
        different = {
            n: (self.files.get(n), other.files.get(n))
            for n in names
            if self.files.get(n) != other.files.get(n)
        }
        assert not different
        assert self.digest == other.digest


class Life(World):
    """A world whose job is a script of a stack; it works in the folder `work`."""

    def __init__(self, script: Script) -> None:
        super().__init__(**QUIET)
        self.script = script
        self.hold()

    @property
    def work(self) -> Path:
        return self.home / "work"

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        self.work.mkdir()
        return self.run("env", "-C", str(self.work), *self.script.command(), options=options)

    def steps(self, log: str = "log") -> list[int]:
        return [int(n) for n in re.findall(r"^step (\d+)\b", self.text(log), re.M)]

    def reach(self, step: int, timeout_s: float = 180) -> None:
        """The job has ended that step; it is held well behind it, so that what comes next meets it at work."""
        self.until(step + AHEAD)
        self.wait(lambda: max(self.steps(), default=0) >= step, timeout_s, f"step {step}")

    def ended(self) -> Ended:
        """What it left, once it is known to be one whole run: one nonce, each step once."""
        text = self.text()
        (nonce,) = set(re.findall(r"^start (\S+)", text, re.M))
        ((digest, of),) = re.findall(r"^digest (\S+) of (\S+)", text, re.M)
        assert of == nonce, self.tail()
        steps = self.steps()
        assert steps == list(range(1, self.script.steps + 1)), (steps, self.tail())
        return Ended(digest, files(self.work))


def plain(script: Script) -> str:
    """The digest of the script without devproxy: on the CPU, one thread."""
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
        env |= QUIET | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        done = subprocess.run(
            script.command(), env=env, capture_output=True, text=True, cwd=folder, timeout=280
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return re.findall(r"^digest (\S+)", done.stdout, re.M)[0]


def scalars(path: Path) -> str:
    """An event file without its clock: the numbers of each tag."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if not CLOCKS.search(value.tag):
                found.append(f"{event.step} {value.tag} {value.tensor.float_val} {value.metadata}")
    return "\n".join(found)


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if not CLOCKS.search(str(k))}
    return [without_clocks(v) for v in value] if isinstance(value, list) else value


def members(path: Path) -> str:
    """Of a zip that stable-baselines3 wrote: the tensors. Its `data` has the time of the start."""
    with zipfile.ZipFile(path) as file:
        return "\n".join(f"{n} {file.getinfo(n).CRC}" for n in file.namelist() if n != "data")


def wandb_losses(path: Path) -> str:
    """The history of a run, each value in its order. The framing is LevelDB's log: blocks of 32 KiB, 7 bytes of header."""
    data, joined, at = path.read_bytes(), b"", 7  # behind the file's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        joined += data[at + 7 : at + 7 + size]
        at += 7 + size
    losses = re.findall(rb"loss\D{1,6}(\d\.\d{6,})", joined)
    return "\n".join(value.decode() for value in losses)


def content(path: Path) -> bytes:
    if path.suffix == ".zip":
        return members(path).encode()
    if path.suffix == ".wandb":
        return wandb_losses(path).encode()
    if "tfevents" in path.name:
        return scalars(path).encode()
    if path.suffix == ".json":
        return json.dumps(without_clocks(json.loads(path.read_text())), sort_keys=True).encode()
    if path.suffix == ".log":
        return LINE_STAMP.sub(b"", path.read_bytes())
    return path.read_bytes()


def files(folder: Path) -> dict[str, str]:
    """By name. Of wandb's runs only the last: what its core made after an image, past libc, stays (docs/files.md)."""
    found = {}
    last = os.path.realpath(folder / "wandb" / "latest-run")
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "/offline-run-" in name and not str(path).startswith(last):
            continue
        if path.is_file() and not OF_THE_RUN.search(name):
            what = content(path)
            assert what, f"{name} holds nothing"
            found[STAMP.sub("STAMP", name)] = (
                f"{hashlib.blake2b(what, digest_size=8).hexdigest()} {len(what)}"
            )
    return found
