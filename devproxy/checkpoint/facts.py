# SPDX-License-Identifier: Apache-2.0
"""Facts of the host and of the job for an image's manifest, and what they forbid at restore.

A process comes back with the code it had: addresses inside of libraries, functions that were chosen by the CPU's abilities
when it started (glibc's ifuncs, oneDNN's and ATen's kernels). So a restore needs the same files and at least the same
instructions; otherwise it would crash later, far from the cause.

Read while the job runs, from /proc and files; nothing is imported, nothing of the job is loaded.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import devproxy
from devproxy import procfs, proctree
from devproxy.checkpoint import netdiag
from devproxy.checkpoint.criu_image import NamedFile
from devproxy.errors import Refused
from devproxy.proxy import elf

# Variables that decide how many threads a library uses, and with them the order of sums.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_PROC_BIND",
    "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
# What glibc, ATen, oneDNN, MKL, NumPy and OpenSSL choose code by, as /proc/cpuinfo spells it; on ARM it lists "Features".
_ISA = re.compile(
    r"(sse|ssse3|avx|amx|fma|f16c|bmi|popcnt|movbe|aes|vaes|sha|gfni|pclmul|vpclmul|adx|rdrand|rdseed|erms|fsrm|xsave|"
    r"cx16|abm|rtm|pku|ospke|fsgsbase|sve|asimd|sme$|sme\d|neon|crc32|atomics|fphp|bf16|i8mm|lrcpc|dcpop)"
)
_NOT_FILES = ("/dev/", "/memfd:", "/SYSV", "/proc/", "/sys/", "/secretmem", "/anon_hugepage", "/[")
_OPENED_BY_NAME = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO)
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3
_NOTE_BYTES_MAX = 64 << 10

_build_ids: dict[tuple[int, int, int, int], str] = {}


@dataclass(frozen=True)
class Finding:
    """One difference between the image's host or files and those here. refuse: a restore would not be safe."""

    what: str
    why: str
    remedy: str
    refuse: bool

    @property
    def text(self) -> str:
        """One line for the user."""
        line = f"{self.what}: {self.why}"
        return f"{line}; {self.remedy}" if self.remedy else line


def collect(root_pid: int, build_dir: str, *, job_dir: str = "") -> dict[str, Any]:
    """Everything for the manifest; JSON. root_pid: first process of the job's tree, as we see it.

    build_dir: the copy of devproxy's files that the job runs from; images carry it, so its files are marked and not compared.
    """
    host = host_facts()
    processes, files = [], _Files(build_dir, job_dir)
    for pid in [root_pid, *proctree.descendants(root_pid)]:
        facts = _process_facts(pid, files)
        if facts is not None:
            processes.append(facts)
    return host | {
        "devproxy": devproxy.__version__,
        "abi": client_abi(build_dir),
        "processes": processes,
        "mounts": _mounts(root_pid, job_dir),
        "own_clock": _has_own_clock(root_pid),
        "files": sorted(files.found.values(), key=lambda f: str(f["path"])),
        "open": _open_files(root_pid),
    }


def _has_own_clock(root_pid: int) -> bool:
    """A time namespace: its monotonic clocks go on after a restore where they were at the dump."""
    try:
        return os.readlink(f"/proc/{root_pid}/ns/time") != os.readlink("/proc/self/ns/time")
    except OSError:
        return False  # a kernel without them, or the process is gone


def host_facts() -> dict[str, Any]:
    """The machine and the user, as they are now."""
    name = os.uname()
    model, flags = _cpu()
    return {
        "kernel": name.release,
        "machine": name.machine,
        "hostname": name.nodename,
        "boot_id": procfs.boot_id(),
        "distribution": _distribution(),
        "cpu": {"model": model, "flags": flags, "count": len(os.sched_getaffinity(0))},
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        # Nothing on the software GPU: the job's process has no driver of NVIDIA's, only the servers may have one.
        "driver": _line("/proc/driver/nvidia/version") or None,
        "user": {"uid": os.getuid(), "name": _user_name(os.getuid())},
    }


def client_abi(build_dir: str) -> str:
    """The ABI id of the client library in that build, in hex; "" where there is none."""
    for path in (f"{build_dir}/lib/libcuda.so.1", f"{build_dir}/libcuda.so.1"):
        if os.path.exists(path):
            try:
                return (elf.exported_bytes(path, "devproxy_abi_id", 32) or b"").hex()
            except Refused:
                return ""
    return ""


def check_restore(
    image: dict[str, Any],
    *,
    now: dict[str, Any] | None = None,
    root: str = "/",
    put_back: Collection[str] = (),
) -> list[Finding]:
    """What speaks against restoring an image with the facts `image` here. now: host_facts() unless given.

    Files that the image carries (devproxy's build) or that the job itself wrote (mapped shared and writable, or among
    the paths put_back) are not compared: they are put back before.
    """
    here = host_facts() if now is None else now
    found: list[Finding] = []
    _check_user(image, here, found)
    _check_cpu(image, here, found)
    if image["page_bytes"] != here["page_bytes"]:
        what = f"pages of {here['page_bytes']} bytes here, {image['page_bytes']} in the image"
        found.append(Finding(what, "memory cannot be mapped as it was", "use another host", True))
    moved = image.get("boot_id") and here.get("boot_id") and image["boot_id"] != here["boot_id"]
    if moved and not image.get("own_clock"):
        what = "the machine was started anew, or it is another one"
        found.append(Finding(what, "time.monotonic() will jump in the job", "", False))
    _check_driver(image, here, found)
    _check_files(image, root, put_back, found)
    return found


def gpu_of(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The fact about one GPU that an image keeps, from its server's answer to can_dump. Servers of older builds, which
    restored jobs run on, say less: then the image says less too."""
    gpu: dict[str, Any] | None = answer.get("gpu")
    counts = [client.get("machine_code") for client in answer["clients"]]
    if gpu and None not in counts:
        return gpu | {"machine_code": sum(counts)}
    return gpu


def check_open_files(
    image: dict[str, Any],
    files: Iterable[NamedFile],
    put_back: Collection[str] = (),
    bound: Iterable[str] = (),
) -> list[Finding]:
    """What CRIU will say of files that the job had open and that no restore puts back. It compares them when the job's other
    files are put back already. files: of CRIU's images; put_back: paths, and folders whose contents come back; bound: names of
    the job's unix sockets.

    Where one name means two files in the job (in mounts of its own), nothing is said.
    """
    there: dict[str, int | None] = dict(image.get("open", []))
    wanted: dict[str, set[NamedFile]] = {}

    def comes_back(path: str) -> bool:
        above = (path, *map(str, PurePath(path).parents))
        return path not in there or any(one in put_back for one in above)

    for file in files:
        if not comes_back(file.path):
            wanted.setdefault(file.path, set()).add(file)
    found = [
        finding
        for path, same in wanted.items()
        if len(same) == 1 and (finding := _check_open_file(same.pop(), there[path], put_back))
    ]
    folders = {os.path.dirname(name): name for name in bound}
    for path, name in folders.items():
        if not comes_back(path) and not os.path.isdir(path) and not _is_made(path, put_back):
            what, why = f"{path} is gone", f"the job has its socket {os.path.basename(name)} there"
            found.append(Finding(what, why, "make the folder again", True))
    return found


def _is_made(folder: str, put_back: Collection[str]) -> bool:
    """Does something come back below it, and the folder with that?"""
    return any(path.startswith(f"{folder}/") for path in put_back)


def _check_open_file(
    file: NamedFile, written_ns: int | None, put_back: Collection[str]
) -> Finding | None:
    is_folder = file.mode is not None and stat.S_ISDIR(file.mode)
    if is_folder and not os.path.lexists(file.path) and _is_made(file.path, put_back):
        return None
    why = "the job works in it, or has it open" if is_folder else "the job has it open"
    remedy = "put it back as it was"
    info = _stat(file.path, file.path, why)
    if isinstance(info, Finding):
        return info
    if file.mode is not None and info.st_mode != file.mode:
        what = f"{file.path} has mode {info.st_mode:o}, {file.mode:o} in the image"
        return Finding(what, why, remedy, True)
    if file.bytes is not None and stat.S_ISREG(info.st_mode) and info.st_size != file.bytes:
        what = f"{file.path} has {info.st_size} bytes, {file.bytes} in the image"
        return Finding(what, why, remedy, True)
    if written_ns is not None and written_ns != info.st_mtime_ns:
        what = f"{file.path} has been written since"
        return Finding(what, "the job only reads it, and goes on with it as it is now", "", False)
    return None


def is_other_gpu(image: dict[str, Any], here: list[dict[str, Any]]) -> bool:
    """Is one of these GPUs of another compute capability than the image's?"""
    return any(
        was and (was["major"], was["minor"]) != (now["major"], now["minor"])
        for was, now in zip(image.get("gpus") or [], here, strict=False)
    )


def check_gpus(
    image: dict[str, Any],
    here: list[dict[str, Any]],
    other_device: tuple[str, str] | None = None,
    allow_other: bool = False,
) -> list[Finding]:
    """What speaks against restoring on these GPUs, in the order of the job's; see proxy.server_set.describe.

    other_device: (the image's kind of device, the one that was asked for), where they differ. allow_other: the user has
    said that the job may get another GPU than it was told of. Its servers would find the same after all has been fetched.
    Images of before this was kept say nothing.
    """
    found: list[Finding] = []
    for gpu, (was, now) in enumerate(zip(image.get("gpus") or [], here, strict=False)):
        if was:
            found += _check_gpu(gpu, was, now, other_device, allow_other)
    return found


def _check_gpu(
    gpu: int,
    was: dict[str, Any],
    now: dict[str, Any],
    device: tuple[str, str] | None,
    allow_other: bool,
) -> list[Finding]:
    capability = (was["major"], was["minor"])
    if not device and capability == (now["major"], now["minor"]):
        if was["name"] == now["name"]:
            return []
        what = f"GPU {gpu} is a {now['name']}, in the image it is a {was['name']}"
        return [Finding(what, "its results may differ in the last bits", "", False)]
    own = was.get("machine_code")  # absent: nobody counted
    modules = f"{'perhaps some' if own is None else own} module(s) of machine code"
    if own == 0:
        return [_other_gpu(gpu, was, now, device)]
    if allow_other:
        what = f"the job has {modules} on GPU {gpu}"
        said = Finding(what, "they may not load on this GPU", "", False)
        return [_other_gpu(gpu, was, now, device), said]
    if device:
        what = f"the job has {modules} (Triton's, or its own kernels) on GPU {gpu}, made for device '{device[0]}'"
        why = f"device '{device[1]}' cannot be expected to run them"
        return [Finding(what, why, "to try it all the same: --allow-other-gpu", True)]
    what = (
        f"the job was told that its GPU has compute capability {was['major']}.{was['minor']};"
        f" GPU {gpu} ({now['name']}) has {now['major']}.{now['minor']}, and the job has {modules}"
    )
    remedy = f"restore on a {was['name']}: --gpu; to try it all the same: --allow-other-gpu"
    return [Finding(what, "it has chosen its kernels by that", remedy, True)]


def _other_gpu(
    gpu: int, was: dict[str, Any], now: dict[str, Any], device: tuple[str, str] | None
) -> Finding:
    """The job's kernels are operators by name, so this GPU can run them: what will be otherwise."""
    kind = f", device '{device[1]}' instead of '{device[0]}'" if device else ""
    what = f"GPU {gpu} is a {now['name']}{kind}; in the image it is a {was['name']}"
    why = (
        "results differ in their last bits"
        + (", random numbers are others from here on" if device else "")
        + f", and the job goes on saying that it has a {was['name']} with {was['memory_bytes'] >> 20} MiB"
    )
    return Finding(what, why, "", False)


def _check_driver(image: dict[str, Any], here: dict[str, Any], found: list[Finding]) -> None:
    was, now = image.get("driver"), here.get("driver")
    if was and now and was != now:
        what = f"the driver is {now}, where the image was made it was {was}"
        why = "the servers load the job's modules anew with it, and its compiler may make other code of PTX"
        found.append(Finding(what, why, "", False))


def _check_user(image: dict[str, Any], here: dict[str, Any], found: list[Finding]) -> None:
    was, now = image["user"], here["user"]
    if was["uid"] != now["uid"]:
        found.append(
            Finding(
                f"the image was made by uid {was['uid']} ({was['name']}), this is uid {now['uid']} ({now['name']})",
                "processes can only be restored by the user they had",
                f"restore it as {was['name'] or was['uid']}",
                True,
            )
        )


def _check_cpu(image: dict[str, Any], here: dict[str, Any], found: list[Finding]) -> None:
    was, now = image["cpu"], here["cpu"]
    if image["machine"] != here["machine"]:
        what = f"the image is of {image['machine']}, this host is {here['machine']}"
        found.append(Finding(what, "its code cannot run here", "use another host", True))
        return
    lacking = sorted(set(was["flags"]) - set(now["flags"]))
    if lacking:
        found.append(
            Finding(
                f"this CPU ({now['model']}) lacks {' '.join(lacking)}",
                f"libraries of the job chose their code for {was['model']} when they were loaded",
                "restore on a host that has these, or start the job with ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA set",
                True,
            )
        )
    if now["count"] < was["count"]:
        threads = max((p["threads"] for p in image.get("processes", [])), default=0)
        omp = {p["environment"].get("OMP_NUM_THREADS") for p in image.get("processes", [])} - {None}
        said = f", OMP_NUM_THREADS={'/'.join(sorted(map(str, omp)))}" if omp else ""
        found.append(
            Finding(
                f"{now['count']} CPUs here, {was['count']} where the image was made",
                f"the job keeps its {threads} threads{said}: it will be slower, and what chooses its number of threads anew may"
                " sum in another order",
                "",
                False,
            )
        )


def _check_files(
    image: dict[str, Any], root: str, put_back: Collection[str], found: list[Finding]
) -> None:
    torch_of = {p["torch"]["folder"]: p["torch"] for p in image["processes"] if p.get("torch")}
    changed_torch = set()
    for folder, torch in torch_of.items():
        now = torch_version(os.path.join(root, folder.lstrip("/")))
        if now != torch["version"]:
            changed_torch.add(folder)
            what = f"torch {now or 'gone'} in {folder}, {torch['version']} in the image"
            why = "the job has the image's torch in memory and would go on with other files"
            found.append(Finding(what, why, f"install torch {torch['version']} there", True))
    for file in image["files"]:
        path = file["path"]
        if file["carried"] or file["written"] or path in put_back:
            continue
        if any(path.startswith(f"{folder}/") for folder in changed_torch):
            continue  # one line says it
        found += _check_file(file, os.path.join(root, path.lstrip("/")))


def _stat(path: str, name: str, why: str) -> os.stat_result | Finding:
    try:
        return os.stat(path)
    except OSError as error:
        gone = not os.path.lexists(path)
        what = f"{name} is gone" if gone else f"{name}: {error.strerror}"
        return Finding(what, why, "put it back as it was", True)


def _check_file(file: dict[str, Any], path: str) -> list[Finding]:
    info = _stat(path, file["path"], "the job has it mapped")
    if isinstance(info, Finding):
        return [info]
    if file["build_id"]:
        here = build_id(path, info)
        if here != file["build_id"]:
            what = f"{file['path']} has build id {here or 'none'}, {file['build_id']} in the image"
            why = "the job has code of the old one in memory"
            return [Finding(what, why, "put back the package that it belongs to", True)]
    if info.st_size != file["bytes"]:
        what = f"{file['path']} has {info.st_size} bytes, {file['bytes']} in the image"
        return [Finding(what, "the job has it mapped", "put it back as it was", True)]
    if not file["build_id"] and info.st_mtime_ns != file["mtime_ns"]:
        what = f"{file['path']} has been written since"
        return [
            Finding(what, "the job has it mapped, and it has no build id to compare", "", False)
        ]
    return []


# --- processes and their files ---


class _Files:
    """Mapped files of all processes, each once."""

    def __init__(self, build_dir: str, job_dir: str) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._carried = build_dir.rstrip("/") + "/" if build_dir else "\0"
        self._job = job_dir.rstrip("/") + "/" if job_dir else "\0"

    def add(self, root: str, path: str, written: bool) -> None:
        if known := self.found.get(path):
            known["written"] = known["written"] or written
            return
        if path.startswith(self._job):
            return
        try:
            info = os.stat(root + path)
        except OSError:
            return  # deleted, or hidden: the check of the tree speaks about it
        self.found[path] = {
            "path": path,
            "bytes": info.st_size,
            "mtime_ns": info.st_mtime_ns,
            "build_id": build_id(root + path, info),
            "carried": path.startswith(self._carried),
            "written": written,
        }


def _open_files(root_pid: int) -> list[list[Any]]:
    """[path, ns of its last change where it is a file that the job only reads] of what the job has under a name that means the
    same thing here: open files, folders and FIFOs, working folders, and folders of its unix sockets."""
    found: dict[str, int | None] = {}
    here: dict[str, os.stat_result | None] = {}
    sockets = netdiag.unix_sockets() or {}

    def known(path: str, at: str) -> os.stat_result | None:
        """What the name means here, where that is what the job has as `at`."""
        if not path.startswith("/") or path.startswith(_NOT_FILES):
            return None
        if path not in here:
            here[path] = _file_folder_or_fifo(path)
        named = here[path]
        try:
            info = os.stat(at) if named else None
        except OSError:
            return None
        same = named and info and (info.st_dev, info.st_ino) == (named.st_dev, named.st_ino)
        return info if same else None

    for pid in [root_pid, *proctree.descendants(root_pid)]:
        try:
            descriptors = procfs.descriptors(pid)
            works_in = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue  # it has ended
        folders = {works_in}
        for number, path in descriptors:
            if path.startswith("socket:["):
                one = sockets.get(int(path[8:-1]))
                if one is not None and one.name and not one.name.startswith("@"):
                    folders.add(os.path.dirname(os.path.join(works_in, one.name)))
                continue
            at = known(path, f"/proc/{pid}/fd/{number}")
            if at is None:
                continue
            info = procfs.fdinfo(pid, number) if stat.S_ISREG(at.st_mode) else None
            reads = info is not None and info.access == os.O_RDONLY
            found[path] = at.st_mtime_ns if reads and found.get(path, 0) is not None else None
        for path in folders:
            if known(path, f"/proc/{pid}/root{path}") is not None:
                found[path] = None
    return [[path, found[path]] for path in sorted(found)]


def _file_folder_or_fifo(path: str) -> os.stat_result | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info if stat.S_IFMT(info.st_mode) in _OPENED_BY_NAME else None


def _mounts(root_pid: int, job_dir: str) -> list[list[Any]]:
    """[path, is a folder] of each mount that the tree sees: CRIU asks for all of these places at a restore."""
    found: dict[str, list[Any]] = {}
    for mount in procfs.mounts(root_pid):
        # The manifest is UTF-8 throughout.
        path = os.fsencode(mount.point).decode(errors="replace")
        if path != job_dir and not path.startswith(("/proc", "/sys", "/dev/pts")):
            found[path] = [path, os.path.isdir(f"/proc/{root_pid}/root{path}")]
    return [found[path] for path in sorted(found)]


def _process_facts(pid: int, files: _Files) -> dict[str, Any] | None:
    status, mappings = procfs.status(pid), procfs.mappings(pid, b" /")
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
        executable = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None  # it ended while we looked
    if status is None:
        return None
    root = f"/proc/{pid}/root"
    paths: dict[str, bool] = {executable: False}
    for one in mappings:
        if one.path.startswith("/") and not one.path.startswith(_NOT_FILES) and not one.deleted:
            paths[one.path] = paths.get(one.path, False) or one.shared_writable
    for path, written in paths.items():
        files.add(root, path, written)
    wanted = dict(e.decode(errors="replace").split("=", 1) for e in environment if b"=" in e)
    return {
        "pid": status.inner_pid,
        "name": status.name,
        "executable": executable,
        "threads": status.threads,
        "environment": {name: wanted[name] for name in THREAD_VARIABLES if name in wanted},
        "python": _python_version(root, executable, paths),
        "torch": _torch(root, paths),
    }


def _torch(root: str, paths: dict[str, bool]) -> dict[str, str] | None:
    for path in paths:
        if path.endswith(("/torch/lib/libtorch_cpu.so", "/torch/lib/libtorch.so")):
            folder = os.path.dirname(os.path.dirname(path))
            return {"folder": folder, "version": torch_version(root + folder)}
    return None


def torch_version(folder: str) -> str:
    """ "2.13.0+cpu" out of torch/version.py; "" where it is not there."""
    try:
        with open(f"{folder}/version.py", encoding="utf-8") as file:
            found = re.search(r"^__version__ *(?::[^=]*)?= *['\"]([^'\"]+)", file.read(), re.M)
    except OSError:
        return ""
    return found.group(1) if found else ""


def _python_version(root: str, executable: str, paths: dict[str, bool]) -> str:
    """ "3.11.7" where the headers are installed beside it, else "3.11"; "" for what is no Python."""
    names = [executable, *(p for p in paths if "/libpython3" in p)]
    for path in names:
        found = re.search(r"python(3\.\d+)", os.path.basename(path))
        if not found:
            continue
        prefix = os.path.dirname(os.path.dirname(path))
        try:
            with open(f"{root}{prefix}/include/python{found.group(1)}/patchlevel.h") as file:
                exact = re.search(r'PY_VERSION\s+"([^"]+)"', file.read())
        except OSError:
            exact = None
        return exact.group(1) if exact else found.group(1)
    return ""


def build_id(path: str, info: os.stat_result) -> str:
    """The GNU build id of an ELF file in hex; "" for one without, and for every other file."""
    key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
    if (known := _build_ids.get(key)) is None:
        known = _build_ids[key] = _read_build_id(path)
    return known


def _read_build_id(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(4096)
            if head[:6] != b"\x7fELF\x02\x01":
                return ""
            start, size, count = _program_headers(head)
            table = head[start : start + size * count]
            if len(table) < size * count:
                table = os.pread(file.fileno(), size * count, start)
            for i in range(count):
                kind, _, offset, _, _, in_file = struct.unpack_from("<IIQQQQ", table, i * size)
                if kind == _PT_NOTE:
                    note = os.pread(file.fileno(), min(in_file, _NOTE_BYTES_MAX), offset)
                    if found := _find_note(note):
                        return found
    except (OSError, struct.error):
        pass
    return ""


def _program_headers(head: bytes) -> tuple[int, int, int]:
    """Offset, size of one, number (elf.h, Elf64_Ehdr)."""
    (start,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    return start, size, count


def _find_note(note: bytes) -> str:
    at = 0
    while at + 12 <= len(note):
        name_size, size, kind = struct.unpack_from("<III", note, at)
        name_at = at + 12
        data_at = name_at + ((name_size + 3) & ~3)
        if kind == _NT_GNU_BUILD_ID and note[name_at : name_at + name_size] == b"GNU\0":
            return note[data_at : data_at + size].hex()
        at = data_at + ((size + 3) & ~3)
    return ""


# --- the host ---


def _line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _distribution() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8") as file:
            found = re.search(r'^PRETTY_NAME="?([^"\n]*)', file.read(), re.M)
    except OSError:
        return ""
    return found.group(1) if found else ""


def _cpu() -> tuple[str, list[str]]:
    """Model and ISA flags of the first processor."""
    model, flags = "", []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                name = name.strip()
                if not name:
                    break  # the other processors
                if name in ("model name", "CPU implementer") and not model:
                    model = value.strip()
                elif name in ("flags", "Features"):
                    flags = sorted(flag for flag in value.split() if _ISA.match(flag))
    except OSError:
        pass
    return model, flags


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
