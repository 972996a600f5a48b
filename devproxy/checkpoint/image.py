# SPDX-License-Identifier: Apache-2.0
"""One image: what of a job's trees goes into the store, and back.

Each tree has a staging folder:

staging/                      written while the job stood still
  gpuK.state.json             handles, mirrors, replay log, positions of every client of that server
  gpuK.images                 module images that replay logs name, each once
  gpuK-N.dev                  client N's live device buffers and arrays, back to back
  blocks.index  gpuK-N.refs   which bytes of it lie in another one (staged.py)
  gpuK.shared.json  gpuK-N.{seg,pin}
  criu/                       CRIU's images of the process tree
  files/                      copies of the files that the job wrote
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devproxy import __version__, procfs, proctree, runtime, state
from devproxy.checkpoint import pages, staged
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.manifest import check_image_id
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.errors import DevproxyError, Refused

# What refers to bytes in this folder is of no use outside: chunks of equal bytes are one chunk anyway.
NOT_STORED = (".log", staged.INDEX, staged.REFS_SUFFIX)


@dataclass(frozen=True)
class TreePart:
    """What was taken of one tree while it stood still."""

    staging: str
    host: str  # where it ran
    gpus: list[int]  # [k]: the machine's GPU behind the tree's GPU k
    files: list[FileEntry]
    stdio: dict[str, Any]
    facts: dict[str, Any]
    criu: dict[str, Any]  # which connections there were


@dataclass(frozen=True)
class TreeImage:
    """One tree in an image. The lists of chunks are as the store wants them: [[hash, bytes], ...]."""

    image_id: str
    host: str
    gpus: list[int]
    stdio: dict[str, Any]
    facts: dict[str, Any]
    criu: dict[str, Any]
    files: list[FileEntry]
    device: dict[str, list[dict[str, Any]]]  # file in the staging folder: its buffers
    shared: dict[str, dict[str, Any]]  # file in the staging folder: its chunks
    processes: list[dict[str, Any]]  # CRIU's images: name, chunks


@dataclass(frozen=True)
class Image:
    """A manifest that was read, checked and understood."""

    id: str
    job: str
    job_id: str
    created: float  # seconds since 1970
    spec: dict[str, Any]
    build: dict[str, Any]
    sizes: dict[str, Any]  # bytes by kind
    trees: list[TreeImage]

    @property
    def gpus(self) -> int:
        return sum(len(tree.gpus) for tree in self.trees)

    @property
    def staged_bytes(self) -> int:
        """At most: pages of zeros take no room."""
        return sum(int(self.sizes[kind]) for kind in ("device", "shared", "host"))


def load(store: Store, image_id: str) -> Image:
    """Reads the manifest once, for all that follows. Raises ImageError, StoreError, and DevproxyError for nonsense."""
    return understand(store.read_manifest(image_id), image_id)


def understand(body: dict[str, Any], image_id: str) -> Image:
    """The typed form of a manifest's body, of format 1 or 2.

    It is signed; but a key may have signed nonsense, and a signed manifest may have been put under another image's name:
    everything in it that becomes part of a path is checked. Raises DevproxyError.
    """
    try:
        trees = [_tree(entry, image_id) for entry in _trees(body)]
        problem = _problem(body, image_id) or next(filter(None, map(_tree_problem, trees)), "")
        if not problem:
            return Image(
                id=image_id,
                job=body["job"],
                job_id=body["job_id"],
                created=body["created"],
                spec=body["spec"],
                build=body["build"],
                sizes=body["sizes"],
                trees=trees,
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"a field is missing or none of ours ({type(error).__name__}: {error})"
    except Refused as error:
        problem = error.what
    raise DevproxyError(
        f"the manifest of image {image_id} cannot be used: {problem}",
        "restore another image: devproxy images",
    )


def _trees(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Format 1 knew one tree and kept its fields in the body; CRIU's images were called `host`."""
    if "trees" in body:
        entries: list[dict[str, Any]] = body["trees"]
        if not entries:
            raise ValueError("no tree")
        return entries
    names = ("stdio", "facts", "criu", "files", "device", "shared")
    tree = {name: body[name] for name in names}
    return [tree | {"host": "", "gpus": body["spec"]["gpus"], "processes": body["host"]}]


def _tree(entry: dict[str, Any], image_id: str) -> TreeImage:
    return TreeImage(
        image_id=image_id,
        host=str(entry["host"]),
        gpus=[int(gpu) for gpu in entry["gpus"]],
        stdio=entry["stdio"],
        facts=entry["facts"],
        criu=entry["criu"],
        files=[
            FileEntry.from_dict({"refs" if k == "chunks" else k: v for k, v in file.items()})
            for file in entry["files"]
        ],
        device=entry["device"],
        shared=entry["shared"],
        processes=entry["processes"],
    )


def resident_bytes(root: int) -> int:
    """Bytes of anonymous memory in the tree below that process: about what CRIU will write."""
    total = 0
    for pid in [root, *proctree.descendants(root)]:
        if status := procfs.status(pid):
            total += status.anonymous_bytes
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


def put_tree(writer: Writer, part: TreePart, report: Callable[[int, int], None]) -> dict[str, Any]:
    """The staging folder into chunks. Returns the tree's entry in the manifest. Raises StoreError or OSError."""
    total = staged_bytes(part.staging)
    done = 0

    def note(size: int) -> None:
        nonlocal done
        done += size
        report(min(done, total), total)

    device: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name in sorted(os.listdir(part.staging)):
        path = os.path.join(part.staging, name)
        if not os.path.isfile(path) or name.endswith(NOT_STORED):
            continue
        if name.endswith(".dev"):
            continue
        shared[name] = {"chunks": writer.put_file(path, kind="shared")}
        note(os.path.getsize(path))
        if name.endswith(".state.json"):
            for dump, ranges in _device_dumps(path):
                file = os.path.join(part.staging, dump)
                device[dump] = [r.as_json() for r in writer.put_ranges(file, ranges, kind="device")]
                note(os.path.getsize(file))
    criu_dir = os.path.join(part.staging, "criu")
    processes = pages.put_pages(writer, criu_dir)
    note(staged_bytes(criu_dir))
    for entry in part.files:
        if entry.staged:
            entry.refs = writer.put_file(entry.staged, kind="file")
            note(os.path.getsize(entry.staged))
    return {
        "host": part.host,
        "gpus": part.gpus,
        "stdio": part.stdio,
        "facts": part.facts,
        "criu": part.criu,
        "files": [_named_chunks(entry.to_dict()) for entry in part.files],
        "device": device,
        "shared": shared,
        "processes": processes,
    }


def put_share(writer: Writer, staging: str, number: int, of: int) -> None:
    """Ahead of put_tree, where an image has several trees: of the device memory, this tree's share (Writer.put_share)."""
    for name in sorted(os.listdir(staging)):
        if name.endswith(".state.json"):
            for dump, ranges in _device_dumps(os.path.join(staging, name)):
                writer.put_share(os.path.join(staging, dump), ranges, number, of)


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


def put_build(writer: Writer, folder: str) -> dict[str, Any]:
    """The build's files: a restore needs them where the job has mapped them. Raises StoreError or OSError."""
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
    for name in build["files"]:
        if _absolute(name) or os.path.normpath(name) != name or name.split("/")[0] in ("..", "."):
            return f"{name!r} is not a file of a build"
    return ""


def _tree_problem(tree: TreeImage) -> str:
    for name in [*tree.shared, *tree.device, *(file["name"] for file in tree.processes)]:
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            return f"{name!r} is not a file name"
    for entry in tree.files:
        if entry.kind != "mark" and not _absolute(entry.path):
            return f"{entry.path!r} is not an absolute path"
    for mode in tree.stdio["modes"]:
        if mode.partition(":")[0] not in ("null", "tty", "fd", "path", "fifo") or (
            mode.startswith("fifo:") and mode[5:] not in _FIFOS
        ):
            return f"{mode!r} is no stream"
    return ""


def _absolute(path: str) -> bool:
    return os.path.isabs(path) and os.path.normpath(path) == path and "\0" not in path


def manifest(
    trees: list[dict[str, Any]],
    build: dict[str, Any],
    *,
    spec: dict[str, Any],
    epoch: int,
    sequence: int,
    costs: dict[str, Any],
    warnings: list[str],
) -> dict[str, Any]:
    """The manifest's body, but what the store adds itself (format, image, sizes)."""
    return {
        "job": spec["job"],
        "job_id": spec["job_id"],
        "epoch": epoch,
        "sequence": sequence,
        "devproxy": __version__,
        "spec": spec,
        "build": build,
        "trees": trees,
        "costs": costs,
        "warnings": warnings,
    }


def _named_chunks(entry: dict[str, Any]) -> dict[str, Any]:
    """The store finds chunks, for gc and verify, under this name."""
    if "refs" in entry:
        entry["chunks"] = entry.pop("refs")
    return entry


class Fetch:
    """A tree's staging folder again, as it was at the cut, in two halves: servers can start while CRIU's is on its way.

    Every chunk is checked. Both raise StoreError and OSError.
    """

    def __init__(
        self,
        store: Store,
        tree: TreeImage,
        staging: str,
        total_bytes: int,
        report: Callable[[int, int], None],
    ) -> None:
        self._store, self._tree, self._staging, self._report = store, tree, staging, report
        self._total = total_bytes
        self._done = 0

    def device(self) -> None:
        """What servers need: their state, device memory, what they share with the job."""
        files = [(name, entry["chunks"]) for name, entry in self._tree.shared.items()]
        for name, buffers in self._tree.device.items():
            files.append((name, [ref for buffer in buffers for ref in buffer["chunks"]]))
        self._get(files)

    def processes(self) -> None:
        """What CRIU needs."""
        images = self._tree.processes
        self._get([(os.path.join("criu", file["name"]), file["chunks"]) for file in images])

    def _get(self, files: list[tuple[str, list[Any]]]) -> None:
        wanted = []
        for name, refs in files:
            to = os.path.join(self._staging, name)
            os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
            wanted.append((refs, to, f"image {self._tree.image_id}: {name}"))
        self._store.fetch_files(wanted, progress=self._note)

    def _note(self, size: int) -> None:
        self._done += size
        self._report(self._done, self._total)
