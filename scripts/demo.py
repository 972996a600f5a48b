# SPDX-License-Identifier: Apache-2.0
"""Shows it: an unmodified training job is killed with -9 in the middle, all of it, and goes on from its last image.

    1  trains undisturbed, for comparison
    2  trains the same with an image every few seconds; in the middle, kill -9 of the job, its server, devproxy-run, the daemon
    3  `devproxy restore`: the same process goes on from the instruction it was at; then both runs are compared

Says what it does, and shows the job's output as it comes. Exit code 0 when everything is equal. docs/demo.svg is a transcript
of it, drawn by scripts/draw_demo.py.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = [sys.executable, "-m", "devproxy.cli.run"]
CTL = [sys.executable, "-m", "devproxy.cli.ctl"]
STEPS = 100
TRAIN = [
    sys.executable,
    str(ROOT / "examples" / "train_gpt.py"),
    "--steps",
    str(STEPS),
    "--every",
    "5",
]
NAME = f"demo-{os.getpid()}"
STEP = re.compile(r"^run (\w+)  step +(\d+)  loss (\S+)", re.M)


def say(text: str) -> None:
    print(f"\n== {text}", file=sys.stderr, flush=True)


class Shown:
    """Shows what is appended to a file, as it comes, until the block ends. A restore makes the file as short as it was at the
    image; then what comes after that is shown."""

    def __init__(self, path: Path, skip: int = 0) -> None:
        self.path, self.at = path, skip
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.follow)

    def __enter__(self) -> Shown:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def follow(self) -> None:
        last = False
        while not last:
            last = self.done.wait(0.1)
            if self.path.exists():
                with open(self.path, "rb") as file:
                    self.at = min(self.at, os.fstat(file.fileno()).st_size)
                    file.seek(self.at)
                    text = file.read()
                self.at += len(text)
                sys.stdout.buffer.write(text)
                sys.stdout.flush()


def log_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def wait(condition, what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"demo: waited {timeout_s:.0f} s for {what}")
        time.sleep(0.05)


def ours(mark: bytes) -> list[int]:
    """Processes whose environment names this demo's folders: the job, its server, devproxy-run, the daemon."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                found.append(int(path.name))
        except OSError:
            pass
    return found


def kill_all(mark: bytes) -> int:
    killed: set[int] = set()
    while pids := ours(mark):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
    return len(killed)


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="devproxy-demo-"))
    shm = Path(tempfile.mkdtemp(prefix="devproxy-demo-", dir="/dev/shm"))
    env = os.environ | {"DEVPROXY_SHM_DIR": str(shm), "DEVPROXY_STATE_DIR": str(home / "state")}
    mark = b"DEVPROXY_SHM_DIR=" + os.fsencode(shm)
    try:
        return show(home, env, mark)
    finally:
        kill_all(mark)
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def show(home: Path, env: dict[str, str], mark: bytes) -> int:
    begin = time.monotonic()
    whole, log, store = home / "undisturbed.log", home / "train.log", home / "store"
    say(f"1. undisturbed: devproxy-run --summary -- python examples/train_gpt.py --steps {STEPS}")
    with open(whole, "wb") as out, Shown(whole):
        done = subprocess.run([*RUN, "--summary", "--", *TRAIN], env=env, stdout=out)
    if done.returncode:
        sys.exit(f"demo: the job ended with {done.returncode}")
    undisturbed_s = time.monotonic() - begin

    say("2. the same with --checkpoint-every 4s; then kill -9 of everything in the middle")
    with open(log, "wb") as out, Shown(log):
        job = subprocess.Popen(
            [*RUN, "--name", NAME, "--store", str(store), "--checkpoint-every", "4s", "--", *TRAIN],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
        )
        wait(
            lambda: glob.glob("images/*/manifest.json", root_dir=store) or job.poll() is not None,
            "an image",
        )
        at_image = len(STEP.findall(log_of(log)))
        print("   an image is in the store; the job goes on", flush=True)
        wait(
            lambda: (
                len(STEP.findall(log_of(log))) >= max(at_image + 2, 6) or job.poll() is not None
            ),
            "the steps after it",
        )
        if job.poll() is not None:
            sys.exit(f"demo: the job had ended ({job.returncode}) before it could be killed")
        count = kill_all(mark)
    last = STEP.findall(log_of(log))[-1][1]
    print(f"   killed {count} processes with -9 after step {last}", flush=True)

    say(f"3. devproxy restore {NAME} --store ... --output train.log --wait")
    subprocess.run([*CTL, "images", "--store", str(store)], env=env, check=True)
    before = time.monotonic()
    # The output goes back to where it was at the image, and on from there.
    with Shown(log, log.stat().st_size):
        done = subprocess.run(
            [*CTL, "restore", NAME, "--store", str(store), "--output", str(log), "--wait"], env=env
        )
    if done.returncode:
        sys.exit(f"demo: devproxy restore ended with {done.returncode}")
    code = compare(log_of(whole), log_of(log), int(last), time.monotonic() - before)
    print(
        f"""
== This was devproxy: {time.monotonic() - begin:.0f} s in all, {undisturbed_s:.0f} s of them for the undisturbed run.
   An unmodified PyTorch job and all that served it were killed with -9. `devproxy restore` brought the same process back
   from its last image; its numbers are those of the run that nobody disturbed.
   Try next, from this folder:
     .venv/bin/devproxy-run --name j -- .venv/bin/python examples/train_gpt.py --steps 1000
     .venv/bin/devproxy top                 # in another terminal; so are those below
     .venv/bin/devproxy checkpoint j; .venv/bin/devproxy suspend j; .venv/bin/devproxy resume j
     make demo-ranks                        # four ranks under torchrun: cut, moved, suspended, killed, restored""",
        flush=True,
    )
    return code


def compare(whole: str, disturbed: str, killed_after: int, seconds: float) -> int:
    say("4. comparing")
    a, b = STEP.findall(whole), STEP.findall(disturbed)
    digests = [re.findall(r"parameters sha256 (\w+)", text) for text in (whole, disturbed)]
    checks = {
        "one run id before and after: the process was restored, not started again": len(
            {r for r, _, _ in b}
        )
        == 1,
        f"each of the {len(a)} reported steps appears once, in order": [s for _, s, _ in a]
        == [s for _, s, _ in b],
        "all losses are equal": [x for _, _, x in a] == [x for _, _, x in b],
        f"parameters are equal bit for bit ({digests[0]} and {digests[1]})": len(digests[0]) == 1
        and digests[0] == digests[1],
    }
    for text, good in checks.items():
        print(f"   {'yes' if good else 'NO '}  {text}")
    print(
        f"   (killed after step {killed_after}; restored and finished in {seconds:.1f} s)",
        flush=True,
    )
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
