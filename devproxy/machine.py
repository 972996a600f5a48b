# SPDX-License-Identifier: Apache-2.0
"""What this machine has: memory, shared memory, an NVIDIA device. Reads files only; starts nothing."""

from __future__ import annotations

import os
import resource
import time

from devproxy.errors import Refused

MIB = 1 << 20
GIB = 1 << 30
MOST_GPUS = 64  # of a job; and software GPUs are numbered below it
DEFAULT_GPU_MEMORY_BYTES = 4 * GIB
LEAST_GPU_MEMORY_BYTES = 64 * MIB
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4GiB", "4G" (powers of 1024, as GPU memory is counted) or a plain number.

    Raises Refused for anything else, and for zero.
    """
    body = text.strip().upper()
    digits = body.rstrip("KMGTIB ")
    unit = body[len(digits) :].strip()
    if unit.endswith("IB"):
        unit = unit[:-2] or "?"
    elif unit.endswith("B") and len(unit) > 1:
        unit = unit[:-1]
    try:
        value = float(digits) * UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < 1 << 50:
        raise Refused(f"{text!r} is not a memory size", "write it like 512MiB or 4GiB")
    return int(value)


def show_time(at: float) -> str:
    """Of seconds since 1970, in the zone of the machine; "" for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""


def parse_duration_ms(text: str) -> int:
    """Milliseconds of "500ms", "2s", "10m", "1h" or "0". Raises Refused."""
    body = text.strip().lower()
    for suffix, factor in (("ms", 1.0), ("s", 1e3), ("m", 60e3), ("h", 3600e3), ("", 1.0)):
        if body.endswith(suffix):
            try:
                value = float(body[: len(body) - len(suffix)]) * factor
            except ValueError:
                continue
            if 0 <= value < 86_400_000 and (suffix or value == 0):
                return int(value)
    raise Refused(f"{text!r} is not a time", "write it like 500ms, 2s or 10m")


def check_descriptors(gpus: int) -> None:
    """Raises Refused where a supervisor of so many GPUs would run out of them, in the middle of something."""
    least = 64 + 4 * gpus  # measured: a supervisor has 30 of its own, and a verb takes as many
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < least:
        raise Refused(
            f"a process may have {now} open files here, and {least} are needed",
            f"raise the limit: ulimit -n {max(1024, least)}",
        )


def working_folder() -> str:
    """Raises Refused where somebody has removed it."""
    try:
        return os.getcwd()
    except OSError as error:
        raise Refused(
            f"the working folder cannot be used: {error.strerror}", "go to one that is there: cd"
        ) from None


def show_bytes(count: int) -> str:
    """ "1.5 GiB": for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def available_memory_bytes(root: str = "/") -> int:
    """Memory that new processes can use: MemAvailable, or less where a cgroup limits us. 0 when unknown."""
    available = 0
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read(os.path.join(root, "sys/fs/cgroup/memory.max")).strip()
    used = _read(os.path.join(root, "sys/fs/cgroup/memory.current")).strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def gpu_memory_bytes(wanted: int | None, gpus: int, available: int) -> int:
    """Memory of one software GPU. wanted None: 4 GiB, or an equal share of half of what is available.

    Raises Refused when the machine has not got that much.
    """
    if wanted is not None:
        if wanted < LEAST_GPU_MEMORY_BYTES:
            raise Refused(
                f"--gpu-memory {show_bytes(wanted)} is too small for a GPU",
                f"ask for {show_bytes(LEAST_GPU_MEMORY_BYTES)} or more",
            )
        if available and wanted * gpus > available:
            raise Refused(
                f"{gpus} GPU(s) of {show_bytes(wanted)} need more memory than the {show_bytes(available)} available",
                "give a smaller --gpu-memory or fewer --gpus",
            )
        return wanted
    share = available // 2 // gpus if available else DEFAULT_GPU_MEMORY_BYTES
    share = share // (64 * MIB) * (64 * MIB)
    if share < LEAST_GPU_MEMORY_BYTES:
        raise Refused(
            f"no memory for {gpus} software GPU(s): only {show_bytes(available)} available",
            "free some memory, or ask for fewer --gpus",
        )
    return min(DEFAULT_GPU_MEMORY_BYTES, share)


def check_shm(path: str, needed_bytes: int) -> None:
    """Raises Refused unless the folder is there and has room for the job's segments."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise Refused(
            f"{path} cannot be used: {error.strerror}",
            f"mount it: mount -t tmpfs -o size=1g tmpfs {path}",
        ) from None
    free = stat.f_bavail * stat.f_frsize
    if free < needed_bytes:
        raise Refused(
            f"{path} is too small: {show_bytes(free)} free, this job needs {show_bytes(needed_bytes)}",
            f"mount -o remount,size=1g {path} (docker: --shm-size=1g)",
        )


def find_nvidia(root: str = "/") -> str | None:
    """Where an NVIDIA device is seen, if one is: a device node, the kernel driver's list, or a display-class PCI function of vendor 0x10de."""
    if os.path.exists(os.path.join(root, "dev/nvidia0")):
        return "/dev/nvidia0"
    gpus = os.path.join(root, "proc/driver/nvidia/gpus")
    if os.path.isdir(gpus) and os.listdir(gpus):
        return "/proc/driver/nvidia/gpus"
    bus = os.path.join(root, "sys/bus/pci/devices")
    try:
        functions = sorted(os.listdir(bus))
    except OSError:
        return None
    for function in functions:
        if _read(os.path.join(bus, function, "vendor")).strip() == "0x10de" and _read(
            os.path.join(bus, function, "class")
        ).startswith("0x03"):
            return f"PCI device {function}"
    return None


# Where distributions and container runtimes put the driver's library; the server looks in the same places
# (hal/cuda/driver_table.cc, compared by tests/unit/test_preflight.py).
CUDA_DRIVER_PLACES = (
    f"/usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
    "/usr/lib/libcuda.so.1",
)


def find_cuda_driver(named: str, root: str = "/") -> str | None:
    """Path of the driver's library: the named one, else the first of the usual places; None where it is not there."""
    for place in (named,) if named else CUDA_DRIVER_PLACES:
        if os.path.isabs(place) and os.path.exists(os.path.join(root, place.lstrip("/"))):
            return place
    return None
