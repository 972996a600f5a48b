# SPDX-License-Identifier: Apache-2.0
"""Shows it for many ranks: an unmodified DDP job under torchrun, on four software GPUs, is cut, moved, killed, restored.

    1  trains undisturbed, for comparison
    2  the same: a suspend and a resume, a migrate of all ranks and one of a single rank, a checkpoint; then kill -9 of one server
    3  `devproxy restore`: all ranks go on from the instruction they were at; another checkpoint; then kill -9 of everything
    4  `devproxy restore` again
    5  both runs are compared

Says on stderr what it does. Exit code 0 when everything is equal.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from demo import CTL, ROOT, RUN, kill_all, log_of, ours, say, wait

RANKS, STEPS = 4, 1000
NAME = f"ranks-{os.getpid()}"
STEP = re.compile(r"^step (\d+) loss (\S+)$", re.M)
END = re.compile(r"^parameters (\w+) equal on all ranks$", re.M)


def command(port: int) -> list[str]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    script = str(ROOT / "examples" / "train_ddp.py")
    ranks = ["--nproc-per-node", str(RANKS), "--master-port", str(port)]
    return [torchrun, *ranks, script, "--steps", str(STEPS)]


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="devproxy-demo-"))
    shm = Path(tempfile.mkdtemp(prefix="devproxy-demo-", dir="/dev/shm"))
    env = os.environ | {"DEVPROXY_SHM_DIR": str(shm), "DEVPROXY_STATE_DIR": str(home / "state")}
    env |= {"OMP_NUM_THREADS": "1"}  # several ranks share the processors
    mark = b"DEVPROXY_SHM_DIR=" + os.fsencode(shm)
    try:
        return show(home, env, mark)
    finally:
        kill_all(mark)
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def show(home: Path, env: dict[str, str], mark: bytes) -> int:
    whole, log, store = home / "undisturbed.log", home / "train.log", home / "store"
    say(f"1. undisturbed: devproxy-run --gpus {RANKS} -- torchrun ... examples/train_ddp.py")
    with open(whole, "wb") as out:
        done = subprocess.run([*RUN, "--gpus", str(RANKS), "--", *command(29611)], env=env, stdout=out)  # fmt: skip
    print(log_of(whole), end="", flush=True)
    if done.returncode:
        sys.exit(f"demo-ranks: the job ended with {done.returncode}")

    say("2. the same, with suspend, resume, migrate and checkpoint; then kill -9 of one server")
    with open(log, "wb") as out:
        job = subprocess.Popen(
            [*RUN, "--gpus", str(RANKS), "--name", NAME, "--store", str(store), "--", *command(29612)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
        )  # fmt: skip

    def until(step: int, ended: Callable[[], bool] = lambda: job.poll() is not None) -> None:
        def there() -> bool:
            seen = STEP.findall(log_of(log))
            return ended() or (bool(seen) and int(seen[-1][0]) >= step)

        wait(there, f"step {step}")
        if ended():
            sys.exit(f"demo-ranks: the job had ended before step {step}")

    def last_step() -> int:
        return int(STEP.findall(log_of(log))[-1][0])

    def verb(*words: str) -> None:
        say("   devproxy " + " ".join(words))
        subprocess.run([*CTL, *words], env=env, check=True)

    # The first image has nearly all of the bytes; nothing runs on while a suspend stores it.
    until(20)
    verb("suspend", NAME)
    verb("resume", NAME)
    until(60)
    verb("migrate", NAME, "--to", ",".join(str(RANKS + k) for k in range(RANKS)))
    until(80)
    verb("migrate", NAME, "--to", f"{RANKS},{RANKS + 1},{RANKS + 2},0")  # the last rank alone
    until(100)
    verb("checkpoint", NAME)
    until(min(last_step() + 10, STEPS - 10))
    server = min(pid for pid in ours(mark) if Path(f"/proc/{pid}/comm").read_text() == "devproxy-server\n")  # fmt: skip
    os.kill(server, signal.SIGKILL)
    wait(lambda: job.poll() is not None, "the end of the job")
    kill_all(mark)
    print(log_of(log), end="", flush=True)
    print(f"   the server {server} was killed with -9, and the job has ended", flush=True)

    say(f"3. devproxy restore {NAME} --store ... --output train.log")
    restore = [*CTL, "restore", NAME, "--store", str(store), "--output", str(log)]
    before = len(log_of(log))
    subprocess.run(restore, env=env, check=True)
    until(last_step() + 10, lambda: not ours(mark))
    verb("checkpoint", NAME)
    until(min(last_step() + 10, STEPS - 10), lambda: not ours(mark))
    count = kill_all(mark)
    print(log_of(log)[before:], end="", flush=True)
    print(f"   killed {count} processes with -9", flush=True)

    say(f"4. devproxy restore {NAME} --store ... --output train.log --wait")
    done = subprocess.run([*restore, "--wait"], env=env)
    print(log_of(log), end="", flush=True)
    if done.returncode:
        sys.exit(f"demo-ranks: devproxy restore ended with {done.returncode}")
    return compare(log_of(whole), log_of(log))


def compare(whole: str, disturbed: str) -> int:
    say("5. comparing")
    expected = dict(STEP.findall(whole))
    checks = {
        "every loss that was printed is the undisturbed run's": all(
            expected.get(step) == loss for step, loss in STEP.findall(disturbed)
        ),
        "the parameters at the end are the undisturbed run's, bit for bit": END.findall(whole)
        == END.findall(disturbed)[-1:]
        != [],
    }
    for text, holds in checks.items():
        print(f"   {'yes' if holds else 'NO '}  {text}", flush=True)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
