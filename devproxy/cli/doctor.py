# SPDX-License-Identifier: Apache-2.0
"""devproxy doctor: looks at the machine, changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from typing import NamedTuple

from devproxy import config, layout, machine, procfs, runtime
from devproxy.checkpoint import criu
from devproxy.errors import Refused
from devproxy.hal import nvml
from devproxy.proxy import preflight, server_set

CAP_SYS_ADMIN = 21
CAP_CHECKPOINT_RESTORE = 40


class Finding(NamedTuple):
    """One line of the report. needed False: later, or only for some uses."""

    what: str
    ok: bool
    needed: bool
    found: str
    remedy: str = ""

    def mark(self) -> str:
        return "ok" if self.ok else ("missing" if self.needed else "later")


def examine(python: str) -> list[Finding]:
    """Every finding, the needed ones first where that reads well. python: whose torch to look at."""
    findings = [_python()]
    if config.is_installed():
        findings.append(_tool("g++", "builds the torch plugin", "apt-get install g++", False))
    else:
        findings += [
            _tool("g++", "builds the server and the client", "apt-get install g++"),
            _tool("cmake", "builds the server and the client", "apt-get install cmake"),
            _tool("ninja", "builds the server and the client", "apt-get install ninja-build"),
        ]
    findings += [_shm(), _runtime_folder(), _memory(), _huge_pages()]
    findings += [_outputs(), *_torch(python)]
    findings += [*_nvidia(), _criu(), namespaces()]
    return findings


def _python() -> Finding:
    version = platform.python_version()
    return Finding(
        "Python 3.10 or later",
        sys.version_info >= (3, 10),
        True,
        version,
        "apt-get install python3",
    )


def _tool(name: str, purpose: str, remedy: str, needed: bool = True) -> Finding:
    path = shutil.which(name)
    found = f"{path} {_first_line([path, '--version'])}" if path else "not found"
    return Finding(f"{name} ({purpose})", path is not None, needed, found, remedy)


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0].strip() if lines else ""


def _shm() -> Finding:
    path = config.shm_dir()
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Finding(path, False, True, str(error.strerror), f"mount -t tmpfs tmpfs {path}")
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return Finding(
        f"{path}, {machine.show_bytes(layout.SEGMENT_BYTES)} per process and GPU",
        free >= layout.SEGMENT_BYTES,
        True,
        f"{machine.show_bytes(size)}, {machine.show_bytes(free)} free",
        f"mount -o remount,size=1g {path} (docker: --shm-size=1g)",
    )


def _runtime_folder() -> Finding:
    path = runtime.root_path()
    try:
        jobs = runtime.list_jobs()
    except Refused as error:
        return Finding(f"{path} is ours", False, True, error.what, error.remedy)
    dead = sum(not alive for _, _, alive in jobs)
    found = f"{len(jobs) - dead} job(s)" + (
        f", {dead} dead (the next start removes them)" if dead else ""
    )
    return Finding(f"{path} is ours", True, True, found)


def _memory() -> Finding:
    available = machine.available_memory_bytes()
    return Finding(
        "memory for a software GPU and its job",
        available >= machine.GIB,
        True,
        f"{machine.show_bytes(available)} available",
        "end something, or ask for a smaller --gpu-memory",
    )


def _huge_pages() -> Finding:
    mode = _setting("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return Finding(
        "huge pages for the software GPU's memory",
        mode in ("advise", "always", "within_size"),
        False,
        f"shmem_enabled is {mode or 'unknown'}",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (speed only)",
    )


def _setting(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return ""
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text.strip()


def _outputs() -> Finding:
    lib = config.lib_dir()
    try:
        preflight.check_outputs(lib, config.server_path())
        abi = server_set.check_same_abi(
            config.server_path(), os.path.join(lib, preflight.DRIVER_SHIM)
        )
    except Refused as error:
        return Finding("client and server are built", False, True, error.what, error.remedy)
    return Finding("client and server are built", True, True, f"{lib}, ABI {abi[:16]}")


def _torch(python: str) -> list[Finding]:
    folder = preflight.find_torch(python)
    if folder is None:
        return [
            Finding(
                "torch (only for torch jobs)",
                False,
                False,
                f"not in {python}",
                f"{python} -m pip install torch",
            )
        ]
    version = preflight.torch_version(folder)
    findings = [Finding("torch (only for torch jobs)", True, False, f"{version} in {folder}")]
    what = f"plugin for torch {version}"
    try:
        warning = preflight.check_torch(python, ["python"], config.plugin_dir())
    except Refused as error:
        return [*findings, Finding(what, False, True, error.what, error.remedy)]
    except OSError as error:
        return [*findings, Finding(what, False, True, str(error), "make build")]
    remedy = f"devproxy build-torch --python {python}"
    return [
        *findings,
        Finding(what, not warning, False, "not built" if warning else "built", remedy),
    ]


def _nvidia() -> list[Finding]:
    device = machine.find_nvidia(config.sysroot())
    if device is None:
        none = "none: jobs run on the software GPU (--device soft), or are only recorded (--device record)"
        return [Finding("NVIDIA device", True, False, none)]
    experimental = Finding(
        "NVIDIA device",
        False,
        False,
        f"{device}: --device cuda is experimental, seen on H100 and H200 for minutes (docs/gpu-results.md)",
        "use --device soft",
    )
    return [
        experimental,
        *_health(machine.find_cuda_driver(config.cuda_driver(), config.sysroot())),
    ]


def _health(driver: str | None) -> list[Finding]:
    """One line for each GPU, and one for how they are connected."""
    what = "health of the GPUs"
    try:
        found = nvml.read(driver or "")
    except Refused as error:
        return [Finding(what, False, False, error.what, error.remedy)]
    findings = []
    for gpu in found.gpus:
        facts = [gpu.name or "GPU", gpu.bus, f"{gpu.temperature_c} C" if gpu.temperature_c else ""]
        if gpu.memory_bytes is not None and gpu.memory_used_bytes is not None:
            used, total = gpu.memory_used_bytes, gpu.memory_bytes
            facts.append(f"{machine.show_bytes(used)} of {machine.show_bytes(total)} used")
        ill = nvml.problems(gpu)
        findings.append(
            Finding(
                f"GPU {gpu.index}", not ill, False, ", ".join(filter(None, facts)), "; ".join(ill)
            )
        )
    if found.levels or found.links:
        pairs = [f"{i}-{j} {word}" for (i, j), word in found.levels.items()]
        pairs += [f"{i}-{j} {count} NVLinks" for (i, j), count in found.links.items()]
        findings.append(Finding("paths between the GPUs", True, False, ", ".join(pairs)))
    return findings


def _criu() -> Finding:
    what = f"CRIU {'.'.join(map(str, criu.OLDEST))} or later (for checkpoints)"
    try:
        found = criu.find()
    except Refused as error:
        return Finding(what, False, False, error.what, error.remedy)
    text = f"{'.'.join(map(str, found.version))} in {found.program}"
    complaint = found.check()
    if complaint:
        return Finding(
            what, False, False, f"{text}; criu check: {complaint}",
            "run as root, on a kernel that has what it misses (CONFIG_CHECKPOINT_RESTORE)",
        )  # fmt: skip
    return Finding(what, True, False, text)


def namespaces() -> Finding:
    """May we make the namespaces that a job is stored in? The capability alone does not say: a container may forbid."""
    me = procfs.status("self")
    admin = me is not None and me.has_capability(CAP_SYS_ADMIN)
    restore = me is not None and me.has_capability(CAP_CHECKPOINT_RESTORE)
    found = f"CAP_SYS_ADMIN {'yes' if admin else 'no'}, CAP_CHECKPOINT_RESTORE {'yes' if restore else 'no'}"
    possible = admin and _can_unshare()
    if admin:
        found += f", namespaces {'can be made' if possible else 'are forbidden'}"
    return Finding(
        "privileges for namespaces and CRIU (for checkpoints)",
        possible and restore,
        False,
        found,
        "allow unshare and mount in this container (docker: --privileged)"
        if admin
        else "run as root, or give it: setpriv --ambient-caps +sys_admin,+checkpoint_restore",
    )


def _can_unshare() -> bool:
    command = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
