# SPDX-License-Identifier: Apache-2.0
"""What a job is: what devproxy-run was told, and what a restore needs of it. Travels in job.json and in images."""

from __future__ import annotations

import json
import os

from devproxy.errors import Refused

TYPE_CHECKING = False  # typing itself costs every start 10 ms
if TYPE_CHECKING:
    from typing import Any

GIB = 1 << 30
FREEZE_LIMIT_S = 300.0  # of a checkpoint; more than any job so far has needed


class JobSpec:
    """What holds for the whole job, however many trees on however many hosts it has: which GPUs it uses is each tree's.

    A plain class: importing dataclasses costs devproxy-run 10 ms.
    """

    def __init__(self, **given: Any) -> None:
        self.job: str = given["job"]
        self.job_id: str = given["job_id"]
        # Of a restore under another name: the id of the first job. They have the same files.
        self.copy_of: str = given.get("copy_of", "")
        # Of a restore with --files: the folder that has its files.
        self.files_dir: str = given.get("files_dir", "")
        self.command: list[str] = list(given["command"])
        self.program: str = given["program"]
        self.cwd: str = given["cwd"]
        self.device: str = given["device"]
        self.gpu_memory_bytes: int = given["gpu_memory_bytes"]
        self.chaos: int | None = given.get("chaos")
        self.build: str = given["build"]
        self.abi: str = given["abi"]
        self.store: str = given["store"]
        self.every: str = given.get("every", "")  # "30s", "50steps", or nothing
        self.keep: int = given.get("keep", 3)
        self.files_max_bytes: int = given.get("files_max_bytes", GIB)
        self.cut_wait_ms: int | None = given.get("cut_wait_ms")
        self.freeze_limit_s: float = given.get("freeze_limit_s", FREEZE_LIMIT_S)
        # auto, meta, agree or takeback (control/barrier.py). An image from before there was a choice has a server without it.
        self.barrier: str = given.get("barrier", "agree")
        self.strict: bool = given.get("strict", False)
        self.plain: bool = given.get("plain", False)
        self.started_unix_s: float = given.get("started_unix_s", 0.0)
        self.nodes: int = given.get("nodes", 1)  # trees
        self.network: str = given.get(
            "network", ""
        )  # of several trees: what their addresses are of
        self.encrypt_data: bool = given.get(
            "encrypt_data", False
        )  # between servers of several trees
        self.uid: int = given.get("uid", os.getuid())

    @property
    def carries_metas(self) -> bool:
        return self.barrier in ("auto", "meta")

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def check_encryption(device: str) -> None:
    """Raises Refused where nobody encrypts what GPUs send each other."""
    if device != "soft":
        raise Refused(
            f"--encrypt-data: on --device {device} devproxy does not carry the data of GPUs and cannot encrypt it; NCCL does not",
            "leave it out, and give the hosts a network that nobody else reaches",
        )


def own_id(job_id: str, node: int) -> str:
    """What the job's tree on that node is known by on its host, where another tree of the job may be too."""
    return f"{job_id}.{node}" if node else job_id


def own_name(job: str, node: int) -> str:
    return f"{job}.{node}" if node else job


def write_job_file(job_dir: str, spec: JobSpec, gpus: list[int], pid: int) -> None:
    """job.json, for `devproxy ps`: written under another name first, so that nobody reads half of it.

    gpus: [k] is the machine's GPU behind the job's GPU k.
    """
    path = os.path.join(job_dir, "job.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(spec.as_json() | {"gpus": gpus, "pid": pid}, file)
    os.rename(path + ".new", path)


def read_job_file(job_dir: str) -> dict[str, Any]:
    """Raises OSError or ValueError where there is none that can be read."""
    with open(os.path.join(job_dir, "job.json"), encoding="utf-8") as file:
        facts = json.load(file)
    if not isinstance(facts, dict):
        raise ValueError("job.json is not an object")
    return facts


def parse_every(text: str) -> tuple[float, int]:
    """("30s" -> (30.0, 0); "5m" -> (300.0, 0); "50steps" -> (0.0, 50)). Raises Refused."""
    body = text.strip().lower()
    for suffix in ("steps", "step"):
        if body.endswith(suffix):
            number = body[: -len(suffix)].strip()
            if number.isascii() and number.isdigit() and 0 < int(number) < 1 << 31:
                return 0.0, int(number)
    for suffix, factor in (("ms", 0.001), ("s", 1.0), ("min", 60.0), ("m", 60.0), ("h", 3600.0)):
        if body.endswith(suffix):
            try:
                value = float(body[: -len(suffix)]) * factor
            except ValueError:
                continue
            if 0.05 <= value < 1e7:
                return value, 0
    raise Refused(
        f"--checkpoint-every {text!r} is no interval", "write it like 30s, 10m or 50steps"
    )


def check_gpus(text: str, most: int) -> list[int]:
    """ "0,2" -> [0, 2]. Raises Refused."""
    found = []
    for part in text.split(","):
        if not part.isascii() or not part.isdigit() or int(part) >= most:
            raise Refused(
                f"{text!r} is no list of GPUs", f"write numbers below {most}, as 0 or 0,1"
            )
        found.append(int(part))
    return found
