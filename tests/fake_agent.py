# SPDX-License-Identifier: Apache-2.0
"""A job's supervisor without a job: a real job folder and the real JobAgent service over a coordinator that pretends.

    python -m tests.fake_agent NAME             lives until SIGTERM
    python -m tests.fake_agent --restore SPEC   what devproxyd starts, see FINDER

What the coordinator did is in <job folder>/done, a line per verb that was finished.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from devproxy import runtime
from devproxy.control import agent_service
from devproxy.control import coordinator_api as api
from devproxy.errors import CheckpointError, Refused
from devproxy.node.stages import Progress, Report

# Of cut_wait_ms: what goes wrong.
FAIL, BUG, KILLED = 13, 14, 15
# A sitecustomize.py that makes `-m devproxy.control.agent` this module.
FINDER = """
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "devproxy.control.agent":
            return importlib.util.spec_from_file_location(name, {path!r})
sys.meta_path.insert(0, Finder)
"""


class FakeCoordinator:
    def __init__(self, job: str, folder: str, pace_s: float = 0.0) -> None:
        self.job, self.folder, self.pace_s = job, folder, pace_s
        self.phase = api.RUNNING
        self.gpus = [0]
        self.images = 0
        self.killed: list[int] = []
        self.ended = threading.Event()
        self.log = b"one\ntwo\n"
        self._verb = threading.Lock()

    def status(self) -> api.JobStatus:
        return api.JobStatus(
            job=self.job,
            job_id="id-" + self.job,
            phase=self.phase,
            device="soft",
            gpus=self.gpus,
            pid=os.getpid(),
            command=["python", "train.py", "ü"],
            started_unix_s=1.5,
            images=self.images,
            last_image=f"{self.job}-{self.images}" if self.images else "",
            next_checkpoint_unix_s=None,
            steps=7,
        )

    def _stages(self, report: Report, *stages: str) -> None:
        for stage in stages:
            for part in range(4):
                report(Progress(stage, f"{stage} of {self.job}", part * 1024, 3 * 1024))
                time.sleep(self.pace_s)

    def _done(self, what: str) -> None:
        with open(os.path.join(self.folder, "done"), "a", encoding="utf-8") as file:
            file.write(what + "\n")

    def checkpoint(
        self, *, cut_wait_ms: int | None, strict: bool, report: Report
    ) -> api.ImageFacts:
        if not self._verb.acquire(blocking=False):
            raise Refused("a checkpoint is under way", "try again when that has ended")
        try:
            if strict:
                raise Refused("process 12 (python) holds fd 7, a TCP connection", "close it")
            self.phase = api.CUTTING
            self._stages(report, "cut", "device")
            if cut_wait_ms == FAIL:
                raise CheckpointError(
                    "device", "the server of GPU 0 ended", "see gpu0.log", "running", "gpu0"
                )
            if cut_wait_ms == BUG:
                raise ValueError("a bug")
            if cut_wait_ms == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            self._stages(report, "upload", "commit")
            self.images += 1
            self._done(f"checkpoint {cut_wait_ms}")
            return api.ImageFacts(
                id=f"{self.job}-{self.images}",
                job=self.job,
                job_id="id-" + self.job,
                created_unix_s=time.time(),
                device_bytes=5 << 30,
                host_bytes=3 << 20,
                new_bytes=1 << 20,
                deduplicated_bytes=2 << 20,
                still_s=0.25,
                stages={"cut": 0.1, "device": 0.2},
                warnings=["a TCP connection to outside was closed"],
                store="/the/store",
            )
        finally:
            self.phase = api.RUNNING
            self._verb.release()

    def check(self, *, strict: bool, report: Report) -> list[str]:
        if strict:
            raise Refused("process 12 (python) holds fd 7, a TCP connection", "close it")
        return ["a TCP connection would be closed"]

    def suspend(self, *, strict: bool, cut_wait_ms: int | None, report: Report) -> api.ImageFacts:
        facts = self.checkpoint(cut_wait_ms=cut_wait_ms, strict=strict, report=report)
        self.phase = api.SUSPENDED
        return facts

    def resume(self, *, gpus: list[int] | None, report: Report) -> None:
        if self.phase != api.SUSPENDED:
            raise Refused(f"job {self.job} is {self.phase}", "suspend it first")
        self._stages(report, "restore")
        self.gpus = gpus or self.gpus
        self.phase = api.RUNNING

    def resize(
        self, *, gpus: list[int], report: Report, onto: list[int] | None = None
    ) -> dict[str, Any]:
        return self.migrate(to=gpus, report=report)

    def migrate(self, *, to: list[int], report: Report, anew: bool = False) -> dict[str, Any]:
        if not self._verb.acquire(blocking=False):
            raise Refused("a verb is under way", "try again when that has ended")
        try:
            if to == self.gpus and not anew:
                return {"gpus": to, "from_gpus": to, "still_s": 0.0}
            self._stages(report, "cut", "device", "restore")
            before, self.gpus = self.gpus, to
            return {"gpus": to, "from_gpus": before, "still_s": 0.5, "device_bytes": 1 << 20}
        finally:
            self._verb.release()

    def kill(self, signal: int) -> None:
        self._done(f"kill {signal}")
        self.ended.set()

    def follow_log(self, offset: int) -> Iterator[bytes]:
        yield self.log[offset:]
        while not self.ended.wait(0.05):
            yield b""
        yield b"three\n"


def main() -> None:
    spec: dict[str, Any] = {"name": sys.argv[1], "image": ""}
    restores = sys.argv[1] == "--restore"
    if restores:
        with open(sys.argv[2], encoding="utf-8") as file:
            spec = json.load(file)
    if spec["image"] == "refused-1":
        with open(sys.argv[2] + ".failed", "w", encoding="utf-8") as file:
            json.dump({"error": "no CRIU", "remedy": "install it", "stage": "start"}, file)
        sys.exit(2)
    if spec["image"] == "broken-1":
        sys.exit("Traceback: something broke")
    folder = runtime.create_job(spec["name"])
    coordinator = FakeCoordinator(folder.name, folder.path, float(os.environ.get("PACE_S", "0")))
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
    coordinator.phase = api.RESTORING if restores else api.RUNNING
    handle = agent_service.serve(coordinator, os.path.join(folder.path, "agent.sock"))
    if restores and spec["image"] != "silent-1":
        with handle.operation("restore") as report:
            coordinator._stages(report, "fetch", "restore")
            coordinator.gpus = spec["gpus"] or [0]
            coordinator._done("restored " + json.dumps(spec))
            coordinator.phase = api.RUNNING
    coordinator.phase = api.RUNNING
    print("up", flush=True)
    while not told_to_end and not coordinator.ended.wait(0.05):
        pass
    coordinator.ended.set()
    handle.stop()
    runtime.remove_job(folder)
    os._exit(7 if restores else 0)


if __name__ == "__main__":
    main()
