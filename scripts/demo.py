# SPDX-License-Identifier: Apache-2.0
"""Shows it: an unmodified training job is killed with -9 in the middle, all of it, and goes on from its last image.

    1  trains undisturbed, for comparison
    2  trains the same with an image every few seconds; in the middle, kill -9 of the job, its server, devproxy-run, the daemon
    3  `devproxy restore`: the same process goes on from the instruction it was at; then both runs are compared

Says on stderr what it does. Exit code 0 when everything is equal.
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = [sys.executable, "-m", "devproxy.cli.run"]
CTL = [sys.executable, "-m", "devproxy.cli.ctl"]
STEPS = 120
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
    whole, log, store = home / "undisturbed.log", home / "train.log", home / "store"
    say(f"1. undisturbed: devproxy-run --summary -- python examples/train_gpt.py --steps {STEPS}")
    with open(whole, "wb") as out:
        done = subprocess.run([*RUN, "--summary", "--", *TRAIN], env=env, stdout=out)
    print(log_of(whole), end="", flush=True)
    if done.returncode:
        sys.exit(f"demo: the job ended with {done.returncode}")

    say("2. the same with --checkpoint-every 4s; then kill -9 of everything in the middle")
    with open(log, "wb") as out:
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
    wait(
        lambda: len(STEP.findall(log_of(log))) >= at_image + 2 or job.poll() is not None,
        "the steps after it",
    )
    if job.poll() is not None:
        sys.exit(f"demo: the job had ended ({job.returncode}) before it could be killed")
    count = kill_all(mark)
    print(log_of(log), end="", flush=True)
    last = STEP.findall(log_of(log))[-1][1]
    print(f"   killed {count} processes with -9 after step {last}", flush=True)

    say(f"3. devproxy restore {NAME} --store ... --output train.log --wait")
    subprocess.run([*CTL, "images", "--store", str(store)], env=env, check=True)
    before = time.monotonic()
    done = subprocess.run(
        [*CTL, "restore", NAME, "--store", str(store), "--output", str(log), "--wait"], env=env
    )
    print(log_of(log), end="", flush=True)
    if done.returncode:
        sys.exit(f"demo: devproxy restore ended with {done.returncode}")
    return compare(log_of(whole), log_of(log), int(last), time.monotonic() - before)


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
