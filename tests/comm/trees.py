# SPDX-License-Identifier: Apache-2.0
"""A job of several process trees on one machine: a job folder and servers for each, no supervisor.

with Trees("0010") as trees:      # the tree of each rank
    trees.run("collectives.py", 0, 40)

With one tree the servers are as in a job of one node: they do not listen for others.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from devproxy.proxy.control_channel import ControlChannel

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SLOTS = 32  # of a tree


@dataclass
class Server:
    tree: int
    gpu: int
    process: subprocess.Popen[bytes]
    ready: int


@dataclass
class Trees:
    """Rank r is in tree places[r]; each has a GPU of its own there, unless a tree gets fewer `gpus`."""

    places: str
    chaos: int | None = None
    memory: str = str(256 << 20)
    gpus: int = 0
    address: str = "127.0.0.1"
    late: bool = False  # nobody says who the others are before the program runs
    # Where the others reach a server instead of its own address and port.
    by_way_of: Callable[[str, int], tuple[str, int]] = lambda address, port: (address, port)
    # Of the servers: hal/cuda over the fakes (test_trees_cuda.py), with GPUs of its own for each tree, as on several hosts.
    cuda: dict[str, str] = field(default_factory=dict)
    encrypts: str = ""  # these trees' servers do
    servers: list[Server] = field(default_factory=list)
    moves: int = 0
    marks: int = 0

    @property
    def count(self) -> int:
        return max(map(int, self.places)) + 1

    def place(self, rank: int) -> tuple[int, int]:
        """Tree and GPU."""
        tree = self.places[rank]
        return int(tree), self.places[:rank].count(tree) % self.gpus_of(int(tree))

    def gpus_of(self, tree: int) -> int:
        return min(self.gpus or 256, self.places.count(str(tree)))

    def folder(self, tree: int) -> Path:
        return self.root / f"tree{tree}"

    def __enter__(self) -> Trees:
        self.root = Path(tempfile.mkdtemp(prefix="devproxy-trees-", dir="/dev/shm"))
        self.token, self.key = secrets.token_hex(32), secrets.token_hex(32)
        self.lease = os.pipe()
        try:
            for tree in range(self.count):
                self.folder(tree).mkdir(mode=0o700)
                for gpu in range(self.gpus_of(tree)):
                    self.servers.append(self.start(tree, gpu))
            for server in self.servers:
                with os.fdopen(server.ready) as ready:
                    said = ready.read().strip()
                assert said == "ready", said
            if not self.late and self.count > 1:
                self.say()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, tree: int, gpu: int, *more: str) -> Server:
        ready_read, ready_write = os.pipe()
        folder = self.folder(tree)
        command = [
            os.environ.get("DEVPROXY_SERVER") or library() / "devproxy-server",
            "--job", "trees", "--job-dir", folder, "--gpu", gpu, "--device", "cuda" if self.cuda else "soft",
            "--gpu-memory", self.memory, "--ledger", folder / f"ledger{gpu}",
            "--lease-fd", self.lease[0], "--ready-fd", ready_write, "--tree", tree,
            "--slots", f"{tree * SLOTS}-{(tree + 1) * SLOTS}", *more,
        ]  # fmt: skip
        if self.count > 1:
            command += ["--data-address", self.address]
            command += ["--encrypt-data"] if str(tree) in self.encrypts else []
        elif self.cuda:
            command += ["--collectives"]
        if self.chaos is not None:
            command += ["--chaos", self.chaos]
        with (folder / f"gpu{gpu}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                pass_fds=(self.lease[0], ready_write),
                stderr=log,
                env=os.environ
                | {"DEVPROXY_LOG": "info"}
                | ({"FAKE_HOST": str(tree)} | self.cuda if self.cuda else {}),
            )
        os.close(ready_write)
        return Server(tree, gpu, process, ready_read)

    def move(self, tree: int, gpu: int) -> None:
        """Another server goes on for this one, at another port."""
        into = Path(tempfile.mkdtemp(dir=self.root))
        with ControlChannel(str(self.folder(tree)), gpu) as control:
            control.cut()
            control.dump(str(into))
            control_new = self.succeed(control, tree, gpu, into)
            self.say()
            control_new.resume()
            control_new.close()

    def succeed(
        self, old: ControlChannel, tree: int, gpu: int, dump: Path, *more: str
    ) -> ControlChannel:
        """Another server has taken over what this one dumped, which has left. It is to be resumed."""
        new = self.start(tree, gpu, "--restore", str(dump), "--ledger", f"{dump}/ledger", *more)
        with os.fdopen(new.ready) as ready:
            said = ready.read().strip()
        assert said == "ready", said
        channel = ControlChannel(str(self.folder(tree)), gpu)
        at = next(i for i, s in enumerate(self.servers) if (s.tree, s.gpu) == (tree, gpu))
        old.leave()
        assert self.servers[at].process.wait(10) == 0
        self.servers[at] = new
        self.moves += 1
        return channel

    def wait_attached(self) -> None:
        """Until all ranks are members of something."""
        until, ranks = time.monotonic() + 30, 0
        while ranks < len(self.places):
            assert time.monotonic() < until, f"{ranks} of {len(self.places)} ranks: {self.logs()}"
            time.sleep(0.02)
            ranks = 0
            for server in self.servers:
                with ControlChannel(str(self.folder(server.tree)), server.gpu) as control:
                    ranks += sum(1 for report in control.ranks() if report["members"])

    def cut(self, moves: list[tuple[int, int]], *more: str) -> None:
        """A cut of the whole job that takes back what has not begun. Those servers are replaced, the others go on."""
        channels = {
            (s.tree, s.gpu): ControlChannel(str(self.folder(s.tree)), s.gpu) for s in self.servers
        }
        while not all(channel.withhold()["still"] for channel in channels.values()):
            time.sleep(0.001)
        self.flush(list(channels.values()))
        for channel in channels.values():
            channel.cut()
        dumps = {place: Path(tempfile.mkdtemp(dir=self.root)) for place in moves}
        for place, into in dumps.items():
            channels[place].dump(str(into))
        self.flush(list(channels.values()))
        fresh = [
            self.succeed(channels[place], *place, into, *more) for place, into in dumps.items()
        ]
        for place in dumps:
            channels.pop(place).close()
        if moves and self.count > 1:
            self.say()
        for channel in [*fresh, *channels.values()]:
            channel.resume()
            channel.close()

    def flush(self, channels: list[ControlChannel]) -> None:
        """As control/barrier.py does it."""
        self.marks += 1
        while True:
            answers = {a["server"]: a for a in (channel.mark(self.marks) for channel in channels)}
            if all(a["still"] for a in answers.values()) and all(
                name in answers[to]["from"]
                for name, a in answers.items()
                for to in a["to"]
                if to in answers  # else it was replaced
            ):
                return
            time.sleep(0.001)

    def endpoint(self, tree: int, gpu: int) -> tuple[str, int]:
        address, port, *_ = (self.folder(tree) / f"gpu{gpu}.data").read_text().split()
        return address, int(port)

    def say(self, token: str = "", keys: dict[int, str] | None = None) -> None:
        """Writes the file `trees` into all folders. keys: of these trees, instead of the job's."""
        lines = [f"token {token or self.token}"]
        for tree in range(self.count):
            servers = [self.endpoint(tree, gpu) for gpu in range(self.gpus_of(tree))]
            ways = [self.by_way_of(address, port) for address, port in servers]
            texts = [f"[{a}]:{p}" if ":" in a else f"{a}:{p}" for a, p in ways]
            lines.append(f"tree {tree} {len(servers)} {' '.join(texts)}")
        for tree in range(self.count):
            part = self.folder(tree) / "trees.part"
            key = [f"key {(keys or {}).get(tree, self.key)}"] if str(tree) in self.encrypts else []
            part.write_text("\n".join(lines + key) + "\n")
            part.rename(self.folder(tree) / "trees")

    def environment(self) -> dict[str, str]:
        """For a program that starts its ranks by nccl.main."""
        places = [
            [str(self.folder(tree)), self.gpus_of(tree), gpu, tree]
            for tree, gpu in map(self.place, range(len(self.places)))
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
        return env | {
            "DEVPROXY_JOB_DIR": str(self.folder(0)),
            "DEVPROXY_GPUS": str(self.gpus_of(0)),
            "LD_LIBRARY_PATH": str(library()),
            "PYTHONPATH": str(ROOT),
            "TEST_TREES": json.dumps(places),
        }

    def popen(self, program: str, *arguments: object) -> subprocess.Popen[str]:
        self.notes = Path(tempfile.mkdtemp(dir=self.root))
        words = [sys.executable, str(HERE / program), str(self.notes), str(len(self.places))]
        return subprocess.Popen(
            [*words, *map(str, arguments)],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, program: str, *arguments: object, seconds: float = 120) -> str:
        """Runs a program's ranks, and wants them all to have passed."""
        process = self.popen(program, *arguments)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"not within {seconds} s: {out}\n{err}\n{self.logs()}") from None
        assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}\n{self.logs()}"
        assert out.splitlines()[-1] == "PASS", out
        return out

    def logs(self) -> str:
        return "\n".join(
            f"{path.parent.name}/{path.name}: {path.read_text()[-2000:]}"
            for path in sorted(self.root.glob("tree*/gpu*.log"))
        )

    def __exit__(self, *_: object) -> None:
        for fd in self.lease:
            os.close(fd)
        until = time.monotonic() + 5
        for server in self.servers:
            while server.process.poll() is None and time.monotonic() < until:
                select.select([], [], [], 0.005)
            server.process.kill()
            server.process.wait()
        shutil.rmtree(self.root, ignore_errors=True)


def library() -> Path:
    return Path(os.environ.get("DEVPROXY_LIB") or ROOT / "build" / "lib")
