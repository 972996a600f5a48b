# SPDX-License-Identifier: Apache-2.0
"""A cheap job, a fault that is armed in whichever of its processes comes by, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from devproxy.checkpoint.backends import open_backend
from devproxy.checkpoint.store import Store
from tests.checkpoint.world import SUBJECTS, World
from tests.living import matching

STEPS = 1_000_000  # it ends by being killed, unless a test says otherwise
STEP_S = "0.02"
TAIL_BYTES = 4096


def subject(steps: int = STEPS, script: str = "cheap.py") -> tuple[str, ...]:
    return (
        sys.executable,
        str(SUBJECTS / script),
        *("--steps", str(steps), "--seconds-per-step", STEP_S),
    )


class Scene(World):
    """A world with faults. `fault` is the file that all its processes look into (devproxy/fault.py)."""

    def __init__(self, **env: str) -> None:
        super().__init__(**env)
        self.fault = self.home / "fault"
        self.env.setdefault("DEVPROXY_FAULT", f"@{self.fault}")
        self.job: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        return self.shm / f"devproxy-{os.getuid()}"

    @property
    def folder(self) -> Path:
        return self.root / "j"

    # -- the job --------------------------------------------------------------------------------------------------

    def start(
        self, *options: str, steps: int = STEPS, script: str = "cheap.py", **env: str
    ) -> None:
        """The job runs, can be talked to, and has done some steps."""
        for stale in (self.home / "log", self.home / "cheap.txt", self.folder / "agent.sock"):
            stale.unlink(missing_ok=True)
        self.job = self.run(*subject(steps, script), options=options, **env)
        self.wait(lambda: (self.folder / "agent.sock").exists(), 20, "agent.sock")
        self.wait_step(3)

    def ready(self) -> None:
        """The job runs and has one whole image; started only where it is not so."""
        if self.phase() != "running":
            self.kill_everything()
            self.start()
            self.ctl("checkpoint", "j")
        elif not self.images():
            self.ctl("checkpoint", "j")

    def phase(self) -> str:
        """As seen from outside, without the time that `devproxy status` takes."""
        if not self.folder.exists() or not self.others():
            return "gone"
        return "running" if self.named("devproxy-server") else "suspended"

    def gpu(self) -> int:
        """Which GPU of the machine serves the job."""
        (server,) = self.named("devproxy-server")
        line = server.cmdline()
        return int(line[line.index("--physical-gpu") + 1])

    def images(self) -> list[dict[str, object]]:
        """As `devproxy images --json`, without its start-up."""
        if not (self.home / "key").exists():
            return []
        key = (self.home / "key").read_bytes()
        return [image.as_json() for image in Store(open_backend(str(self.store)), key).images()]

    def deleted_files(self) -> list[str]:
        """What the job's processes have open and nobody finds by its name."""
        found = set()
        for process in self.processes():
            for fd in matching(Path(f"/proc/{process.pid}/fd"), "*"):
                try:
                    path, deleted, _ = os.readlink(fd).partition(" (deleted)")
                except (FileNotFoundError, ProcessLookupError):  # closed, or the process has ended
                    continue
                if deleted and not path.startswith(("/memfd:", "/dev/")):
                    found.add(path)
        return sorted(found)

    def latest(self) -> str:
        return str([i for i in self.images() if i["whole"]][-1]["id"])

    def arm(self, spec: str) -> None:
        self.fault.write_text(spec)

    def fired(self) -> bool:
        return not self.fault.exists()

    def disarm(self) -> None:
        self.fault.unlink(missing_ok=True)

    @contextmanager
    def paused_at(self, point: str) -> Iterator[Callable[[], None]]:
        """with scene.paused_at("frozen") as wait: start a verb; wait(); the block runs on while the verb stands there."""
        paused = Path(f"{self.fault}.paused")
        self.arm(f"{point}:pause")
        try:
            yield lambda: self.wait(paused.exists, 30, f"a verb at {point}")
        finally:
            self.disarm()
            paused.unlink(missing_ok=True)

    def last_step(self) -> int:
        """From the log's end: a job that many cases share has thousands of steps."""
        try:
            with open(self.home / "log", "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return 0
        found = re.findall(r"^\S+ step (\d+)\b", text, re.M)
        return int(found[-1]) if found else max(self.steps(), default=0)

    def wait_step(self, number: int, log: str = "log", timeout_s: float = 90) -> None:
        assert log == "log"
        self.wait(lambda: self.last_step() >= number, timeout_s, f"step {number}")

    # -- what must hold -------------------------------------------------------------------------------------------

    def check_goes_on(self) -> None:
        """The job does more steps, each once, with its first nonce, and nobody said FAILED."""
        self.wait_step(self.last_step() + 3, timeout_s=20)
        self.check_log()

    def check_log(self) -> None:
        # A step is in the file first, and then in the log, however long that takes.
        before = self.written()
        self.wait_step(before, timeout_s=20)
        steps = self.steps()
        assert steps == list(range(1, len(steps) + 1)), self.tail()
        assert len(self.nonces()) == 1, self.tail()
        assert "FAILED" not in self.text(), self.tail()
        assert len(steps) <= self.written(), self.tail()

    def written(self) -> int:
        """How many steps the subject's own file has: each once."""
        *lines, torn = (self.home / "cheap.txt").read_text().split("\n")
        assert lines == [str(n) for n in range(1, len(lines) + 1)], lines[-30:]
        return len(lines)

    def check_nothing_left(self) -> None:
        """Of a running job: no staging, no CRIU, no frozen process, one server per GPU, one tenant per ledger."""
        leftovers = [
            *matching(self.folder, "staging*"),
            *matching(self.home / "state", "staging/*"),
        ]
        assert not leftovers, leftovers
        assert not self.named("criu")
        for process in self.processes():
            try:
                status = process.status()
            except psutil.NoSuchProcess:
                continue
            assert status not in ("stopped", "tracing-stop"), process
        assert len(self.named("devproxy-server")) == 1, self.named("devproxy-server")

    def check_nobody_lives(self, timeout_s: float = 20) -> None:
        """No process but the daemon, which leaves by itself; no job folder, no ledger."""
        self.wait(lambda: not self.others(), timeout_s, f"the end of {self.others()}")
        self.wait(
            lambda: not self.folder.exists() and not matching(self.root, "ledger-*"),
            timeout_s,
            f"an empty {self.root}: {matching(self.root, '**')}",
        )
        leftovers = matching(self.home / "state", "staging/*")
        assert not leftovers, leftovers

    def others(self) -> list[psutil.Process]:
        return [p for p in self.processes() if "devproxy.control.daemon" not in _line(p)]

    def of_the_job(self) -> list[psutil.Process]:
        """The subject itself."""
        return [p for p in self.others() if _line(p).startswith(f"{sys.executable} {SUBJECTS}/")]

    def named(self, name: str) -> list[psutil.Process]:
        """Processes whose program has that name."""
        return [p for p in self.processes() if name in os.path.basename(_line(p).split(" ")[0])]

    def check_restores(self, image: str = "j", *, at_least: int = 1) -> None:
        """The last image brings the job back: it goes on with the same nonce, and no step is missing or twice."""
        self.check_nobody_lives()
        self.ctl("restore", image, "--store", str(self.store), "--output", "log")
        self.check_goes_on()
        assert self.last_step() >= at_least

    def check_message(self, text: str, *, stage: str, names: str, state: str) -> None:
        """The last line, behind those of the progress, has the stage, the object or cause, and the state of the job."""
        # Whole, in the report of a failed test: pytest shortens what an assertion shows.
        print(text)
        assert "Traceback" not in text, text
        *_, line = text.strip().splitlines()
        assert re.search(rf"failed at (?:{stage}): ", line), f"{stage!r} is not in: {line}"
        assert re.search(names, line), f"{names!r} is not in: {line}"
        assert re.search(state, line), f"{state!r} is not in: {line}"

    def failure(self, done: subprocess.CompletedProcess[str]) -> dict[str, str]:
        """What a verb with --json said when it failed."""
        print(done.stderr)
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stderr, done.stderr
        facts = json.loads(done.stderr.strip().splitlines()[-1])
        assert isinstance(facts, dict)
        return facts

    def check_failure(
        self, facts: dict[str, str], *, stage: str, about: str, cause: str, gpu: int | None = None
    ) -> None:
        """Stage, object and cause are those expected; and the state that was said is the state that is."""
        assert re.fullmatch(stage, facts.get("stage", "")), f"stage {stage!r}: {facts}"
        assert re.search(about, facts.get("object", "")), f"object {about!r}: {facts}"
        assert re.search(cause, facts["error"]), f"cause {cause!r}: {facts}"
        said = facts.get("state", "")
        job, *more = said.split("; ")
        if job == "the job continues":
            assert self.phase() == "running", said
        elif job == "the job continues on its old GPU":
            assert (self.phase(), self.gpu()) == ("running", gpu), said
        elif job == "it is still suspended":
            assert self.phase() == "suspended", said
        elif re.fullmatch(
            r"the job has ended|.*, so the job ends|its supervisor is gone"
            r"|nothing of it (runs|was started)",
            job,
        ):
            # Whoever said it is still on its own way out; and a janitor has all the time it needs.
            self.wait(lambda: self.phase() == "gone", 30, f"the end of the job, as said: {said}")
        else:
            raise AssertionError(f"no state of the job that is known here: {facts}")
        for one in more:
            image = re.fullmatch(r"its last whole image is (\S+)|image (\S+) is whole", one)
            assert image, f"neither a state nor an image: {said}"
            assert self.latest() == (image[1] or image[2]), said

    def kill(self, process: psutil.Process | int) -> None:
        pid = process if isinstance(process, int) else process.pid
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    # -- the store's inside ---------------------------------------------------------------------------------------

    def manifest_path(self, image: str) -> Path:
        return self.store / "images" / image / "manifest.json"

    def edit_manifest(self, image: str, change: Any) -> None:
        """Changes an image's manifest as somebody with the key could: authenticated again."""
        from devproxy.checkpoint import manifest

        key = (self.home / "key").read_bytes()
        path = self.manifest_path(image)
        body = manifest.decode(image, path.read_bytes(), key)
        change(body)
        path.write_bytes(manifest.encode(body, key))


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
