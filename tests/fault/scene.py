"""A cheap job, a fault that is armed in whichever of its processes comes by, and what must hold afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from devproxy.checkpoint.backend import open_backend
from devproxy.checkpoint.store import Store
from tests.checkpoint.world import SUBJECTS, World

STEPS = 1_000_000  # it ends by being killed, unless a test says otherwise
STEP_S = "0.02"


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

    def latest(self) -> str:
        return str([i for i in self.images() if i["whole"]][-1]["id"])

    def arm(self, spec: str) -> None:
        self.fault.write_text(spec)

    def fired(self) -> bool:
        return not self.fault.exists()

    def disarm(self) -> None:
        self.fault.unlink(missing_ok=True)

    def last_step(self) -> int:
        return max(self.steps(), default=0)

    # -- what must hold -------------------------------------------------------------------------------------------

    def check_goes_on(self) -> None:
        """The job does more steps, each once, with its first nonce, and nobody said FAILED."""
        self.wait_step(self.last_step() + 3, timeout_s=20)
        self.check_log()

    def check_log(self) -> None:
        steps = self.steps()
        assert steps == list(range(1, len(steps) + 1)), self.tail()
        assert len(self.nonces()) == 1, self.tail()
        assert "FAILED" not in self.text(), self.tail()
        written = (self.home / "cheap.txt").read_text().split()
        assert written == [str(n) for n in range(1, len(written) + 1)], written[-30:]
        assert abs(len(written) - len(steps)) <= 5, (len(written), len(steps))

    def check_nothing_left(self) -> None:
        """Of a running job: no staging, no CRIU, no frozen process, one server per GPU, one tenant per ledger."""
        leftovers = [*self.folder.glob("staging*"), *(self.home / "state" / "staging").glob("*")]
        assert not leftovers, leftovers
        assert not self.named("criu")
        for process in self.processes():
            assert process.status() not in ("stopped", "tracing-stop"), process
        assert len(self.named("devproxy-server")) == 1, self.named("devproxy-server")

    def check_nobody_lives(self, timeout_s: float = 20) -> None:
        """No process but the daemon, which leaves by itself; no job folder, no ledger."""
        self.wait(lambda: not self.others(), timeout_s, f"the end of {self.others()}")
        self.wait(
            lambda: not self.folder.exists() and not list(self.root.glob("ledger-*")),
            timeout_s,
            f"an empty {self.root}: {list(self.root.rglob('*'))}",
        )
        leftovers = list((self.home / "state" / "staging").glob("*"))
        assert not leftovers, leftovers

    def others(self) -> list[psutil.Process]:
        return [p for p in self.processes() if "devproxy.control.daemon" not in _line(p)]

    def named(self, name: str) -> list[psutil.Process]:
        """Processes whose program has that name."""
        return [p for p in self.processes() if name in os.path.basename(_line(p).split(" ")[0])]

    def check_restores(self, image: str = "j", *, at_least: int = 1) -> None:
        """The last image brings the job back: it goes on with the same nonce, and no step is missing or twice."""
        self.check_nobody_lives()
        self.ctl("restore", image, "--store", str(self.store), "--output", "log")
        self.check_goes_on()
        assert self.last_step() >= at_least

    def check_message(
        self, text: str, *, stage: str = "", names: str = "", state: str = ""
    ) -> None:
        """One line with the stage, the object or cause, and the state of the job now."""
        print(
            text
        )  # whole, in the report of a failed test: pytest shortens what an assertion shows
        assert "Traceback" not in text, text
        lines = [line for line in text.splitlines() if re.search(r"error|failed|devproxy", line)]
        assert lines, text
        if stage:
            assert re.search(rf"failed at {stage}\b", text), text
        assert re.search(names, text), f"{names!r} is not in: {text}"
        assert re.search(state, text), f"{state!r} is not in: {text}"

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
