# SPDX-License-Identifier: Apache-2.0
"""Shows it for two hosts: an unmodified DDP job under `torchrun --nnodes 2`, cut on both, restored wherever.

The two hosts are network namespaces of this machine, each with an address, a /dev/shm and a state folder of its own.

    1  trains undisturbed on one host with four GPUs, for comparison
    2  the same on two hosts with two GPUs each: a suspend and a resume, a checkpoint; then kill -9 of everything
    3  restored with the halves exchanged; another checkpoint; kill -9 of everything
    4  restored with both halves on one host, to the end; then the runs are compared

Says on stderr what it does. Exit code 0 when everything is equal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from demo import ROOT, RUN, say
from demo_ranks import END, STEP, compare

sys.path.insert(0, str(ROOT))
from tests.checkpoint.hosts import Hosts

STEPS = 1000
MASTER = "10.213.0.1"  # what the processes of node 0 have for an address, wherever it runs


def training(*nodes: str) -> list[str]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    script = str(ROOT / "examples" / "train_ddp.py")
    return [torchrun, *nodes, script, "--steps", str(STEPS)]


def on_two() -> list[str]:
    ranks = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", MASTER]
    words = " ".join(training(*ranks, "--node-rank", "$DEVPROXY_NODE"))
    return ["sh", "-c", f"exec {words}"]


def last_step(hosts: Hosts) -> int:
    found = STEP.findall(hosts.text("log0"))
    return int(found[-1][0]) if found else 0


def until(hosts: Hosts, step: int) -> None:
    hosts.wait(lambda: last_step(hosts) >= step, 200, f"step {step}")


def kill(hosts: Hosts) -> None:
    print(f"   killed {hosts.kill_everything()} processes with -9", flush=True)


def verb(hosts: Hosts, *words: str) -> None:
    say("   devproxy " + " ".join(words))
    print(hosts.on(0, *words).stdout, end="", flush=True)


def show(hosts: Hosts) -> int:
    say("1. undisturbed, on one host: devproxy-run --gpus 4 -- torchrun --nproc-per-node 4 ...")
    whole = hosts.home / "undisturbed.log"
    with open(whole, "wb") as out:
        command = [*RUN, "--gpus", "4", "--", *training("--nproc-per-node", "4")]
        subprocess.run(hosts.hosts[0].command(command), env=hosts.env, stdout=out, check=True)
    print(whole.read_text()[-200:], end="", flush=True)

    say("2. on two hosts: devproxy-run --nodes 2 --node K --meet ... -- torchrun --nnodes 2 ...")
    hosts.start(*on_two(), options=("--gpus", "2"))
    until(hosts, 20)
    verb(hosts, "suspend", "j")
    verb(hosts, "resume", "j")
    until(hosts, 60)
    verb(hosts, "checkpoint", "j")
    until(hosts, last_step(hosts) + 10)
    kill(hosts)

    say("3. devproxy restore j --node K --meet ..., with the halves exchanged")
    hosts.came_back(hosts.bring_back((1, 0)))
    until(hosts, last_step(hosts) + 40)
    say("   devproxy checkpoint j")
    print(hosts.on(1, "checkpoint", "j").stdout, end="", flush=True)
    kill(hosts)

    say("4. the same, with both halves on one host")
    hosts.came_back(hosts.bring_back((1, 1)))
    hosts.wait(lambda: END.search(hosts.text("log0")), 300, "the end")
    print(hosts.text("log0")[-200:], end="", flush=True)
    return compare(whole.read_text(), hosts.text("log0"))


def main() -> int:
    hosts = Hosts()
    try:
        return show(hosts)
    finally:
        hosts.close()


if __name__ == "__main__":
    sys.exit(main())
