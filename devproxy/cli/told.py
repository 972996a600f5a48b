# SPDX-License-Identifier: Apache-2.0
"""What a verb did to whom, in a few lines. `--verbose` has all that is known beside them."""

from __future__ import annotations

from typing import Any

from devproxy.control import coordinator_api as api
from devproxy.control.client import Result
from devproxy.control.coordinator_api import ImageFacts, JobStatus
from devproxy.machine import show_bytes


def lines(verb: str, job: str, result: Result) -> list[str]:
    """Of a verb that ended well."""
    if result.image:
        return _image(result.image, result.job)
    now = [_now(result.job)] if result.job else []
    if "from_gpus" in result.facts:
        return [_moved(job, result.facts), *now]
    took = next((result.facts[k] for k in ("restore_s",) if k in result.facts), None)
    first = f"{verb} of job {job}: done" + (f" in {took:.3f} s" if took else "")
    return [first, *_outputs(job, result.facts), *now]


def _outputs(job: str, facts: dict[str, Any]) -> list[str]:
    """Of a restore: where the job's output goes, and why not elsewhere."""
    files: dict[str, str] = {name: facts[name] for name in ("stdout", "stderr") if name in facts}
    if len(set(files.values())) == 1:
        files = {"output": next(iter(files.values()))}
    where = [f"its {name} goes on in {path}" for name, path in files.items()]
    return [*facts.get("outputs", []), *where]


def gpus(numbers: list[int]) -> str:
    return f"GPU {','.join(map(str, numbers))}"


def _now(job: JobStatus) -> str:
    if job.phase == api.SUSPENDED:
        return f"job {job.job} is suspended, and {gpus(job.gpus)} is free of it; it goes on by: devproxy resume {job.job}"
    return f"job {job.job} is {job.phase} on {gpus(job.gpus)}"


def _moved(job: str, facts: dict[str, Any]) -> str:
    if facts["from_gpus"] == facts["gpus"] and not facts["still_s"]:
        return f"job {job} is on {gpus(facts['gpus'])} already; nothing was done"
    return (
        f"job {job} has moved from {gpus(facts['from_gpus'])} to {gpus(facts['gpus'])};"
        f" it stood still {facts['still_s']:.3f} s"
    )


def _image(facts: ImageFacts, job: JobStatus | None) -> list[str]:
    """Five lines."""
    return [
        f"image {facts.id} of job {facts.job} is whole, in store {facts.store}",
        f"  it holds {show_bytes(facts.device_bytes)} of the GPUs, {show_bytes(facts.host_bytes)} of the processes,"
        f" {show_bytes(facts.shared_bytes)} that they share, {show_bytes(facts.files_bytes)} of files",
        f"  new in the store: {show_bytes(facts.new_bytes)}, compressed to {show_bytes(facts.stored_bytes)};"
        f" {show_bytes(facts.deduplicated_bytes)} were there already",
        f"  the job stood still {facts.still_s:.3f} s of {facts.total_s:.3f} s in all"
        f" ({facts.freeze_s:.3f} s frozen by CRIU)",
        _now(job) if job else f"back to it: devproxy restore {facts.job}",
    ]
