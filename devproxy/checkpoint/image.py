"""One image: what of a staging folder goes into the store, and back.

staging/                      written while the job stood still
  gpuK.state.json             handles, mirrors, replay log, positions of every client of that server
  gpuK-N.dev                  client N's live device buffers, back to back
  gpuK.shared.json  gpuK-N.{seg,pin}
  criu/                       CRIU's images of the process tree
  files/                      copies of the files that the job wrote
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from devproxy import __version__, proctree, state
from devproxy.checkpoint import pages
from devproxy.checkpoint.files import FileEntry
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer

NOT_STORED = (".log",)


@dataclass
class Parts:
    """What was taken while the job stood still, and where its chunks went."""

    staging: str
    files: list[FileEntry]
    stdio: dict[str, Any]
    facts: dict[str, Any]
    body: dict[str, Any] = field(default_factory=dict)


def resident_bytes(root: int) -> int:
    """Bytes of anonymous memory in the tree below that process: about what CRIU will write."""
    total = 0
    for pid in [root, *proctree.descendants(root)]:
        try:
            with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
                for line in file:
                    if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
                        total += int(line.split()[1]) * 1024
        except OSError:
            pass
    return total


def new_id(job: str) -> str:
    """Sorts by time within a job."""
    return f"{job}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(2).hex()}"


def staged_bytes(staging: str) -> int:
    total = 0
    for folder, _, names in os.walk(staging):
        for name in names:
            total += os.lstat(os.path.join(folder, name)).st_size
    return total


def put(writer: Writer, parts: Parts, build_id: str, report: Callable[[int, int], None]) -> None:
    """Everything of the staging folder and the build into chunks. Raises StoreError or OSError."""
    total = staged_bytes(parts.staging)
    done = 0

    def note(size: int) -> None:
        nonlocal done
        done += size
        report(min(done, total), total)

    parts.body["device"] = {}
    parts.body["shared"] = {}
    for name in sorted(os.listdir(parts.staging)):
        path = os.path.join(parts.staging, name)
        if not os.path.isfile(path) or name.endswith(NOT_STORED):
            continue
        if name.endswith(".dev"):
            continue
        parts.body["shared"][name] = {"chunks": writer.put_file(path, kind="shared")}
        note(os.path.getsize(path))
        if name.endswith(".state.json"):
            for dump, ranges in _device_dumps(path):
                file = os.path.join(parts.staging, dump)
                parts.body["device"][dump] = [
                    r.as_json() for r in writer.put_ranges(file, ranges, kind="device")
                ]
                note(os.path.getsize(file))
    criu_dir = os.path.join(parts.staging, "criu")
    parts.body["host"] = pages.put_pages(writer, criu_dir)
    note(staged_bytes(criu_dir))
    for entry in parts.files:
        if entry.staged:
            entry.refs = writer.put_file(entry.staged, kind="file")
            note(os.path.getsize(entry.staged))
    parts.body["build"] = _put_build(writer, build_id)


def _device_dumps(state_file: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """(file name, [(offset, bytes)]) of each client's device dump."""
    with open(state_file, encoding="utf-8") as file:
        server = json.load(file)
    return [
        (
            f"gpu{server['gpu']}-{client['number']}.dev",
            [(r["offset"], r["bytes"]) for r in client["device"]],
        )
        for client in server["clients"]
    ]


def _put_build(writer: Writer, build_id: str) -> dict[str, Any]:
    files: dict[str, Any] = {}
    folder = state.build_path(build_id)
    for name in state.build_files(build_id):
        path = os.path.join(folder, name)
        info = os.stat(path)
        files[name] = {
            "chunks": writer.put_file(path, kind="build"),
            "mode": info.st_mode & 0o777,
            "mtime_ns": info.st_mtime_ns,
        }
    return {"id": build_id, "files": files}


def manifest(
    parts: Parts,
    *,
    spec: dict[str, Any],
    epoch: int,
    criu: dict[str, Any],
    costs: dict[str, Any],
    warnings: list[str],
) -> dict[str, Any]:
    """The manifest's body, but what the store adds itself (format, image, sizes)."""
    return {
        "job": spec["job"],
        "job_id": spec["job_id"],
        "epoch": epoch,
        "devproxy": __version__,
        "spec": spec,
        "stdio": parts.stdio,
        "facts": parts.facts,
        "criu": criu,
        "files": [_named_chunks(entry.to_dict()) for entry in parts.files],
        "costs": costs,
        "warnings": warnings,
        **parts.body,
    }


def _named_chunks(entry: dict[str, Any]) -> dict[str, Any]:
    """The store finds chunks, for gc and verify, under this name."""
    if "refs" in entry:
        entry["chunks"] = entry.pop("refs")
    return entry


def file_entries(body: dict[str, Any]) -> list[FileEntry]:
    """The job's files, out of a manifest."""
    return [
        FileEntry.from_dict({"refs" if k == "chunks" else k: v for k, v in entry.items()})
        for entry in body["files"]
    ]


def fetch(
    store: Store, body: dict[str, Any], staging: str, report: Callable[[int, int], None]
) -> None:
    """The staging folder again, as it was at the cut. Every chunk is checked. Raises StoreError."""
    image_id = body["image"]
    total = sum(int(body["sizes"][kind]) for kind in ("device", "shared", "host"))
    done = 0

    def get(name: str, refs: list[Any]) -> None:
        nonlocal done
        to = os.path.join(staging, name)
        os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
        store.fetch_file(refs, to, name=f"image {image_id}: {name}")
        done += sum(int(ref[1]) for ref in refs)
        report(done, total)

    for name, entry in body["shared"].items():
        get(name, entry["chunks"])
    for name, buffers in body["device"].items():
        get(name, [ref for buffer in buffers for ref in buffer["chunks"]])
    for file in body["host"]:
        get(os.path.join("criu", file["name"]), file["chunks"])
