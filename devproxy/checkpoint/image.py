"""One image: what of a staging folder goes into the store, and back.

staging/                      written while the job stood still
  gpuK.state.json             handles, mirrors, replay log, positions of every client of that server
  gpuK.images                 module images that replay logs name, each once
  gpuK-N.dev                  client N's live device buffers and arrays, back to back
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

from devproxy import __version__, proctree, runtime, state
from devproxy.checkpoint import pages
from devproxy.checkpoint.files import FileEntry
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer, check_image_id
from devproxy.errors import DevproxyError, Refused

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


def put(writer: Writer, parts: Parts, build: str, report: Callable[[int, int], None]) -> None:
    """Everything of the staging folder and of the build's folder into chunks. Raises StoreError or OSError."""
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
    parts.body["build"] = _put_build(writer, build)


def _device_dumps(state_file: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """(file name, [(offset, bytes)]) of each client's device dump."""
    with open(state_file, encoding="utf-8") as file:
        server = json.load(file)
    return [
        (
            f"gpu{server['gpu']}-{client['number']}.dev",
            [(r["offset"], r["bytes"]) for r in [*client["device"], *client.get("arrays", [])]],
        )
        for client in server["clients"]
    ]


def _put_build(writer: Writer, folder: str) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for name in state.build_files(folder):
        path = os.path.join(folder, name)
        info = os.stat(path)
        files[name] = {
            "chunks": writer.put_file(path, kind="build"),
            "mode": info.st_mode & 0o777,
            "mtime_ns": info.st_mtime_ns,
        }
    # The job maps these files at this place: a restore needs them there.
    return {"id": os.path.basename(folder), "path": folder, "files": files}


_FIFOS = ("stdout.fifo", "stderr.fifo", "tty.out")


def check(body: dict[str, Any], image_id: str) -> None:
    """Everything in a manifest that becomes part of a path. It is signed; but a key may have signed nonsense, and a
    signed manifest may have been put under another image's name. Raises DevproxyError."""
    try:
        problem = _problem(body, image_id)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"a field is missing or none of ours ({type(error).__name__}: {error})"
    except Refused as error:
        problem = error.what
    if problem:
        raise DevproxyError(
            f"the manifest of image {image_id} cannot be used: {problem}",
            "restore another image: devproxy images",
        )


def _problem(body: dict[str, Any], image_id: str) -> str:
    if body["image"] != image_id:
        return f"it is that of image {body['image']}"
    spec, build = body["spec"], body["build"]
    runtime.check_job_name(body["job"])
    check_image_id(body["job_id"])
    if spec["job_id"] != body["job_id"] or spec["build"] != build["id"]:
        return "it contradicts itself"
    check_image_id(build["id"])
    path = build.get("path") or state.build_path(build["id"])
    if not _absolute(path) or path.split("/")[-2:] != ["builds", build["id"]]:
        return f"{path!r} is no place for a build"
    flat = [*body["shared"], *body["device"], *(file["name"] for file in body["host"])]
    for name in flat:
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            return f"{name!r} is not a file name"
    for name in build["files"]:
        if _absolute(name) or os.path.normpath(name) != name or name.split("/")[0] in ("..", "."):
            return f"{name!r} is not a file of a build"
    for entry in body["files"]:
        if entry["kind"] != "mark" and not _absolute(entry["path"]):
            return f"{entry['path']!r} is not an absolute path"
    for mode in body["stdio"]["modes"]:
        if mode.partition(":")[0] not in ("null", "tty", "fd", "path", "fifo") or (
            mode.startswith("fifo:") and mode[5:] not in _FIFOS
        ):
            return f"{mode!r} is no stream"
    return ""


def _absolute(path: str) -> bool:
    return os.path.isabs(path) and os.path.normpath(path) == path and "\0" not in path


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


class Fetch:
    """The staging folder again, as it was at the cut, in two halves: servers can start while the host's is on its way.

    Every chunk is checked. Both raise StoreError and OSError.
    """

    def __init__(
        self, store: Store, body: dict[str, Any], staging: str, report: Callable[[int, int], None]
    ) -> None:
        self._store, self._body, self._staging, self._report = store, body, staging, report
        self._total = sum(int(body["sizes"][kind]) for kind in ("device", "shared", "host"))
        self._done = 0

    def device(self) -> None:
        """What servers need: their state, device memory, what they share with the job."""
        body = self._body
        files = [(name, entry["chunks"]) for name, entry in body["shared"].items()]
        for name, buffers in body["device"].items():
            files.append((name, [ref for buffer in buffers for ref in buffer["chunks"]]))
        self._get(files)

    def host(self) -> None:
        """What CRIU needs."""
        host = self._body["host"]
        self._get([(os.path.join("criu", file["name"]), file["chunks"]) for file in host])

    def _get(self, files: list[tuple[str, list[Any]]]) -> None:
        wanted = []
        for name, refs in files:
            to = os.path.join(self._staging, name)
            os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
            wanted.append((refs, to, f"image {self._body['image']}: {name}"))
        self._store.fetch_files(wanted, progress=self._note)

    def _note(self, size: int) -> None:
        self._done += size
        self._report(self._done, self._total)
