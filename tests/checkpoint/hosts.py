# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: each has a network namespace with an address of its own, and its own /dev/shm and state
folder, under the names that they have everywhere. What they share is the file system with the store, and the trust."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.checkpoint.world import ROOT, RUN, World

CTL = [sys.executable, "-m", "devproxy.cli.ctl"]
ADDRESSES = ("192.168.77.1", "192.168.77.2")


class Host:
    """A process holds its namespaces."""

    def __init__(self, home: Path, number: int) -> None:
        self.address = ADDRESSES[number]
        own, state = home / f"state-{number}", home / "state"
        own.mkdir(mode=0o700)
        state.mkdir(mode=0o700, exist_ok=True)
        mounts = f"mount -t tmpfs tmpfs /dev/shm && mount --bind {own} {state}"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", f"{mounts} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "ready\n"
        self.pid = self._holder.pid
        self._here = ["nsenter", "--target", str(self.pid), "--mount", "--net", f"--wdns={home}"]

    def command(self, words: Sequence[str]) -> list[str]:
        """The same command on this host."""
        return [*self._here, *words]

    def has_address(self, device: str) -> None:
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", device),
            ("link", "set", device, "up"),
            ("link", "set", "lo", "up"),
        ):
            subprocess.run(self.command(["ip", *words]), check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Hosts(World):
    """A world whose commands run on one of two hosts."""

    def __init__(self, **env: str) -> None:
        super().__init__(**env)
        del self.env["DEVPROXY_SHM_DIR"]
        self.env["DEVPROXY_TRUST_DIR"] = str(self.home / "trust")
        self.env["PYTHONPATH"] = str(ROOT)
        self.hosts = [Host(self.home, number) for number in range(2)]
        ends = [
            word for n, host in enumerate(self.hosts) for word in (f"t{n}", "netns", str(host.pid))
        ]
        subprocess.run(
            ["ip", "link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:]], check=True
        )
        for number, host in enumerate(self.hosts):
            host.has_address(f"t{number}")
        self.on(0, "trust")

    def mark(self) -> bytes:
        return str(self.home).encode()

    def meet(self, host: int) -> str:
        return f"{self.hosts[host].address}:29400"

    # -- the user's commands --------------------------------------------------------------------------------------

    def start(
        self,
        *command: str,
        nodes: Sequence[int] = (0, 1),
        only: Sequence[int] = (0, 1),
        count: int = 2,
        options: tuple[str, ...] = (),
        name: str = "j",
        log: str = "log",
        **env: str,
    ) -> list[subprocess.Popen[bytes]]:
        """devproxy-run once for each node; nodes[k] is the host of node k. Output of node k goes to `log`k.

        only: these nodes. count: what --nodes says.
        """
        started = []
        for node in only:
            host = nodes[node]
            words = [*RUN, "--name", name, "--nodes", str(count), "--node", str(node)]
            words += ["--meet", self.meet(nodes[0]), *options]
            words += ["--store", str(self.store)] if node == 0 else []
            with open(self.home / f"{log}{node}", "ab") as out:
                job = subprocess.Popen(
                    self.hosts[host].command([*words, "--", *command]),
                    env=self.env | {"DEVPROXY_FAULT": f"@{self.home}/fault{node}"} | env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=self.home,
                    start_new_session=True,
                )
            self.jobs.append(job)
            started.append(job)
        return started

    def on(
        self, host: int, *words: str, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A devproxy verb on that host."""
        done = subprocess.run(
            self.hosts[host].command([*CTL, *words]),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.home,
        )
        if check and done.returncode:
            logs = "\n".join(self.tail(f"log{node}") for node in (0, 1))
            raise AssertionError(
                f"devproxy {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}\n{logs}"
            )
        return done

    def bring_back(self, nodes: Sequence[int] = (0, 1), *words: str) -> list[subprocess.Popen[str]]:
        """devproxy restore, once for each node, all at the same time. Its output of node k goes to `log`k."""
        started = []
        for node, host in enumerate(nodes):
            given = ["restore", "j", "--store", str(self.store), "--output", f"log{node}"]
            given += ["--node", str(node), "--meet", self.meet(nodes[0]), *words]
            started.append(
                subprocess.Popen(
                    self.hosts[host].command([*CTL, *given]),
                    env=self.env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=self.home,
                )
            )
        return started

    def came_back(self, started: Sequence[subprocess.Popen[str]]) -> None:
        said = [one.communicate(timeout=120)[0] for one in started]
        assert [one.returncode for one in started] == [0] * len(started), "\n".join(said)

    def arm(self, node: int, spec: str) -> None:
        """The supervisor of that node fails there, once (devproxy/fault.py)."""
        (self.home / f"fault{node}").write_text(spec)

    def job_status(self, host: int, name: str = "j") -> dict[str, object]:
        found: dict[str, object] = json.loads(self.on(host, "status", name, "--json").stdout)
        return found

    def close(self) -> None:
        super().close()
        for host in self.hosts:
            host.close()
