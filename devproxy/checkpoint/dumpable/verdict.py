# SPDX-License-Identifier: Apache-2.0
"""What a look at a tree found: obstacles, and how CRIU should treat connections."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Obstacle:
    """One thing in the way. pid: as the job sees it; outer_pid: as we do. object: a descriptor or a mapping.

    transient: it may be gone in a moment.
    """

    pid: int
    outer_pid: int
    process: str
    object: str
    what: str
    why: str
    remedy: str
    transient: bool = False

    @property
    def text(self) -> str:
        """One line for the user."""
        where = f"process {self.pid} ({self.process})" if self.pid else "the job"
        if self.object:
            where += f", {self.object}"
        line = f"{where}: {self.what}: {self.why}"
        return f"{line}; {self.remedy}" if self.remedy else line


@dataclass(frozen=True)
class OutsideTcp:
    """A TCP connection whose other end is not in the tree. local, remote: "address:port"."""

    pid: int
    outer_pid: int
    process: str
    fd: int
    local: str
    remote: str
    state: str


@dataclass
class Verdict:
    """refusals: a dump would fail, or a restore would lose. warnings: what the user should know.

    tcp: how CRIU should treat connections. "close" only where no connection inside of the tree would be closed too.
    """

    refusals: list[Obstacle] = field(default_factory=list)
    warnings: list[Obstacle] = field(default_factory=list)
    tcp: str = "established"
    outside_tcp: list[OutsideTcp] = field(default_factory=list)
    # (local, remote) of both ends of connections within the tree: for netdiag.destroy_tcp before a restore
    inside_tcp: list[tuple[str, str]] = field(default_factory=list)
    listeners: list[str] = field(default_factory=list)  # "address:port": a restore needs them free
