# SPDX-License-Identifier: Apache-2.0
"""A job, its store and its command lines, seen from outside as a user sees them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.living import matching

ROOT = Path(__file__).resolve().parent.parent.parent
SUBJECTS = ROOT / "tests" / "subjects"
RUN = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft"]
CTL = [sys.executable, "-m", "devproxy.cli.ctl"]
AHEAD = 8  # steps


def without_pauses(command: Sequence[str]) -> list[str]:
    """The same run as fast as it goes, which computes the same: for one that nobody is going to disturb."""
    words = list(command)
    at = words.index("--seconds-per-step")
    return words[:at] + words[at + 2 :]


class World:
    """One runtime folder, one state folder, one store. Everything of it dies with close()."""

    def __init__(self, **env: str) -> None:
        self.shm = Path(tempfile.mkdtemp(prefix="devproxy-test-", dir="/dev/shm"))
        self.home = Path(tempfile.mkdtemp(prefix="dp-world-"))
        self.store = self.home / "store"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
        self.env |= {
            "DEVPROXY_SHM_DIR": str(self.shm),
            "DEVPROXY_STATE_DIR": str(self.home / "state"),
            "DEVPROXY_KEY_FILE": str(self.home / "key"),
            "DEVPROXY_DAEMON_IDLE_S": "2",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "",
        } | env
        self.jobs: list[subprocess.Popen[bytes]] = []

    # -- the user's commands --------------------------------------------------------------------------------------

    def run(
        self,
        *command: str,
        name: str = "j",
        options: tuple[str, ...] = (),
        log: str = "log",
        **env: str,
    ) -> subprocess.Popen[bytes]:
        """devproxy-run in the background; its stdout and stderr go to the file `log`."""
        out = open(self.home / log, "ab")  # noqa: SIM115
        job = subprocess.Popen(
            [*RUN, "--name", name, "--store", str(self.store), *options, "--", *command],
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=self.home,
            start_new_session=True,
        )
        out.close()
        self.jobs.append(job)
        return job

    def ctl(
        self, *words: str, check: bool = True, timeout_s: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        if "--wait" in words:
            self.hurry()
        done = subprocess.run(
            [*CTL, *words],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.home,
        )
        if check and done.returncode:
            raise AssertionError(
                f"devproxy {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}\nlog:\n{self.tail()}"
            )
        return done

    def ctl_json(self, *words: str) -> dict[str, object]:
        text = self.ctl(*words, "--json").stdout.strip()
        found: dict[str, object] = json.loads(text)
        return found

    def undisturbed(self, *command: str, gpus: int = 1) -> list[str]:
        """The digest of the same command, run beside the job under test as fast as it goes."""
        options = ("--gpus", str(gpus))
        alone = self.run(
            *without_pauses(command), name="alone", log="alone", options=options, TEST_GATE=""
        )
        assert alone.wait(200) == 0, self.tail("alone")
        digest = self.digest("alone")
        assert digest, self.tail("alone")
        return digest

    def checkpoint_then_die(self, at: int, after: int) -> None:
        """Makes an image of j at one step or later, lets it run to another, and kills every process with -9."""
        self.wait_step(at)
        self.ctl("checkpoint", "j")
        self.wait_step(after)
        assert self.kill_everything()

    def restore(
        self, *options: str, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        words = ("restore", "j", "--store", str(self.store), "--output", "log", *options)
        return self.ctl(*words, check=check, **env)

    def images(self) -> list[dict[str, object]]:
        found = self.ctl_json("images", "--store", str(self.store))["images"]
        assert isinstance(found, list)
        return found

    # -- looking --------------------------------------------------------------------------------------------------

    def text(self, log: str = "log") -> str:
        path = self.home / log
        return path.read_text(errors="replace") if path.exists() else ""

    def tail(self, log: str = "log") -> str:
        return self.text(log)[-3000:]

    def steps(self, log: str = "log") -> list[int]:
        """Numbers of the steps that the log shows, in its order."""
        return [int(n) for n in re.findall(r"^\S+ step (\d+)\b", self.text(log), re.M)]

    def nonces(self, log: str = "log") -> set[str]:
        return set(re.findall(r"^(\S+) step \d+\b", self.text(log), re.M))

    def digest(self, log: str = "log") -> list[str]:
        return re.findall(r"digest (\S+)", self.text(log))

    def wait(self, condition: Callable[[], object], timeout_s: float = 60, what: str = "") -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what or condition}\n{self.tail()}"
            time.sleep(0.02)

    def wait_step(self, number: int, log: str = "log", timeout_s: float = 90) -> None:
        self.near(number)
        self.wait(lambda: max(self.steps(log), default=-1) >= number, timeout_s, f"step {number}")

    def wait_end(self, text: str = "digest", log: str = "log", timeout_s: float = 120) -> None:
        self.hurry()
        self.wait(lambda: text in self.text(log), timeout_s, text)

    def committed(self, count: int, timeout_s: float = 120) -> None:
        """Returns when so many images have been there, be they pruned or not."""
        seen: set[str] = set()

        def enough() -> bool:
            seen.update(path.parent.name for path in matching(self.store, "images/*/manifest.json"))
            return len(seen) >= count

        self.wait(enough, timeout_s, f"{count} images")

    # -- how far the subjects go (tests/subjects/gate.py) ---------------------------------------------------------

    def hold(self) -> None:
        """Subjects that begin from now on do not begin their last step before hurry(), wait_end() or `restore --wait`."""
        self.env["TEST_GATE"] = str(self.home / "gate")

    def until(self, step: int | str) -> None:
        """They begin no later step than this one."""
        if path := self.env.get("TEST_GATE"):
            fresh = Path(path).with_suffix(".new")
            fresh.symlink_to(str(step))
            fresh.rename(path)

    def hurry(self) -> None:
        """They go on to their end, without pauses."""
        self.until("end")

    def near(self, step: int) -> None:
        """They begin no step far behind this one, unless they hurry: what a test waits for next is still to come."""
        path = Path(self.env.get("TEST_GATE", ""))
        if not path.is_symlink() or os.readlink(path) != "end":
            self.until(step + AHEAD)

    def end_of(self, job: subprocess.Popen[bytes], timeout_s: float = 200) -> int:
        """Lets it go on, and its exit code."""
        self.hurry()
        return job.wait(timeout_s)

    # -- ends -----------------------------------------------------------------------------------------------------

    def mark(self) -> bytes:
        """Its runtime folder."""
        return str(self.shm).encode()

    def processes(self) -> list[psutil.Process]:
        """Everything that has this world's mark in its environment or command line."""
        mark = self.mark()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                text = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in text and int(path.name) != os.getpid():
                try:
                    process = psutil.Process(int(path.name))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
                except psutil.NoSuchProcess:
                    pass
        return found

    def kill_everything(self) -> int:
        """kill -9 of the job, the servers, devproxy-run, the janitor and the daemon. Returns how many they were."""
        killed = set()
        for _ in range(50):
            left = self.processes()
            if not left:
                break
            for process in left:
                try:
                    process.send_signal(signal.SIGKILL)
                    killed.add(process.pid)
                except psutil.NoSuchProcess:
                    pass
            for job in self.jobs:
                job.poll()
            time.sleep(0.02)
        return len(killed)

    def close(self) -> None:
        self.kill_everything()
        for job in self.jobs:
            job.wait(10)
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
