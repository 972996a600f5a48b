"""Everything that is to be found out on a GPU, in one command: stages from the cheapest fact to the whole job.

    python3 gpu_check.py [--out DIR] [--driver PATH] [--limit SECONDS] [--only STAGE,... | --second | --third] [--list]

Standard library only, Python 3.10 or later, no network. It lies in the bundle that scripts/gpu_bundle.py makes, or is
given one by --bundle. Each stage is a process of its own with a time limit: when one hangs or dies, its figures so far
are kept and the next one begins; none takes the time that later ones need at least. DIR ($OUT, else build/gpu-check)
gets

    gpu-check.json    `stages`: name, status (ok, failed, refused, not_run), seconds, figures, text; written after each.
                      `next`: the command for what was not run or was cut short
    gpu-check.log     what they said
    torch-ops.json    of every op of torch that was compared and is not bitwise equal: why

failed: something was wrong, or hung, or died. refused: something that the stage needs is not here, named in its text.
not_run: no time was left, or it was not asked for. Exit code 0 only if every stage that ran is ok.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import glob
import gzip
import hashlib
import importlib.util
import json
import mmap
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Beside this file, wherever that lies.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import gpu_torch_compare as compare_torch
from gpu_torch_compare import Side, Table, run_both

U32 = ctypes.c_uint32
U64 = ctypes.c_uint64
INT = ctypes.c_int
SIZE = ctypes.c_size_t
PTR = ctypes.c_void_p
MIB, GIB = 1 << 20, 1 << 30
TOTAL_LIMIT_S = 525.0  # the device tool ends a command after 600 s; its start is not counted
OK, FAILED, REFUSED, NOT_RUN = "ok", "failed", "refused", "not_run"
EXIT_OF = {OK: 0, FAILED: 1, REFUSED: 3}

# devproxy's layout of device addresses (csrc/wire/segment.h; compared by tests/integration/test_gpu_check.py).
RANGE_BASE, RANGE_BYTES, DEVICE_BYTES, SLOTS = 0x2000_0000_0000, 0x40_0000_0000, 0x30_0000_0000, 128

# Where the driver's library is; as in devproxy/machine.py.
DRIVER_PLACES = (
    f"/usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
    "/usr/lib/libcuda.so.1",
)


class Refused(Exception):
    """Something that the stage needs is not here; the text names it."""


class Failed(Exception):
    """Something is not as it must be."""


# -- the campaign: processes, limits, results -------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """limit_s: after that it is ended. least_s: with less time left it is not begun, and the stages before it leave it
    that much; but for a spare one, which gets what the others leave. call: whose time is kept for it (1, 2 or 3)."""

    name: str
    limit_s: float
    least_s: float
    run: Callable[[Setup, Report], None] | None = None
    call: int = 1
    direct: bool = False  # it calls the driver itself, not by way of programs
    needs: tuple[str, ...] = ()  # stages whose figures it reads

    @property
    def spare(self) -> bool:
        return self.call > 1


@dataclass(frozen=True)
class Way:
    """How a program is started: natively, or through the proxy."""

    prefix: list[str]
    env: dict[str, str]

    def run(self, line: Sequence[str], limit_s: float, **more: str) -> Done:
        return run([*self.prefix, *line], self.env | more, limit_s)


@dataclass(frozen=True)
class Setup:
    """What a stage knows of the machine. work: a folder for this campaign alone."""

    bundle: Path
    work: Path
    driver: str
    sysroot: str = ""  # tests: where devproxy looks for the device
    small: bool = False  # tests: megabytes and one turn, where a GPU is given gigabytes and three
    # Developers: a device of devproxy's own (record, soft) in the place of the GPU, on both sides of each comparison.
    rehearse: str = ""
    keep: Path = Path()  # what is written there comes back from the device
    ops_start: str = ""  # where the sweep of torch's ops begins
    ops: str = ""  # of the sweep only these
    spoil: str = ""  # tests: this case has other numbers on the proxied side

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.bundle / "manifest.json").read_text())
        return found

    def _env(self, libraries: Sequence[str], python: Sequence[str]) -> dict[str, str]:
        """Ours without devproxy's variables, and with these folders before those of the user."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
        # The driver opens its own parts (the PTX compiler) by name: its folder, where the loader may not know it.
        beside = os.path.dirname(self.driver) if self.driver.startswith("/usr/local") else ""
        libraries = [*libraries, env.get("LD_LIBRARY_PATH", ""), beside]
        python = [
            *python,
            str(self.bundle / "programs"),
            str(self.work / "spare"),
            env.get("PYTHONPATH", ""),
        ]
        return env | {
            "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
            "PYTHONPATH": ":".join(filter(None, python)),
            "TEST_KERNELS": str(self.kernels()),
        }

    def native(self) -> Way:
        if self.rehearse:
            return self.proxied("--plain")
        return Way([], self.native_env())

    def proxied(self, *options: str, registered: bool = False) -> Way:
        """registered: pinned memory is registered with the driver, so that kernels see it and copies go straight."""
        device = self.rehearse or "cuda"
        run = [sys.executable, "-m", "devproxy.cli.run", "--device", device, *options, "--"]
        env = self.proxied_env()
        if registered:
            env["DEVPROXY_CUDA_REGISTER_WINDOW"] = "1"
        return Way(run, env)

    def past_the_proxy(self, done: Done) -> bool:
        """Does a program's list of mapped files have the genuine driver?"""
        return not self.rehearse and os.path.realpath(self.driver) in done.out

    def native_env(self) -> dict[str, str]:
        """Where `libcuda.so.1` and `libcudart.so.13` are the genuine ones, under these very names."""
        return self._env([str(self.work / "native"), str(self.work / "compilers")], []) | {
            "TRITON_LIBCUDA_PATH": str(self.work / "native")
        }

    def proxied_env(self) -> dict[str, str]:
        """For devproxy-run and devproxy: our Python side, a runtime folder and a state folder of this campaign."""
        without_runtime = (self.work / "runtime").exists()  # the device has no C++ runtime
        libraries = [str(self.bundle / "sys")] if without_runtime else []
        libraries.append(str(self.work / "compilers"))
        told = {"DEVPROXY_TEST_NO_KERNELS": "1"} if self.rehearse == "record" else {}
        return (
            self._env(libraries, [str(self.bundle / "py"), str(self.work / "site")])
            | told
            | {
                "DEVPROXY_LIB": str(self.bundle / "lib"),
                "DEVPROXY_CUDA_DRIVER": self.driver,
                "DEVPROXY_SHM_DIR": str(self.shm()),
                "DEVPROXY_STATE_DIR": str(self.work / "state"),
                "DEVPROXY_KEY_FILE": str(self.work / "key"),
                "DEVPROXY_DAEMON_IDLE_S": "1",
                "DEVPROXY_CRIU": str(self.bundle / "criu" / "sbin" / "criu"),
                "DEVPROXY_SYSROOT": self.sysroot,
                # Triton links its launcher to the file in this folder; that it is the preloaded one, its name says.
                "TRITON_LIBCUDA_PATH": str(self.work / "shim"),
            }
        )

    def shm(self) -> Path:
        """The runtime folder. Made by the campaign, in /dev/shm."""
        return Path((self.work / "shm").read_text())

    def kernels(self, form: str = "cubin") -> Path:
        return self.bundle / "kernels" / f"kernels.{form}"


class Report:
    """The figures of one stage, on disk after each: what is known survives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures: dict[str, Any] = {}
        self.text: list[str] = []
        self.status = ""
        self.lock = threading.Lock()

    def put(self, name: str, value: Any) -> None:
        with self.lock:
            self.figures[name] = value
            self.save()
        print(f"   {name}: {json.dumps(value)[:1500]}", flush=True)

    def say(self, text: str) -> None:
        with self.lock:
            self.text.append(text)
            self.save()
        print(f"   {text}", flush=True)

    def end(self, status: str, text: str = "") -> None:
        if text:
            self.say(text)
        self.status = status
        self.save()

    def save(self) -> None:
        facts = {"status": self.status, "figures": self.figures, "text": "\n".join(self.text)}
        write_whole(self.path, json.dumps(facts))


def write_whole(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.rename(path)


def descendants(of: int) -> list[int]:
    """Our processes' processes, also those that left their session; `of` adopts them (subreaper)."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(path.name))
    found, todo = [], [of]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def hold_devices() -> list[int]:
    """Opens the device nodes, and leaves them open: without the driver's persistence mode, and with no other client, each
    of the hundreds of processes to come would wait for the GPU to be set up anew. Nothing about the GPU is changed."""
    held: list[int] = []

    def hold() -> None:
        for path in sorted(Path("/dev").glob("nvidia[0-9]*")):
            with contextlib.suppress(OSError):
                held.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    # In a thread: a GPU that is not well may not answer, and that is to be found out by a stage.
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    thread.join(10)
    return held


def become_subreaper() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


ENDING_S = 6.0  # what ending a stage that hangs may take


def end_descendants(patience_s: float = ENDING_S - 1) -> list[int]:
    """Ends everything that a stage left behind. Returns what is still there: a process inside the driver may stay."""
    deadline = time.monotonic() + patience_s
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


# For a stage that fits its work into its time: when it is ended, by the monotonic clock.
ENDS = "GPU_CHECK_ENDS"


def time_left_s() -> float:
    return float(os.environ.get(ENDS) or time.monotonic() + 60) - time.monotonic()


def run_stage(
    stage: Stage,
    command: Sequence[str],
    report: Path,
    log: Path,
    limit_s: float,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One stage in a process of its own. Whatever happens to that, there is a result."""
    begin, hung = time.monotonic(), False
    with open(log, "ab") as out:
        out.write(f"== {stage.name} (at most {limit_s:.0f} s)\n".encode())
        out.flush()
        # In the campaign's folder: `python -m` looks into its own first, and a checkout of devproxy lies where the command
        # is given, with neither what is generated nor what is compiled.
        process = subprocess.Popen(
            command,
            env=(os.environ if env is None else env) | {ENDS: str(begin + limit_s)},
            cwd=report.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung, code = True, -signal.SIGKILL
    left = end_descendants()
    process.poll()  # a process that the driver does not let go stays behind
    try:
        facts = json.loads(report.read_text())
    except (OSError, ValueError):
        facts = {"status": "", "figures": {}, "text": ""}
    texts = [facts["text"]] if facts["text"] else []
    status = facts["status"]
    if hung:
        status = FAILED
        cut = limit_s < stage.limit_s
        rest = f" (of its {stage.limit_s:.0f}: later stages need the rest)" if cut else ""
        texts.append(f"no end after {limit_s:.0f} s{rest}; killed")
    elif code < 0:
        status = FAILED
        texts.append(f"ended by signal {-code} ({signal.Signals(-code).name})")
    elif not status or code != EXIT_OF[status]:
        status = FAILED
        texts.append(f"ended with exit code {code} and no result")
    if left:
        texts.append(f"processes that could not be ended: {left}")
    return {
        "name": stage.name,
        "status": status,
        "seconds": round(time.monotonic() - begin, 2),
        "cut_short": hung and limit_s < stage.limit_s,
        "figures": facts["figures"],
        "text": "\n".join(texts),
    }


def campaign(
    stages: Sequence[Stage],
    command_of: Callable[[Stage, Path], Sequence[str]],
    out: Path,
    work: Path,
    about: dict[str, Any],
    limit_s: float = TOTAL_LIMIT_S,
    only: frozenset[str] = frozenset(),
    env_of: Callable[[Stage], dict[str, str] | None] = lambda stage: None,
) -> list[dict[str, Any]]:
    """Runs the stages in their order; the JSON is whole after each."""
    deadline = time.monotonic() + limit_s
    log, results, again, options = out / "gpu-check.log", [], [], ""
    for number, stage in enumerate(stages):
        left_s = deadline - time.monotonic()
        report = report_of(work, stage.name)
        if only and stage.name not in only:
            result = not_run(stage, "not asked for")
        elif left_s < stage.least_s:
            result = not_run(
                stage, f"{max(0, left_s):.0f} s are left, and it needs {stage.least_s:.0f}"
            )
            again.append(stage.name)
        else:
            limit = limit_of(stage, stages[number + 1 :], left_s, only)
            command = command_of(stage, report)
            result = run_stage(stage, command, report, log, limit, env_of(stage))
            figures = result["figures"]
            if result.pop("cut_short") or figures.get(GO_ON) or figures.get(NOT_REACHED):
                again.append(stage.name)
            if start := result["figures"].get(GO_ON):
                options = f" --ops-start {start}"
        results.append(result)
        about["next"] = f"python3 {sys.argv[0]} --only {','.join(again)}{options}" if again else ""
        line = (
            f"{result['status']:8} {stage.name:18} {result['seconds']:7.2f} s  "
            + (result["text"].replace("\n", " | ")[:160])
        )
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"-- {line}\n")
        print(line.rstrip(), flush=True)
        write_whole(
            out / "gpu-check.json", json.dumps(about | {"stages": results}, indent=1) + "\n"
        )
    return results


def limit_of(stage: Stage, later: Sequence[Stage], left_s: float, only: frozenset[str]) -> float:
    """The stage's own limit, or less, so that each later one has its least time. Where that cannot be, its own least."""
    kept = sum(s.least_s for s in later if s.name in only or (not only and not s.spare))
    return min(stage.limit_s, max(stage.least_s, left_s - kept - ENDING_S))


def report_of(work: Path, name: str) -> Path:
    return work / f"report-{name}.json"


def earlier(setup: Setup, name: str) -> dict[str, Any]:
    """The figures of a stage that has run in this campaign, or nothing."""
    try:
        figures: dict[str, Any] = json.loads(report_of(setup.work, name).read_text())["figures"]
    except (OSError, ValueError):
        return {}
    return figures


def not_run(stage: Stage, why: str) -> dict[str, Any]:
    return {"name": stage.name, "status": NOT_RUN, "seconds": 0.0, "figures": {}, "text": why}


# Figures of a stage that has not done all: where the next call begins; what it runs again for.
GO_ON, NOT_REACHED = "go on with", "not reached"


def run_here(stage: Stage, setup: Setup, report: Report) -> int:
    """The inside of a stage's process."""
    assert stage.run
    try:
        stage.run(setup, report)
        report.end(OK)
    except Refused as refusal:
        report.end(REFUSED, str(refusal))
    except Failed as failure:
        report.end(FAILED, str(failure))
    except BaseException as error:
        traceback.print_exc()
        report.end(FAILED, f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    # Not by way of the interpreter's end: a driver's own clean-up may hang, and the result is on disk.
    os._exit(EXIT_OF[report.status])


STAGES: list[Stage] = []

# First what decides most: whether whole training jobs run on a GPU through the torch plugin, with the native bits, at the
# native speed, and whether they can be checkpointed. Before that only what this stands on. Then what nobody can know
# without a GPU about single calls of the driver. The second and third call have the older suites.
ORDER = (
    "prepare", "machine", "driver", "a_ranges", "c_first",
    "t_first", "t_ops", "t_models", "t_cost", "t_migrate", "t_checkpoint", "t_memory", "t_graphs", "t_compile", "t_two",
    "b_layouts", "b_modules", "e_host_memory", "b_order", "b_faults", "a_vmm_cost", "a_alias", "e_dump",
    "f_criu", "f_cuda_checkpoint", "f_checkpoint", "c_training", "d_cost", "c_cudart", "c_registered", "c_programs", "c_nvml",
    "c_torch", "f_checkpoint_cudart", "c_third_party", "c_triton", "f_checkpoint_numba", "c_training_numba",
    "f_checkpoint_torch", "c_numba_tests",
)  # fmt: skip


def stage(
    limit_s: float,
    least_s: float,
    *,
    call: int = 1,
    direct: bool = False,
    needs: tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Adds the function to STAGES, whose order is ORDER."""

    def add(run: Callable[[Setup, Report], None]) -> Callable[[Setup, Report], None]:
        STAGES.append(Stage(run.__name__, limit_s, least_s, run, call, direct, needs))
        STAGES.sort(key=lambda one: ORDER.index(one.name))
        return run

    return add


# -- what stages share ------------------------------------------------------------------------------------------------


@dataclass
class Done:
    """How a program ended. code: 124 when it was killed because it did not."""

    code: int
    seconds: float
    out: str
    err: str

    def brief(self) -> str:
        lines = [line for line in (self.err or self.out).strip().splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:400]


# What a limit is multiplied by: a rehearsal's machine is slower than one with a GPU, and has other work.
patience = 1.0


def run(
    command: Sequence[str], env: dict[str, str], limit_s: float, cwd: Path | None = None
) -> Done:
    begin, limit_s = time.monotonic(), limit_s * patience
    if not shutil.which(command[0]):
        return Done(127, 0.0, "", f"{command[0]} is not here")
    process = subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            out, err = "", ""
        code, err = 124, f"{err}\nno end after {limit_s:.0f} s"
    return Done(code, round(time.monotonic() - begin, 2), out, err)


class Driver:
    """The genuine driver by ctypes: no numbers without a width, every result looked at."""

    def __init__(self, path: str) -> None:
        if not path:
            raise Refused(
                "no libcuda.so.1 here: the NVIDIA driver's library is in none of its places"
            )
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise Refused(f"the driver {path} cannot be opened: {error}") from None

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def result(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise Refused(f"the driver has no {name}") from None
        return int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        if code := self.result(name, *arguments):
            kind = Refused if code == 801 else Failed  # CUDA_ERROR_NOT_SUPPORTED
            raise kind(f"{name}: {self.text(code)}")

    def text(self, code: int) -> str:
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(INT(code), ctypes.byref(name))
        return f"{code} {name.value.decode() if name.value else '(no name)'}"


class Location(ctypes.Structure):
    _fields_ = [("type", INT), ("id", INT)]


class AllocationFlags(ctypes.Structure):
    _fields_ = [("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4)]  # fmt: skip


class AllocationProp(ctypes.Structure):
    _fields_ = [("type", INT), ("handle_types", INT), ("location", Location), ("win32", PTR), ("flags", AllocationFlags)]  # fmt: skip


class AccessDesc(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", INT)]


class Gpu(Driver):
    """A context on device 0, made as hal/cuda makes it, and the calls that the stages share."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.call("cuInit", U32(0))
        self.device, self.context = INT(), PTR()
        self.call("cuDeviceGet", ctypes.byref(self.device), INT(0))
        # CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST
        self.call("cuCtxCreate_v2", ctypes.byref(self.context), U32(4 | 8), self.device)
        self.prop = AllocationProp(type=1, location=Location(1, self.device.value))

    def granularity(self) -> int:
        found = SIZE()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self.prop), INT(0))  # fmt: skip
        return found.value

    def reserve(self, size: int, at: int = 0) -> tuple[int, int]:
        """Result and address."""
        got = U64()
        code = self.result("cuMemAddressReserve", ctypes.byref(got), SIZE(size), SIZE(0), U64(at), U64(0))  # fmt: skip
        return code, got.value

    def unreserve(self, at: int, size: int) -> None:
        self.call("cuMemAddressFree", U64(at), SIZE(size))

    def create(self, size: int) -> int:
        handle = U64()
        self.call("cuMemCreate", ctypes.byref(handle), SIZE(size), ctypes.byref(self.prop), U64(0))
        return handle.value

    def map(self, at: int, size: int, handle: int) -> None:
        self.call("cuMemMap", U64(at), SIZE(size), SIZE(0), U64(handle), U64(0))

    def allow(self, at: int, size: int) -> None:
        access = AccessDesc(Location(1, self.device.value), 3)
        self.call("cuMemSetAccess", U64(at), SIZE(size), ctypes.byref(access), SIZE(1))

    def unmap(self, at: int, size: int) -> None:
        self.call("cuMemUnmap", U64(at), SIZE(size))

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", U64(handle))

    def memory(self, size: int, at: int = 0) -> int:
        """Mapped memory of its own reservation; stays until the process ends."""
        code, base = self.reserve(size, at)
        if code:
            raise Failed(f"cuMemAddressReserve of {size >> 20} MiB: {self.text(code)}")
        self.map(base, size, self.create(size))
        self.allow(base, size)
        return base

    def stream(self) -> PTR:
        made = PTR()
        self.call("cuStreamCreateWithPriority", ctypes.byref(made), U32(1), INT(0))
        return made

    def wait(self, stream: PTR) -> None:
        self.call("cuStreamSynchronize", stream)

    def pinned(self, size: int, flags: int = 0) -> int:
        at = PTR()
        self.call("cuMemHostAlloc", ctypes.byref(at), SIZE(size), U32(flags))
        return at.value or 0

    def load(self, image: bytes) -> PTR:
        module = PTR()
        # PTX ends in a NUL; behind a cubin it does no harm
        code = self.result("cuModuleLoadDataEx", ctypes.byref(module), image + b"\0", U32(0), None, None)  # fmt: skip
        if code:
            raise Failed(f"cuModuleLoadDataEx of {len(image)} bytes: {self.text(code)}")
        return module

    def function(self, module: PTR, name: str) -> PTR:
        found = PTR()
        self.call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
        return found

    def global_of(self, module: PTR, name: str) -> tuple[int, int]:
        """Address and size."""
        at, size = U64(), SIZE()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), module, name.encode())  # fmt: skip
        return at.value, size.value

    def launch(self, function: PTR, stream: PTR | None, *values: Any, grid: int = 1, block: int = 1) -> None:  # fmt: skip
        pointers = (PTR * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
        self.call(
            "cuLaunchKernel", function, U32(grid), U32(1), U32(1), U32(block), U32(1), U32(1), U32(0),
            stream, pointers, None,
        )  # fmt: skip

    def to_host(self, to: int, at: int, size: int, stream: PTR) -> None:
        self.call("cuMemcpyDtoHAsync_v2", PTR(to), U64(at), SIZE(size), stream)

    def to_device(self, at: int, source: int, size: int, stream: PTR) -> None:
        self.call("cuMemcpyHtoDAsync_v2", U64(at), PTR(source), SIZE(size), stream)

    def words(self, at: int, count: int) -> list[int]:
        """What device memory holds, by way of page-locked memory."""
        stream, host = self.stream(), self.pinned(count * 4)
        self.to_host(host, at, count * 4, stream)
        self.wait(stream)
        return list((U32 * count).from_address(host))


# As our libraries say it on stderr, once per call's name.
REFUSAL = re.compile(r"^devproxy: (.*\brefused\b.*?)(?: \(\w+(?:_|Error)\w*|$)", re.M)


def refusal_in(text: str) -> str:
    """The first call that was refused by name and why, or nothing."""
    found = REFUSAL.search(text)
    return found[1][:300] if found else ""


def kernels(setup: Setup, form: str = "cubin") -> bytes:
    path = setup.kernels(form)
    if not path.exists():
        raise Refused(f"{path.name} is not in the bundle (made without nvcc)")
    return path.read_bytes()


def in_us(work: Callable[[], Any], times: int = 20) -> dict[str, float]:
    took = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return spread(took)


def spread(took: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(took), 2),
        "least": round(min(took), 2),
        "most": round(max(took), 2),
    }


def digest_of(text: str) -> str | None:
    found = re.search(r"digest (\S+)", text)
    return found[1] if found else None


def train(setup: Setup, steps: int, *more: str) -> list[str]:
    return [
        sys.executable,
        str(setup.bundle / "programs" / "train.py"),
        "--steps",
        str(steps),
        *more,
    ]


class Laps:
    """Times of things that are done one behind the other, several times over."""

    def __init__(self) -> None:
        self.at = 0
        self.took: dict[str, list[float]] = {}

    def begin(self) -> None:
        self.at = time.perf_counter_ns()

    def end(self, what: str) -> None:
        self.took.setdefault(what, []).append((time.perf_counter_ns() - self.at) / 1e3)
        self.begin()

    def medians_us(self) -> dict[str, float]:
        return {what: round(statistics.median(took), 1) for what, took in self.took.items()}


def read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def map_at(address: int, fd: int, size: int) -> int:
    """A shared mapping at this very address; stays until the process ends. 0 where something else is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = U64
    libc.mmap.argtypes = [U64, SIZE, INT, INT, INT, ctypes.c_long]
    got = int(libc.mmap(address, size, 3, 0x100001, fd, 0))  # MAP_SHARED | MAP_FIXED_NOREPLACE
    return got if got == address else 0


def host_map(fd: int, size: int) -> tuple[int, mmap.mmap]:
    """A shared mapping and its address."""
    view = mmap.mmap(fd, size)
    return ctypes.addressof((ctypes.c_char * size).from_buffer(view)), view


# -- the machine ------------------------------------------------------------------------------------------------------


MODULE_OF = {"nvidia_ml_py": "pynvml"}  # of wheels that have another name


@stage(40, 20)
def prepare(setup: Setup, report: Report) -> None:
    """Is the bundle whole, and which of its parts does this machine take?"""
    facts = setup.manifest
    wrong = [
        name
        for name, want in facts["files"].items()
        if not (setup.bundle / name).is_file()
        or hashlib.sha256((setup.bundle / name).read_bytes()).hexdigest() != want["sha256"]
    ]
    report.put("files", len(facts["files"]))
    if wrong:
        report.put("changed_files", wrong[:20])
    made_for = facts["python"] == ".".join(map(str, sys.version_info[:2]))
    if not made_for:
        report.say(f"the wheels are for Python {facts['python']}, not for this one: left out")
    for wheel in (setup.bundle / "wheels").glob("*.whl"):
        if made_for:
            unpack(wheel, setup.work / "site")
    for wheel in (setup.bundle / "spare").glob("*.whl"):
        name = wheel.name.split("-")[0]
        if made_for and not has_module(MODULE_OF.get(name, name.replace("_", "."))):
            unpack(wheel, setup.work / "spare")
            report.say(f"{name} is not here: taken from the bundle")
    missing = {}
    for name in ("devproxy-server", "devproxy-init", "libcuda.so.1", "libdevproxy_host.so"):
        done = run(["ldd", str(setup.bundle / "lib" / name)], dict(os.environ), 10)
        lost = re.findall(r"(\S+) => not found|(version `\S+' not found)", done.out + done.err)
        if lost:
            missing[name] = [a or b for a, b in lost]
    if missing:
        report.put("missing_libraries", missing)
        (setup.work / "runtime").touch()
    server = run([str(setup.bundle / "lib" / "devproxy-server"), "--print-abi"], setup.proxied_env(), 10)  # fmt: skip
    report.put("server_starts", server.code == 0)
    with_devproxy = run([*setup.proxied().prefix[:3], "--version"], setup.proxied_env(), 20)
    report.put("devproxy", with_devproxy.out.strip() or with_devproxy.brief())
    report.put("genuine_cudart", find_cudart(setup))
    report.put("compilers", find_compilers(setup))
    report.put("torch", find_torch(setup) or None)
    report.put("torch_plugins", facts.get("torch_plugins", []))
    service = "import devproxy.control.agent_service, blake3, zstandard, rich"
    imports = run([sys.executable, "-c", service], setup.proxied_env(), 30)
    report.put("imports", imports.code == 0 or imports.brief())
    if wrong:
        raise Failed(f"{len(wrong)} files are not as the manifest says: {', '.join(wrong[:5])}")
    if server.code or with_devproxy.code or imports.code:
        raise Failed("devproxy does not start here: " + (server.err or with_devproxy.err or imports.err)[-600:])  # fmt: skip


def package_folders() -> list[Path]:
    """Where CUDA's own packages put their libraries (nvidia/cu13/lib, nvidia/cuda_runtime/lib), in this Python."""
    import site

    roots = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    return sorted({f for root in roots if root for f in Path(root).glob("nvidia/*/lib")})


def find_cudart(setup: Setup) -> str | None:
    """NVIDIA's runtime for native runs: this machine's, else the bundle's. Put beside the genuine driver."""
    places = [*package_folders(), Path("/usr/local/cuda/lib64")]
    found = [f / "libcudart.so.13" for f in places if (f / "libcudart.so.13").exists()]
    if not found:
        for wheel in (setup.bundle / "cudart").glob("*.whl"):
            unpack(wheel, setup.work / "cudart")
        found = sorted((setup.work / "cudart").rglob("libcudart.so.13"))
    if not found:
        return None
    (setup.work / "native" / "libcudart.so.13").symlink_to(found[0])
    return str(found[0])


def find_compilers(setup: Setup) -> list[str]:
    """libnvrtc and libnvJitLink, which need no device: the same for native and proxied runs."""
    folder = setup.work / "compilers"
    folder.mkdir()
    for place in [*package_folders(), Path("/usr/local/cuda/lib64")]:
        for path in [*place.glob("libnvrtc*.so*"), *place.glob("libnvJitLink.so*")]:
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path.resolve())
    return sorted(p.name for p in folder.iterdir())


def unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@stage(40, 8)
def machine(setup: Setup, report: Report) -> None:
    """What is here: kernel, limits, tools, packages."""
    report.put("uname", list(os.uname())[2:])
    report.put("os", re.findall(r'PRETTY_NAME="(.*)"', read("/etc/os-release") or ""))
    report.put("libc", os.confstr("CS_GNU_LIBC_VERSION"))
    report.put("python", sys.version)
    report.put("uid", os.getuid())
    report.put("cpus", len(os.sched_getaffinity(0)))
    status = read("/proc/self/status") or ""
    report.put("capabilities", re.findall(r"^Cap(?:Eff|Bnd):\s*(\w+)", status, re.M))
    report.put("meminfo", re.findall(r"^(Mem\w+|Hugepagesize|HugePages_Total):\s*(.*)", read("/proc/meminfo") or "", re.M))  # fmt: skip
    free = {}
    for what, place in (("/dev/shm", "/dev/shm"), ("work", str(setup.work))):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            free[what] = found.f_bavail * found.f_frsize >> 20
    report.put("free_MiB", free)
    report.put("memlock", re.findall(r"Max locked memory\s+(\S+)\s+(\S+)", read("/proc/self/limits") or ""))  # fmt: skip
    report.put("nvidia_nodes", sorted(map(str, Path("/dev").glob("nvidia*"))))
    report.put("nvidia_kernel_driver", read("/proc/driver/nvidia/version"))
    report.put("driver_library", [setup.driver, os.path.realpath(setup.driver)] if setup.driver else None)  # fmt: skip
    report.put("beside_it", sorted(p.name for p in Path(setup.driver).resolve().parent.glob("lib*nv*.so*"))[:60] if setup.driver else None)  # fmt: skip
    report.put("yama_ptrace_scope", read("/proc/sys/kernel/yama/ptrace_scope"))
    report.put("mmap_min_addr, overcommit", [read("/proc/sys/vm/mmap_min_addr"), read("/proc/sys/vm/overcommit_memory")])  # fmt: skip
    with contextlib.suppress(OSError), gzip.open("/proc/config.gz", "rt") as config:
        wanted = re.compile(r"CHECKPOINT_RESTORE|USERFAULTFD|SOFT_DIRTY|_DIAG|NAMESPACES|_NS=|MEMFD|KCMP")  # fmt: skip
        report.put("kernel_config", [line.strip() for line in config if wanted.search(line)])
    tools = (
        "nvidia-smi",
        "nvcc",
        "gcc",
        "g++",
        "ldd",
        "unshare",
        "criu",
        "cuda-checkpoint",
        "make",
    )
    report.put("tools", {t: shutil.which(t) for t in tools})
    import importlib.metadata as metadata

    versions = {}
    for package in ("torch", "numpy", "numba", "numba-cuda", "cuda-bindings", "triton", "nvidia-ml-py", "grpcio", "protobuf", "psutil"):  # fmt: skip
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    report.put("packages", versions)
    if shutil.which("nvidia-smi"):
        fields = "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current,compute_mode,persistence_mode,ecc.mode.current"
        smi = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], dict(os.environ), 20)
        report.put("nvidia_smi", smi.out.strip().splitlines() or smi.brief())
    code = "import json, sys; from devproxy.hal import nvml; print(json.dumps(nvml.read(sys.argv[1]).as_json()))"
    health = run([sys.executable, "-c", code, setup.driver], setup.proxied_env(), 15)
    report.put(
        "nvml", json.loads(health.out) if health.code == 0 else health.brief().split(" | ")[-1]
    )


@stage(30, 6, direct=True)
def driver(setup: Setup, report: Report) -> None:
    """The driver: version, device, the calls that hal/cuda makes, the attributes that it asks for."""
    gpu = Gpu(setup.driver)
    version, name, total = INT(), ctypes.create_string_buffer(200), SIZE()
    gpu.call("cuDriverGetVersion", ctypes.byref(version))
    gpu.call("cuDeviceGetName", name, INT(199), gpu.device)
    gpu.call("cuDeviceTotalMem_v2", ctypes.byref(total), gpu.device)
    report.put("cuda_version", version.value)
    report.put("name", name.value.decode())
    report.put("total_bytes", total.value)
    attributes = {
        "compute_major": 75, "compute_minor": 76, "multiprocessors": 16, "unified_addressing": 41,
        "virtual_memory_management": 102, "64_bit_stream_mem_ops": 93, "host_register_supported": 99,
        "host_pointer_for_registered_mem": 91, "concurrent_kernels": 31, "async_engines": 40,
        "compute_preemption": 90, "gpu_direct_rdma_with_vmm": 110, "host_numa_vmm": 141,
    }  # fmt: skip
    values, value = {}, INT()
    for text, number in attributes.items():
        code = gpu.result("cuDeviceGetAttribute", ctypes.byref(value), INT(number), gpu.device)
        values[text] = value.value if code == 0 else gpu.text(code)
    report.put("attributes", values)
    missing = [s for s in setup.manifest["driver_symbols"] if not gpu.has(s)]
    report.put("driver_table", {"asked": len(setup.manifest["driver_symbols"]), "missing": missing})
    # Each of them is missed only by the jobs that ask for what it does.
    optional = setup.manifest.get("optional_driver_symbols", [])
    report.put("optional_missing", [s for s in optional if not gpu.has(s)])
    extra = ("cuKernelGetParamInfo", "cuCtxCreate_v4", "cuMemcpyBatchAsync", "cuCheckpointProcessLock")  # fmt: skip
    report.put("also_there", {s: gpu.has(s) for s in extra})
    if missing:
        raise Failed(f"the driver lacks {', '.join(missing)}")


# -- a. address ranges, VMM cost, aliasing ----------------------------------------------------------------------------


@stage(25, 5, direct=True)
def a_ranges(setup: Setup, report: Report) -> None:
    """Can every slot's 192 GiB be reserved at the address that devproxy gives it?"""
    gpu = Gpu(setup.driver)
    code, got = gpu.reserve(DEVICE_BYTES, RANGE_BASE)
    report.put("slot_0", {"result": code, "wished": hex(RANGE_BASE), "got": hex(got)})
    if code == 0:
        report.put("reserve_us", in_us(lambda: gpu.unreserve(gpu.reserve(DEVICE_BYTES)[1], DEVICE_BYTES), 5))  # fmt: skip
    held, others = ([got] if code == 0 and got == RANGE_BASE else []), []
    for slot in range(1, SLOTS):
        wish = RANGE_BASE + slot * RANGE_BYTES
        result, at = gpu.reserve(DEVICE_BYTES, wish)
        if result or at != wish:
            others.append([slot, result, hex(at)])
            if result:
                break
        if result == 0:
            held.append(at)
    report.put("slots_as_wished", len(held) - len([o for o in others if o[1] == 0]))
    report.put("slots_otherwise", others[:10])
    # The pinned window lies in the same process, right behind the device range.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = U64
    libc.mmap.argtypes = [U64, SIZE, INT, INT, INT, ctypes.c_long]
    window = libc.mmap(RANGE_BASE + DEVICE_BYTES, RANGE_BYTES - DEVICE_BYTES, 0, 0x100022 | 0x4000, -1, 0)  # fmt: skip
    report.put("pinned_window_beside_it", hex(window))
    taken = libc.mmap(RANGE_BASE + SLOTS * RANGE_BYTES, 1 << 30, 0, 0x100022 | 0x4000, -1, 0)
    result, at = gpu.reserve(DEVICE_BYTES, RANGE_BASE + SLOTS * RANGE_BYTES)
    report.put("where_host_memory_lies", {"host": hex(taken), "result": result, "got": hex(at)})
    for at in held:
        gpu.unreserve(at, DEVICE_BYTES)
    found = {}
    for base in (0x10_0000_0000, 0x40_0000_0000, 0x1000_0000_0000, 0x3000_0000_0000, 0x4000_0000_0000, 0x5000_0000_0000, 0x6000_0000_0000, 0x7000_0000_0000):  # fmt: skip
        result, at = gpu.reserve(DEVICE_BYTES, base)
        found[hex(base)] = hex(at) if result == 0 else gpu.text(result)
        if result == 0:
            gpu.unreserve(at, DEVICE_BYTES)
    report.put("other_bases", found)
    sizes = {}
    for bits in (38, 40, 42, 44, 45, 46, 47):
        result, at = gpu.reserve(1 << bits)
        sizes[f"2^{bits}"] = hex(at) if result == 0 else gpu.text(result)
        if result == 0:
            gpu.unreserve(at, 1 << bits)
    report.put("sizes", sizes)
    if not held or held[0] != RANGE_BASE or others:
        raise Failed("not every slot gets the addresses that it needs")


@stage(30, 5, direct=True)
def a_vmm_cost(setup: Setup, report: Report) -> None:
    """create, map, SetAccess, unmap, release by the size of a handle, and of many small ones in one range."""
    gpu = Gpu(setup.driver)
    report.put("granularity", gpu.granularity())
    code, base = gpu.reserve(DEVICE_BYTES, RANGE_BASE)
    if code:
        raise Failed(f"cuMemAddressReserve: {gpu.text(code)}")
    for size_mib in (2, 16, 64, 128, 1024):
        size, laps = size_mib * MIB, Laps()
        for _ in range(7):
            laps.begin()
            handle = gpu.create(size)
            laps.end("create")
            gpu.map(base, size, handle)
            laps.end("map")
            gpu.allow(base, size)
            laps.end("access")
            gpu.unmap(base, size)
            laps.end("unmap")
            gpu.release(handle)
            laps.end("release")
        report.put(f"{size_mib}MiB_us", laps.medians_us())
    many, piece = 256, 2 * MIB
    handles = [gpu.create(piece) for _ in range(many)]
    begin = time.perf_counter()
    for n, handle in enumerate(handles):
        gpu.map(base + n * piece, piece, handle)
    mapped = time.perf_counter()
    gpu.allow(base, many * piece)
    allowed = time.perf_counter()
    for n in range(many):
        gpu.unmap(base + n * piece, piece)
    ended = time.perf_counter()
    each = {"map": mapped - begin, "access_once": allowed - mapped, "unmap": ended - allowed}
    report.put("256_handles_of_2MiB_us", {k: round(v * 1e6, 1) for k, v in each.items()})


@stage(25, 4, direct=True)
def a_alias(setup: Setup, report: Report) -> None:
    """One handle at two addresses, in one context and in two; memory survives being mapped anew."""
    gpu = Gpu(setup.driver)
    size = 64 * MIB
    _, first = gpu.reserve(size)
    _, second = gpu.reserve(size)
    handle = gpu.create(size)
    for at in (first, second):
        gpu.map(at, size, handle)
        gpu.allow(at, size)
    stream = gpu.stream()
    gpu.call("cuMemsetD32Async", U64(first), U32(7), SIZE(size // 4), stream)
    gpu.wait(stream)
    report.put("seen_at_both", gpu.words(second + size - 64, 16) == [7] * 16)
    gpu.unmap(first, size)
    report.put("one_unmapped", gpu.words(second, 4) == [7] * 4)
    gpu.map(first, size, handle)
    gpu.allow(first, size)
    report.put("mapped_anew", gpu.words(first, 4) == [7] * 4)
    other = PTR()
    gpu.call("cuCtxCreate_v2", ctypes.byref(other), U32(4 | 8), gpu.device)
    _, third = gpu.reserve(size)
    gpu.map(third, size, handle)
    gpu.allow(third, size)
    report.put("in_another_context", gpu.words(third, 4) == [7] * 4)
    report.put("first_address_from_the_other_context", gpu.words(first, 4) == [7] * 4)
    stream = gpu.stream()
    gpu.call("cuMemsetD32Async", U64(third), U32(9), SIZE(size // 4), stream)
    gpu.wait(stream)
    gpu.call("cuCtxSetCurrent", gpu.context)
    report.put("written_by_the_other", gpu.words(first, 4) == [9] * 4)
    half = gpu.result("cuMemUnmap", U64(first), SIZE(size // 2))
    report.put("unmap_of_a_half", gpu.text(half))
    if not all(v for v in report.figures.values() if isinstance(v, bool)):
        raise Failed("aliases do not show the same memory")


# -- b. modules, order, faults ----------------------------------------------------------------------------------------

# Offset and size of each parameter, as a C compiler lays them out (tests/programs/kernels.c).
LAYOUTS = {
    "fill": [(0, 8), (8, 4), (16, 8)],
    "saxpy": [(0, 4), (8, 8), (16, 8), (24, 8)],
    "mixed": [(0, 1), (8, 8), (16, 2), (24, 8), (32, 1), (36, 4)],
    "noop64": [(8 * i, 8) for i in range(8)],
    "sum_struct": [(0, 8), (8, 32756)],
    "crash": [],
}


def layout(gpu: Driver, function: PTR, call: str) -> list[tuple[int, int]]:
    """Until the driver says that there are no more. What it says then is in the last element where it is not INVALID_VALUE."""
    found: list[tuple[int, int]] = []
    offset, size = SIZE(), SIZE()
    for i in range(100):
        code = gpu.result(call, function, SIZE(i), ctypes.byref(offset), ctypes.byref(size))
        if code:
            return found if code == 1 else [*found, (-code, -code)]
        found.append((offset.value, size.value))
    return found


@stage(25, 4, direct=True)
def b_layouts(setup: Setup, report: Report) -> None:
    """Parameter layouts of functions and kernels, from cubin and from PTX, against C's."""
    gpu, wrong = Gpu(setup.driver), []
    for form in ("cubin", "ptx", "fatbin"):
        try:
            begin = time.perf_counter()
            module = gpu.load(kernels(setup, form))
            report.put(f"load_{form}_ms", round((time.perf_counter() - begin) * 1e3, 2))
        except (Refused, Failed) as why:
            report.say(f"{form}: {why}")
            wrong.append(form)
            continue
        for name, want in LAYOUTS.items():
            got = layout(gpu, gpu.function(module, name), "cuFuncGetParamInfo")
            if got != want:
                wrong.append(f"{form} {name}")
                report.put(f"{form} {name}", got)
    report.put("functions_checked", len(LAYOUTS))
    library, kernel = PTR(), PTR()
    image = kernels(setup) + b"\0"
    gpu.call("cuLibraryLoadData", ctypes.byref(library), image, None, None, U32(0), None, None, U32(0))  # fmt: skip
    for name, want in LAYOUTS.items():
        gpu.call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
        got = layout(gpu, kernel, "cuKernelGetParamInfo")
        if got != want:
            wrong.append(f"kernel {name}")
            report.put(f"kernel {name}", got)
    if wrong:
        raise Failed(f"not as a C compiler lays them out: {', '.join(wrong)}")


@stage(30, 8, direct=True)
def b_modules(setup: Setup, report: Report) -> None:
    """Load, unload, load again: handles, contents and addresses of globals; loading beside a running kernel."""
    gpu, image = Gpu(setup.driver), kernels(setup)
    device = gpu.memory(64 * MIB, RANGE_BASE)

    def facts(module: PTR) -> dict[str, Any]:
        at, size = gpu.global_of(module, "table")
        return {
            "module": hex(module.value or 0),
            "fill": hex(gpu.function(module, "fill").value or 0),
            "table": hex(at),
            "bytes": size,
            "zeroes": hex(gpu.global_of(module, "zeroes")[0]),
        }

    first, second = gpu.load(image), gpu.load(image)
    report.put("two_loads", [facts(first), facts(second)])
    at, _ = gpu.global_of(first, "table")
    initial = gpu.words(at, 4)
    report.put("initial_table", initial)
    inside = RANGE_BASE <= at < RANGE_BASE + SLOTS * RANGE_BYTES
    report.put("globals_inside_devproxys_ranges", inside)
    gpu.launch(gpu.function(first, "bump_table"), None, U32(5), block=4)
    gpu.call("cuStreamSynchronize", None)
    report.put("table_after_a_kernel", gpu.words(at, 4))
    stream, host = gpu.stream(), gpu.pinned(16)
    (U32 * 4).from_address(host)[:] = [1, 2, 3, 4]
    gpu.to_device(at, host, 16, stream)
    gpu.wait(stream)
    report.put("table_can_be_written", gpu.words(at, 4) == [1, 2, 3, 4])
    again = []
    for _ in range(3):
        gpu.call("cuModuleUnload", first)
        first = gpu.load(image)
        again.append(facts(first))
    report.put("loaded_again", again)
    report.put("table_after_reload", gpu.words(gpu.global_of(first, "table")[0], 4))
    report.put("same_address_after_reload", all(a["table"] == hex(at) for a in again))
    report.put("load_us", in_us(lambda: gpu.load(image), 10))
    # While a kernel runs: does the call wait for it? 300 ms is far more than any load.
    slow, fill, running = gpu.function(first, "slow"), gpu.function(second, "fill"), gpu.stream()
    gpu.launch(fill, running, U64(device), U32(1), U64(16))
    gpu.wait(running)
    figures = {}
    for name, work in (
        ("load", lambda: gpu.load(image)),
        ("load_and_first_launch", lambda: gpu.launch(gpu.function(gpu.load(image), "fill"), stream, U64(device), U32(2), U64(16))),
        ("cuMemCreate_64MiB", lambda: gpu.create(64 * MIB)),
        ("map_and_access", lambda: gpu.memory(64 * MIB)),
        ("cuMemHostAlloc_4MiB", lambda: gpu.pinned(4 * MIB)),
        ("unload", lambda: gpu.call("cuModuleUnload", gpu.load(image))),
    ):  # fmt: skip
        gpu.launch(slow, running, U64(300_000))
        begin = time.perf_counter()
        work()
        figures[name] = round((time.perf_counter() - begin) * 1e3, 2)
        gpu.wait(running)
    spare = gpu.memory(64 * MIB)
    gpu.launch(slow, running, U64(300_000))
    begin = time.perf_counter()
    gpu.unmap(spare, 64 * MIB)
    figures["cuMemUnmap_64MiB"] = round((time.perf_counter() - begin) * 1e3, 2)
    gpu.wait(running)
    report.put("ms_beside_a_kernel_of_300_ms", figures)
    report.put("waits_for_it", [name for name, ms in figures.items() if ms > 200])
    if initial != [11, 22, 33, 44]:
        raise Failed(f"the table begins as {initial}")


@stage(30, 6, direct=True)
def b_order(setup: Setup, report: Report) -> None:
    """Completion words, events, the legacy stream's rule, the depth of a queue."""
    gpu = Gpu(setup.driver)
    module = gpu.load(kernels(setup))
    slow, fill = gpu.function(module, "slow"), gpu.function(module, "fill")
    noop, device = gpu.function(module, "noop64"), gpu.memory(64 * MIB, RANGE_BASE)
    stream, legacy = gpu.stream(), PTR(1)  # CU_STREAM_LEGACY
    host = gpu.pinned(4 * MIB, 2)  # CU_MEMHOSTALLOC_DEVICEMAP
    word, word_device = U64.from_address(host), U64()
    gpu.call("cuMemHostGetDevicePointer_v2", ctypes.byref(word_device), PTR(host), U32(0))
    report.put("host_memory_same_address_on_device", word_device.value == host)

    def write(value: int, to: PTR) -> None:
        gpu.call("cuStreamWriteValue64_v2", to, word_device, U64(value), U32(0))

    def until(value: int, limit_s: float = 2.0) -> None:
        deadline = time.perf_counter() + limit_s
        while word.value != value:
            if time.perf_counter() > deadline:
                raise Failed(f"the completion word stays at {word.value}, not {value}")

    numbers = iter(range(1, 1 << 30))

    def one(to: PTR) -> None:
        value = next(numbers)
        write(value, to)
        until(value)

    report.put("written_word_us", in_us(lambda: one(stream), 500))
    report.put("written_word_legacy_us", in_us(lambda: one(legacy), 500))

    def launch_and_word() -> None:
        gpu.launch(noop, stream, *[U64(0)] * 8)
        one(stream)

    report.put("launch_and_word_us", in_us(launch_and_word, 500))
    event = PTR()
    gpu.call("cuEventCreate", ctypes.byref(event), U32(2))

    def launch_and_event() -> None:
        gpu.launch(noop, stream, *[U64(0)] * 8)
        gpu.call("cuEventRecord", event, stream)
        while gpu.result("cuEventQuery", event) == 600:
            pass

    report.put("launch_and_event_us", in_us(launch_and_event, 500))
    # Is what a copy wrote visible before the word behind it? The last word of the copy is looked at, 200 times.
    late, size = 0, 1 * MIB
    last = ctypes.c_uint32.from_address(host + MIB + size - 4)
    for n in range(1, 201):
        gpu.launch(fill, stream, U64(device), U32(n), U64(size // 4), grid=64, block=256)
        gpu.to_host(host + MIB, device, size, stream)
        one(stream)
        late += last.value != n
    report.put("copies_not_visible_at_their_word", late)
    # The legacy stream waits for blocking streams, and they for it; a non-blocking one does not.
    blocking = PTR()
    gpu.call("cuStreamCreateWithPriority", ctypes.byref(blocking), U32(0), INT(0))
    gpu.launch(slow, blocking, U64(50_000))
    begin = time.perf_counter()
    one(legacy)
    report.put("legacy_waited_for_blocking_ms", round((time.perf_counter() - begin) * 1e3, 1))
    gpu.launch(slow, legacy, U64(50_000))
    begin = time.perf_counter()
    one(blocking)
    report.put("blocking_waited_for_legacy_ms", round((time.perf_counter() - begin) * 1e3, 1))
    gpu.launch(slow, legacy, U64(50_000))
    begin = time.perf_counter()
    one(stream)
    report.put("non_blocking_waited_ms", round((time.perf_counter() - begin) * 1e3, 1))
    gpu.wait(legacy)
    # Behind a kernel of half a second: the first submission that takes long shows the queue's depth.
    gpu.launch(slow, stream, U64(500_000))
    depth, begun = 0, time.perf_counter()
    while depth < 20_000 and time.perf_counter() - begun < 0.4:
        begin = time.perf_counter()
        gpu.launch(noop, stream, *[U64(0)] * 8)
        if time.perf_counter() - begin > 0.02:
            break
        depth += 1
    report.put("launches_until_the_driver_blocks", depth)
    gpu.wait(stream)
    if late or report.figures["legacy_waited_for_blocking_ms"] < 40:
        raise Failed("the order is not the one that hal/cuda relies on")


@stage(25, 5, direct=True)
def b_faults(setup: Setup, report: Report) -> None:
    """A kernel that faults: which calls say so, and does another context of the process live on?"""
    gpu = Gpu(setup.driver)
    other, image = PTR(), kernels(setup)
    gpu.call("cuCtxCreate_v2", ctypes.byref(other), U32(4 | 8), gpu.device)
    other_stream, other_fill = gpu.stream(), gpu.function(gpu.load(image), "fill")
    other_memory = gpu.memory(2 * MIB)
    gpu.call("cuCtxSetCurrent", gpu.context)
    module, stream, second = gpu.load(image), gpu.stream(), gpu.stream()
    at, event = gpu.memory(2 * MIB), PTR()
    gpu.call("cuEventCreate", ctypes.byref(event), U32(2))
    host = gpu.pinned(4096)
    gpu.launch(gpu.function(module, "crash"), stream)
    found = {"synchronize": gpu.text(gpu.result("cuStreamSynchronize", stream))}
    handle, got = U64(), PTR()
    free, total = SIZE(), SIZE()
    asked: list[tuple[str, tuple[Any, ...]]] = [
        ("cuStreamQuery", (second,)),
        ("cuEventRecord", (event, second)),
        ("cuEventQuery", (event,)),
        ("cuMemcpyDtoHAsync_v2", (PTR(host), U64(at), SIZE(64), second)),
        ("cuMemsetD32Async", (U64(at), U32(1), SIZE(16), second)),
        ("cuMemGetInfo_v2", (ctypes.byref(free), ctypes.byref(total))),
        ("cuModuleLoadDataEx", (ctypes.byref(got), image, U32(0), None, None)),
        ("cuMemCreate", (ctypes.byref(handle), SIZE(2 * MIB), ctypes.byref(gpu.prop), U64(0))),
        ("cuMemUnmap", (U64(at), SIZE(2 * MIB))),
        ("cuMemHostAlloc", (ctypes.byref(got), SIZE(4096), U32(0))),
        ("cuStreamDestroy_v2", (second,)),
    ]
    for name, arguments in asked:
        found[name] = gpu.text(gpu.result(name, *arguments)) if gpu.has(name) else "not there"
    report.put("after_the_fault", found)
    report.put("set_other_current", gpu.text(gpu.result("cuCtxSetCurrent", other)))
    try:
        gpu.launch(other_fill, other_stream, U64(other_memory), U32(3), U64(16))
        code = gpu.result("cuStreamSynchronize", other_stream)
        report.put("other_context", gpu.text(code) if code else "lives on")
    except Failed as dead:
        report.put("other_context", str(dead))
    report.put("destroy", gpu.text(gpu.result("cuCtxDestroy_v2", gpu.context)))
    new = PTR()
    report.put("a_new_context", gpu.text(gpu.result("cuCtxCreate_v2", ctypes.byref(new), U32(12), gpu.device)))  # fmt: skip


# -- c. programs, natively and through the proxy ------------------------------------------------------------------------

FIRST = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1")
assert cu.cuInit(0) == 0
d, c, m = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
name = ctypes.create_string_buffer(200)
assert cu.cuDeviceGet(ctypes.byref(d), 0) == 0
assert cu.cuDeviceGetName(name, 200, d) == 0
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(c), d) == 0
assert cu.cuCtxSetCurrent(c) == 0
r = cu.cuMemAlloc_v2(ctypes.byref(m), ctypes.c_size_t(1 << 20))
assert r == 0, r
r = cu.cuMemsetD32_v2(m, ctypes.c_uint32(0xABCD), ctypes.c_size_t(1 << 18))
assert r == 0, r
back = (ctypes.c_uint32 * 4)()
r = cu.cuMemcpyDtoH_v2(back, ctypes.c_uint64(m.value + (1 << 20) - 16), ctypes.c_size_t(16))
assert r == 0, r
assert list(back) == [0xABCD] * 4, list(back)
print("FIRST", name.value.decode(), hex(m.value), getattr(cu, "devproxy_abi_id", None) is not None)
"""


@stage(60, 10)
def c_first(setup: Setup, report: Report) -> None:
    """The first words through the proxy: a context, a buffer, a fill, a copy back. Natively, plain, in namespaces."""
    ways = {
        "native": setup.native(),
        "plain": setup.proxied("--plain"),
        "namespaces": setup.proxied(),
    }
    for name, way in ways.items():
        done = way.run([sys.executable, "-c", FIRST], 25)
        report.put(name, {"code": done.code, "seconds": done.seconds, "said": done.out.strip()[-300:] or done.brief()})  # fmt: skip
        if done.code:
            report.say(f"{name}: {done.err.strip()[-1500:]}")
    bad = [name for name in ways if report.figures[name]["code"]]
    if bad:
        raise Failed(f"did not work: {', '.join(bad)}")


# What devproxy's NVML must say as NVIDIA's does. The rest it says otherwise on purpose, or by another count: it is shown.
NVML_SAME = ("count", "index", "name", "uuid", "bus", "capability", "by_uuid", "by_bus")


@stage(40, 6, call=2)
def c_nvml(setup: Setup, report: Report) -> None:
    """What devproxy's NVML answers in a job, against NVIDIA's."""
    line = [sys.executable, str(setup.bundle / "programs" / "nvml_program.py")]
    said = {}
    for name, way in (("native", setup.native()), ("proxied", setup.proxied("--plain"))):
        done = way.run(line, 20)
        if name == "native" and done.code == 3:
            raise Refused(f"NVIDIA's NVML is not here: {done.brief()}")
        if done.code:
            raise Failed(f"{name}: {done.code}: {done.brief()}")
        said[name] = json.loads(done.out.splitlines()[-1])
    differ = {
        key: {name: answers.get(key) for name, answers in said.items()}
        for key in sorted({*said["native"], *said["proxied"]})
        if said["native"].get(key) != said["proxied"].get(key)
    }
    report.put("native", said["native"])
    report.put("differ", differ)
    if wrong := [key for key in NVML_SAME if key in differ]:
        raise Failed(f"not as NVIDIA's NVML says it: {', '.join(wrong)}")


# Programs of the suite whose kernels see host memory.
MAPS = ("managed", "mapped", "pinned")


@stage(150, 40, call=2, needs=("e_host_memory",))
def c_programs(setup: Setup, report: Report) -> None:
    """The driver-API suite: whatever passes natively must pass through the proxy, plain and in namespaces."""
    programs = [[*p, "cubin"] for p in setup.manifest["programs"] if "third_party" not in p[0]]
    # Images come in other forms too: the same programs, where there are such.
    for form in ("ptx", "fatbin"):
        if setup.kernels(form).exists():
            several = [
                p for p in setup.manifest["programs"] if p[0] in ("module", "ctypes_driver.py")
            ]
            programs += [[*p, form] for p in several]
    differ: list[str] = []
    unregistered = cannot_register(setup)

    def command(name: str, arguments: list[str]) -> list[str]:
        path = str(setup.bundle / "programs" / name)
        return [*([sys.executable] if name.endswith(".py") else []), path, *arguments]

    def one(program: list[Any]) -> None:
        name, arguments, options, form = program
        line = command(name, arguments)
        passed = {}
        needs_proxy = name == "lost"  # it kills its server
        ways = {} if needs_proxy else {"native": setup.native()}
        maps, others = (
            name in MAPS and "refused" not in arguments,
            [o for o in options if o != "--plain"],
        )
        ways["plain"] = setup.proxied("--plain", *others, registered=maps)
        if "--plain" not in options:
            ways["namespaces"] = setup.proxied(*options, registered=maps)
        codes: dict[str, Any] = {}
        for title, way in ways.items():
            done = way.run(line, 20, TEST_KERNELS=str(setup.kernels(form)))
            good = 3 if needs_proxy else 0
            passed[title] = done.code == good and "PASS " in done.out
            codes[title] = "pass" if passed[title] else f"{done.code}: {done.brief()}"
        title = " ".join([name, *arguments, *([form] if form != "cubin" else [])])
        report.put(title, codes)
        if not passed.pop("native", True) or all(passed.values()):
            return
        if maps and unregistered:
            report.put(title, codes | {"refused": unregistered})
        else:
            differ.append(title)

    alone = [
        p for p in programs if p[0] == "out_of_memory"
    ]  # it counts the bytes of the whole device
    with concurrent.futures.ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, [p for p in programs if p not in alone]))
    for program in alone:
        one(program)
    counts = {
        way: sum(1 for codes in report.figures.values() if codes.get(way) == "pass")
        for way in ("native", "plain", "namespaces")
    }
    lone = [t for t, codes in report.figures.items() if codes.get("native", "pass") != "pass"]
    report.put("passed", counts | {"of": len(programs)})
    report.put("not compared, since they do not pass natively", lone)
    if differ:
        raise Failed("must pass through the proxy, and do not: " + ", ".join(differ))
    if not counts["native"]:
        raise Failed("no program passes natively: nothing was compared")


# What a program finds under these names: a file of ours through the proxy, NVIDIA's natively.
WHICH = """
import ctypes
for name in ("libcuda.so.1", "libcudart.so.13"):
    ctypes.CDLL(name)
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line}))
"""


@stage(110, 25, call=2)
def c_cudart(setup: Setup, report: Report) -> None:
    """Programs of the CUDA runtime: whatever passes natively passes through the proxy, or is refused by name."""
    ways = {"native": setup.native(), "proxied": setup.proxied("--plain")}
    for name, way in ways.items():
        done = way.run([sys.executable, "-c", WHICH], 30)
        report.put(f"libraries, {name}", done.out.split() if done.code == 0 else done.brief())
    # These have stages of their own: d_cost, c_training.
    compare_cudart(setup, report, ways["proxied"], lambda name: name not in ("cost", "mlp"))


# What kernels see of the host's memory, and what copies it, in streams and in graphs.
REGISTERED = (
    "mapped",
    "managed",
    "copies",
    "copies_2d",
    "streams",
    "callbacks",
    "graphs",
    "capture",
)


@stage(60, 12, call=2, needs=("e_host_memory",))
def c_registered(setup: Setup, report: Report) -> None:
    """Programs of the CUDA runtime whose pinned memory is registered with the driver: mapped, managed, copies, streams, graphs."""
    if why := cannot_register(setup):
        raise Refused(why)
    compare_cudart(setup, report, setup.proxied("--plain", registered=True), lambda name: name in REGISTERED)  # fmt: skip


def cannot_register(setup: Setup) -> str:
    """What e_host_memory heard when it registered shared memory as hal/cuda does it: a piece of a file of /dev/shm."""
    found = earlier(setup, "e_host_memory").get("tmpfs", {}).get("64MiB", {})
    return f"the driver does not register shared memory: {found}" if isinstance(found, str) else ""


def compare_cudart(
    setup: Setup, report: Report, proxied: Way, wanted: Callable[[str], bool]
) -> None:
    folder = setup.bundle / "programs" / "cudart"
    if not folder.exists():
        raise Refused("the programs are not in the bundle (made without nvcc)")
    ways = {"native": setup.native(), "proxied": proxied}
    runs = [r for r in setup.manifest["cudart"] if wanted(r[0])]
    differ, counts = [], {"pass": 0, "refused": 0, "not here": 0}
    # What a program's last line is when it is right; the second where the device executes no kernel.
    good = ("ok {}", "ok {} (without kernels)") if setup.rehearse else ("ok {}",)

    def verdict(name: str, done: Done) -> str:
        if done.code == 0 and done.out.splitlines()[-1:] in [[line.format(name)] for line in good]:
            return "pass"
        if done.code == 3 and "not here: " in done.out:
            return done.out.strip().splitlines()[-1]
        return f"{done.code}: {done.brief()}"

    def one(program: list[Any]) -> None:
        name, arguments = program
        line, said = [str(folder / name), *arguments], {}
        for title, way in ways.items():
            done = way.run(line, 25)
            said[title] = verdict(name, done)
            if title == "proxied" and said[title] != "pass" and (refused := refusal_in(done.err)):
                said[title] = f"refused: {refused}"
        report.put(" ".join([name, *arguments]), said)
        with report.lock:
            for word in counts:
                counts[word] += said["proxied"].startswith(word)
            if said["native"] == "pass" and not said["proxied"].startswith(("pass", "refused")):
                differ.append(" ".join([name, *arguments]))

    with concurrent.futures.ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, runs))
    native = sum(1 for v in report.figures.values() if isinstance(v, dict) and v.get("native") == "pass")  # fmt: skip
    report.put("counted", {"of": len(runs), "native": native, "proxied": counts})
    if differ:
        raise Failed("pass natively, and neither pass nor are refused by name: " + ", ".join(differ))  # fmt: skip
    if not native:
        raise Failed("no program passes natively: nothing was compared")


THIRD_PARTY = (
    ("third_party_cuda_bindings.py", "cuda.bindings"),
    ("numba_program.py", "numba.cuda"),
)


@stage(90, 25, call=3)
def c_third_party(setup: Setup, report: Report) -> None:
    """Clients that nobody here wrote: cuda-bindings and numba-cuda, natively and through the proxy."""
    differ, missing = [], []
    for name, module in THIRD_PARTY:
        there = setup.native().run([sys.executable, "-c", f"import {module}"], 30)
        if there.code:
            missing.append(module)
            report.put(name, f"{module} cannot be imported: {there.brief()}")
            continue
        line, codes = [sys.executable, str(setup.bundle / "programs" / name)], {}
        for title, way in (
            ("native", setup.native()),
            ("plain", setup.proxied("--plain")),
            ("namespaces", setup.proxied()),
        ):
            done = way.run(line, 30)
            passed = done.code == 0 and "PASS " in done.out
            codes[title] = "pass" if passed else f"{done.code}: {done.brief()}"
            if title != "native" and setup.past_the_proxy(done):
                passed, codes[title] = False, "went past the proxy, to the driver itself"
            if not passed:
                report.say(f"{name} {title}: {done.err.strip()[-800:]}")
        report.put(name, codes)
        if codes["native"] == "pass" and set(codes.values()) != {"pass"}:
            differ.append(name)
    if differ:
        raise Failed("pass natively and not through the proxy: " + ", ".join(differ))
    if len(missing) == len(THIRD_PARTY):
        raise Refused(f"none of these is here: {', '.join(missing)}")
    if not any(isinstance(c, dict) and c["native"] == "pass" for c in report.figures.values()):
        raise Failed("none passes natively: nothing was compared")


def subjects(setup: Setup) -> dict[str, list[str]]:
    """Whole training programs, each a command: on the driver API, on the runtime (CUDA C++), on numba-cuda, on PyTorch."""
    programs = setup.bundle / "programs"
    return {
        "driver": [sys.executable, str(programs / "train.py")],
        "cudart": [str(programs / "cudart" / "mlp")],
        "numba": [sys.executable, str(programs / "train_numba.py")],
        "torch": [torch_python(setup), str(programs / "train_torch.py")],
        "gpt2": gpt2_line(setup, gpt2_steps(setup)),
    }


# Without importing it, which takes seconds.
TORCH_WITH_CUDA = (
    "import importlib.util, os, runpy; torch = importlib.util.find_spec('torch'); assert torch, 'no torch';"
    " assert runpy.run_path(os.path.join(os.path.dirname(torch.origin), 'version.py'))['cuda'], 'not with CUDA'"
)


def missing_of(subject: str, line: list[str], setup: Setup) -> str:
    """What it needs and is not here."""
    need = {"numba": "import numba.cuda", "torch": TORCH_WITH_CUDA}
    if subject == "gpt2":
        return ""
    if subject in need:
        there = setup.native().run([line[0], "-c", need[subject]], 40)
        return f"{subject} is not here, or not with CUDA: {there.brief()}" if there.code else ""
    return "" if os.path.exists(line[-1]) else f"{line[-1]} is not in the bundle"


# Options of a step that is bound by launches, and of one of the usual size.
SIZES = {
    "driver": {
        "launch_bound": ["--rows", "1", "--steps", "2000"],
        "usual": ["--rows", "4096", "--steps", "100"],
    },
    "cudart": {
        "launch_bound": ["--rows", "1", "--width", "64", "--adam", "1", "--steps", "4000"],
        "usual": ["--rows", "2048", "--width", "1024", "--adam", "1", "--steps", "150"],
    },
    "numba": {
        "launch_bound": ["--rows", "1", "--adam", "1", "--steps", "1000"],
        "usual": ["--rows", "512", "--width", "256", "--adam", "1", "--steps", "150"],
    },
}
STEP_TARGETS = {"launch_bound": 1.05, "usual": 1.01}  # of the native time
TURNS = {"driver": 2, "cudart": 2, "numba": 1}


@stage(120, 40, call=2)
def c_training(setup: Setup, report: Report) -> None:
    """Training programs (driver API; CUDA C++): bit for bit the same, their steps' times, and two at once on one GPU."""
    train_all(setup, report, "driver", "cudart")


@stage(150, 45, call=3)
def c_training_numba(setup: Setup, report: Report) -> None:
    """The same with the training program on numba-cuda, which compiles its kernels in each run."""
    train_all(setup, report, "numba")


def train_all(setup: Setup, report: Report, *which: str) -> None:
    wrong, compared = [], 0
    for subject in which:
        line = subjects(setup)[subject]
        if missing := missing_of(subject, line, setup):
            report.put(subject, missing)
            continue
        try:
            wrong += compare_training(setup, report, subject, line)
            compared += 1
        except Failed as failure:
            wrong.append(str(failure))
    if wrong:
        raise Failed("; ".join(wrong))
    if not compared:
        raise Refused("none of the training programs is here")


def compare_training(setup: Setup, report: Report, subject: str, line: list[str]) -> list[str]:
    """What was not as it is natively. Raises Failed when a run of it ends badly."""
    wrong = []
    # namespaces: the job that can be checkpointed, which is what devproxy is for.
    ways = {
        "native": setup.native(),
        "plain": setup.proxied("--plain"),
        "namespaces": setup.proxied(),
    }
    for size, options in SIZES[subject].items():
        steps: dict[str, list[float]] = {title: [] for title in ways}
        digests: dict[str, set[str | None]] = {title: set() for title in ways}
        for _ in range(TURNS[subject]):
            for title, way in ways.items():
                done = way.run([*line, *options], 30)
                found = re.search(r"median step ([\d.]+) us", done.out)
                if done.code or not found:
                    said = refusal_in(done.err) or done.brief()
                    raise Failed(f"{subject}, {size}, {title}: {done.code}: {said}")
                steps[title].append(float(found[1]))
                digests[title].add(digest_of(done.out))
        least = {title: min(took) for title, took in steps.items()}
        ratios = {t: round(least[t] / least["native"], 3) for t in ways if t != "native"}
        report.put(f"{subject} {size}", {
            "step_us": steps, "ratio": ratios,
            "target_met": {title: ratio <= STEP_TARGETS[size] for title, ratio in ratios.items()},
            "digests": {title: sorted(map(str, some)) for title, some in digests.items()},
        })  # fmt: skip
        if len(set[str | None]().union(*digests.values())) != 1:
            wrong.append(f"{subject} {size} has other numbers")
    more = ["--steps", "300"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: ways["plain"].run([*line, *more], 40), range(2)))
    alone = ways["native"].run([*line, *more], 30)
    together = {"native": digest_of(alone.out), **{f"of_two_{n}": digest_of(one.out) for n, one in enumerate(both)}}  # fmt: skip
    report.put(f"{subject} two_at_once", together)
    if len(set(together.values())) != 1 or None in together.values():
        wrong.append(f"two of {subject} at once: " + "; ".join(one.brief() for one in both if one.code))  # fmt: skip
    return wrong


@stage(70, 25, call=3)
def c_triton(setup: Setup, report: Report) -> None:
    """Triton kernels by Triton's own launcher, without the plugin, which is compiled there: natively and through the proxy, bit for bit."""
    need = setup.native().run([torch_python(setup), "-c", "import triton, torch"], 40)
    if need.code:
        raise Refused(f"Triton or PyTorch cannot be imported: {need.brief()}")
    if not shutil.which("gcc") and not shutil.which("cc"):
        raise Refused("Triton's launcher needs a C compiler, and none is here")
    line = [torch_python(setup), str(setup.bundle / "programs" / "triton_program.py")]
    digests: dict[str, str | None] = {}
    for title, way in (("native", setup.native()), ("plain", setup.proxied("--plain"))):
        done = way.run(line, 45, TRITON_CACHE_DIR=str(setup.work / f"triton-{title}"), **WITHOUT_PLUGIN)  # fmt: skip
        passed = done.code == 0 and "PASS triton_program" in done.out
        digests[title] = digest_of(done.out) if passed else None
        refused = refusal_in(done.err)
        report.put(title, "pass" if passed else f"refused: {refused}" if refused else f"{done.code}: {done.brief()}")  # fmt: skip
        if not passed:
            report.say(f"{title}: {done.err.strip()[-1500:]}")
            if title == "native":
                raise Failed("it does not run natively: nothing was compared")
        if title != "native" and setup.past_the_proxy(done):
            raise Failed("it went past the proxy, to the driver itself")
    report.put("digests", digests)
    if digests["plain"] != digests["native"]:
        raise Failed("not the native numbers, or none")


# In the job: its torch runs over devproxy's CUDA runtime alone, as it did before there was a plugin for real GPUs.
WITHOUT_PLUGIN = {"DEVPROXY_TORCH": "cudart"}
MAY_BE_REFUSED = ("matmul",)  # chapters of torch_program.py


@stage(120, 40, call=3)
def c_torch(setup: Setup, report: Report) -> None:
    """PyTorch's unmodified wheel over devproxy's CUDA runtime, without the plugin: each chapter has the native numbers; what needs a math library is refused by name."""
    need = setup.native().run([torch_python(setup), "-c", TORCH_WITH_CUDA], 40)
    if need.code:
        raise Refused(f"no PyTorch with CUDA can be imported: {need.brief()}")
    line = [torch_python(setup), str(setup.bundle / "programs" / "torch_program.py")]
    results: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    # Twice natively: a chapter whose own numbers are not the same twice cannot be compared.
    for title, way in (
        ("native", setup.native()),
        ("plain", setup.proxied("--plain")),
        ("native_again", setup.native()),
    ):
        done = way.run(line, 60, **WITHOUT_PLUGIN)
        found = re.findall(r"^chapter (\w+) (digest \w+|error .*)$", done.out, re.M)
        results[title] = dict(found)
        whole = done.code == 0 and "\nDONE" in done.out
        report.put(f"run, {title}", {"code": done.code, "seconds": done.seconds, "chapters": len(found), "whole": whole})  # fmt: skip
        if not whole:
            report.say(f"{title}: {done.err.strip()[-1500:]}")
        if title == "plain":
            refused = {c: refusal_in(text) for c, text in re.findall(r"^chapter (\w+) begins$(.*?)(?=^chapter \w+ begins$|\Z)", done.err, re.M | re.S)}  # fmt: skip
            report.put("refusals", [f"{c}: {what}" for c, what in refused.items() if what])
            if setup.past_the_proxy(done):
                raise Failed("it went past the proxy, to the driver itself")
    native, again, plain = (results[title] for title in ("native", "native_again", "plain"))
    if not any(value.startswith("digest") for value in native.values()):
        raise Failed("no chapter runs natively: nothing was compared")
    wrong = []
    for name, want in native.items():
        got = plain.get(name, "not reached")
        if want.startswith("error"):
            verdict = f"does not run natively: {want}"
        elif got == want:
            verdict = "equal"
        elif name in MAY_BE_REFUSED and got.startswith("error") and refused.get(name):
            verdict = f"refused: {refused[name]}"
        elif want != again.get(name):
            verdict = "not the same twice natively: not compared"
        else:
            verdict = f"differs: {got}"
            wrong.append(name)
        report.put(name, verdict)
    if wrong:
        raise Failed("not the native numbers: " + ", ".join(wrong))


NUMBA_TESTS = "numba.cuda.tests.cudadrv"
# Managed memory beyond the card's can hang a lent GPU; the others look at the machine and not at the driver.
NUMBA_LEFT_OUT = ("test_managed_alloc", "test_detect", "test_is_fp16")


@stage(120, 40, call=3)
def c_numba_tests(setup: Setup, report: Report) -> None:
    """numba-cuda's own tests of its driver layer, by name: what passes natively passes through the proxy, or is refused."""
    program = str(setup.bundle / "programs" / "numba_tests.py")
    names = setup.native().run([sys.executable, program, "--list", NUMBA_TESTS], 40)
    if names.code or not names.out.split():
        raise Refused(f"numba-cuda's tests are not here: {names.brief()}")
    modules = [m for m in names.out.split() if m.rsplit(".", 1)[1] not in NUMBA_LEFT_OUT]
    report.put("left_out", NUMBA_LEFT_OUT)
    results: dict[str, dict[str, str]] = {"native": {}, "plain": {}}
    broken: dict[str, str] = {}
    ways = {"native": setup.native(), "plain": setup.proxied("--plain")}

    def one(job: tuple[str, str]) -> None:
        module, title = job
        done = ways[title].run([sys.executable, program, module], 35)
        with report.lock:
            results[title].update(re.findall(r"^test (\S+) (.*)$", done.out, re.M))
            if "\nDONE" not in f"\n{done.out}":
                broken[f"{module} {title}"] = f"{done.code}: {done.brief()}"

    with concurrent.futures.ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, [(m, w) for m in modules for w in ways]))
    native, plain = results["native"], results["plain"]
    passed = {name for name, how in native.items() if how == "ok"}
    differ = {n: plain.get(n, "not reached") for n in sorted(passed) if plain.get(n) != "ok"}
    refused = {n: how for n, how in differ.items() if "NOT_SUPPORTED" in how}
    others = {n: how for n, how in differ.items() if n not in refused}
    report.put("counted", {"modules": len(modules), "native_ok": len(passed), "also_ok": len(passed) - len(differ), "refused": len(refused), "otherwise": len(others)})  # fmt: skip
    report.put("broken_modules", broken)
    report.put("refused", refused)
    report.put("otherwise", others)
    if others:
        raise Failed(f"{len(others)} tests pass natively, and neither pass nor are refused: " + ", ".join(list(others)[:20]))  # fmt: skip
    if not passed:
        raise Failed("no test passes natively: nothing was compared")


# -- t. PyTorch through the plugin: ops run in the server over the job's own wheel ---------------------------------------

FIND_TORCH = """
import importlib.util, json, os, platform, runpy
spec = importlib.util.find_spec("torch")
facts = dict(python=platform.python_version(), torch=None)
if spec and spec.origin:
    folder = os.path.dirname(spec.origin)
    version = runpy.run_path(os.path.join(folder, "version.py"))
    facts.update(torch=version["__version__"], cuda=version["cuda"], folder=folder)
    facts["numpy"] = importlib.util.find_spec("numpy") is not None
    facts["wheel"] = os.path.exists(os.path.join(folder, "lib", "libtorch_cuda.so"))
print(json.dumps(facts))
"""
# Pythons that may have torch, besides the one that runs this.
TORCH_PLACES = ("/opt/torch/.venv/bin/python", "/opt/*/.venv/bin/python", "/opt/*/bin/python")


def find_torch(setup: Setup) -> dict[str, Any]:
    """Of the Python that has torch with CUDA; in a rehearsal any torch will do. Empty where there is none."""
    named = [sys.executable, shutil.which("python3") or "", shutil.which("python") or ""]
    for python in dict.fromkeys([*named, *(p for place in TORCH_PLACES for p in sorted(glob.glob(place)))]):  # fmt: skip
        done = run([python, "-c", FIND_TORCH], setup.native_env(), 30) if python else None
        if done is None or done.code:
            continue
        facts: dict[str, Any] = json.loads(done.out.splitlines()[-1]) | {"executable": python}
        if facts["torch"] and (facts["cuda"] or setup.rehearse == "soft"):
            return facts
    return {}


def torch_facts(setup: Setup) -> dict[str, Any]:
    """What prepare found."""
    facts: dict[str, Any] = earlier(setup, "prepare").get("torch") or {}
    return facts


def torch_python(setup: Setup) -> str:
    return str(torch_facts(setup).get("executable") or sys.executable)


def need_plugin(setup: Setup) -> dict[str, Any]:
    """Refused where torch is not here, or the bundle has no plugin for it, or its first words were no good: then what stands
    on them would only take the time of stages that can still find something out."""
    if setup.rehearse == "record":
        raise Refused("the recording device runs no operators")
    facts = torch_facts(setup)
    if not facts:
        raise Refused("no Python with PyTorch and CUDA is here")
    minor = ".".join(facts["torch"].split(".")[:2])
    folder = f"torch-{minor}" + ("-cuda" if facts["wheel"] else "")
    if not (setup.bundle / "lib" / folder / "libdevproxy_torch.so").exists():
        has = [str(p["folder"]) for p in setup.manifest.get("torch_plugins", [])]
        raise Refused(f"the bundle has no plugin for torch {facts['torch']} ({folder}; it has {', '.join(has) or 'none'})")  # fmt: skip
    first = earlier(setup, "t_first").get("first", {})
    if first.get("verdict") in (compare_torch.PROXY_ERROR, compare_torch.NOT_REACHED, compare_torch.NO_NATIVE):  # fmt: skip
        raise Refused(f"t_first did not get through: {first.get('why') or first['verdict']}")
    return facts


def torch_ways(setup: Setup, *options: str) -> tuple[Way, Way]:
    """Natively and through the proxy. Both see torch's own libraries alone, as a user's job does: compilers that lie
    elsewhere on the machine could make other code."""
    ways = []
    for way in (setup.native(), setup.proxied(*(options or ("--plain",)))):
        env = dict(way.env)
        ours = (str(setup.work / "native"), str(setup.work / "compilers"))
        kept = [p for p in env["LD_LIBRARY_PATH"].split(":") if p and p not in ours]
        if not setup.rehearse and way.prefix == [] and setup.driver not in DRIVER_PLACES:
            kept.insert(0, str(setup.work / "driver_alone"))
        env["LD_LIBRARY_PATH"] = ":".join(kept)
        env.pop("TRITON_LIBCUDA_PATH", None)
        env["PYTHONHASHSEED"] = "0"
        ways.append(Way(way.prefix, env))
    return ways[0], ways[1]


def torch_line(setup: Setup, program: str, *arguments: str) -> list[str]:
    small = ["--small"] if setup.small else []
    return [torch_python(setup), str(setup.bundle / "programs" / program), *small, *arguments]


def torch_sides(setup: Setup, program: str, *arguments: str, twice: bool = False, kept: Path | None = None) -> tuple[Side, Side]:  # fmt: skip
    """twice: the native side runs each case twice, so that it is known what can be compared."""
    sides = []
    for title, way in zip(("native", "proxied"), torch_ways(setup), strict=True):
        line = [*way.prefix, *torch_line(setup, program, *arguments)]
        if title == "native" and twice:
            line += ["--times", "2"]
        if title == "proxied" and setup.spoil:
            line += ["--spoil", setup.spoil] if program != "torch_models.py" else ["--seed", "1"]
        env = way.env | {"TORCHINDUCTOR_CACHE_DIR": str(setup.work / f"inductor-{title}"), "TRITON_CACHE_DIR": str(setup.work / f"triton-t-{title}")}  # fmt: skip
        stem = f"{Path(program).stem}-{hashlib.sha256(' '.join(arguments).encode()).hexdigest()[:6]}-{title}"
        lines = kept.with_name(f"{kept.name}-{title}.jsonl") if kept else setup.work / f"{stem}.jsonl"  # fmt: skip
        sides.append(Side(title, line, env, lines, setup.work / f"{stem}.log"))
    return sides[0], sides[1]


def say_trouble(report: Report, *sides: Side) -> None:
    for side in sides:
        if side.trouble:
            report.put(f"trouble, {side.title}", side.trouble[:20])
            report.say(f"{side.title}: {side.said()}")


def compare_cases(
    setup: Setup,
    report: Report,
    program: str,
    names: Sequence[str],
    key: str,
    *,
    twice: bool = False,
    at_once: bool = True,
    alarm_s: int = 40,
) -> Table:
    """Runs the cases on both sides, within the stage's time, and puts what became of them into the report."""
    only = ["--only", ",".join(names)] if names else []
    alarm = ["--alarm", str(round(alarm_s * patience))]
    native, proxied = torch_sides(setup, program, *alarm, *only, twice=twice)
    for side in (native, proxied):
        side.wanted, side.silent_s = tuple(names), alarm_s + 20.0
    run_both((native, proxied), time_left_s() - 4, at_once, patience)
    say_trouble(report, native, proxied)
    ours, theirs = native.read(), proxied.read()
    found = compare_torch.table(
        names or native.plan(), ours, theirs, lambda a, b: compare_torch.compare_result(a, b, key)
    )
    report.put("counts", found.counts())
    for name, (kind, why) in found.verdicts.items():
        facts: dict[str, Any] = {"verdict": kind} | ({"why": why} if why else {})
        for title, lines in (("native", ours), ("proxied", theirs)):
            one = lines.get(name, {})
            if "shown" in one:
                facts[title] = one["shown"]
            facts[f"{title}_s"] = one.get("s")
        report.put(name, facts)
    return found


def judge(found: Table, what: str) -> None:
    """Raises Failed unless all are as natively."""
    if wrong := found.names(*compare_torch.WRONG, compare_torch.NOT_REACHED):
        first = "; ".join(f"{name}: {why or 'not reached'}" for name, why in list(wrong.items())[:6])  # fmt: skip
        raise Failed(f"{len(wrong)} of {len(found.verdicts)} {what} are not as natively: {first}")
    if not found.names(compare_torch.BITWISE):
        raise Failed(f"no {what} run natively: nothing was compared")


@stage(150, 35)
def t_first(setup: Setup, report: Report) -> None:
    """PyTorch's first words through the plugin: a copy, sums, cuBLAS, cuDNN, cuSOLVER, cuFFT, random numbers; how long loading takes; facts; generators, streams, errors."""
    report.put("torch", need_plugin(setup))
    begin = time.monotonic()
    first = ["first", "facts", "generators", "streams", "checks"]
    # One behind the other: the times of the first calls are looked at.
    found = compare_cases(setup, report, "torch_chapters.py", first, "same", at_once=False)
    report.put("both_s", round(time.monotonic() - begin, 1))
    judge(found, "chapters")


OPS_SAMPLES = 3
CONFIRM_S = 30.0  # of the sweep's time, for looking again at what differs


@stage(130, 70)
def t_ops(setup: Setup, report: Report) -> None:
    """torch's op_db in every type that the device has, forward and backward: bits against native. What it has no time for, the next call goes on with."""
    facts = need_plugin(setup)
    if not facts["numpy"]:
        raise Refused("op_db needs numpy, which that Python has not")
    # Beside the bundle, and for this very bundle: a second call on the same machine finds it.
    mark = hashlib.sha256((setup.bundle / "manifest.json").read_bytes()).hexdigest()[:12]
    progress = (setup.work if setup.rehearse else setup.bundle.parent / "gpu-check-progress") / f"ops-{mark}"  # fmt: skip
    progress.parent.mkdir(exist_ok=True)
    more = ["--samples", str(1 if setup.small else OPS_SAMPLES)]
    if setup.ops_start:
        more += ["--start", setup.ops_start]
    if setup.ops:
        more += ["--only", setup.ops]
        progress = setup.work / "ops-asked"
    elif setup.small:
        more += ["--types", "float32"]
    native, proxied = torch_sides(setup, "torch_ops.py", *more, twice=True, kept=progress)
    report.put("already_done", len(proxied.read()))
    run_both((native, proxied), max(10.0, time_left_s() - CONFIRM_S - 8), True, patience)
    say_trouble(report, native, proxied)
    plan, ours, theirs = native.plan(), native.read(), proxied.read()
    if setup.ops:
        plan = [name for name in plan if name in setup.ops.split(",")]
    if not plan or not ours:
        raise Failed(f"the sweep does not run natively: {native.said()}")
    if set(proxied.plan()) != set(plan):
        report.put("other_plan", sorted(set(plan) ^ set(proxied.plan()))[:40])
    reached = [name for name in plan if name in ours and name in theirs]
    found = compare_torch.table(reached, ours, theirs, compare_torch.compare_op)
    differ = list(found.names(compare_torch.DIFFERENT))[:60]
    if (
        differ and not setup.small
    ):  # several times more, in another process: does it differ from itself?
        again = Side("again", [*native.command, "--times", "6", "--only", ",".join(differ)], native.env, setup.work / "ops-again.jsonl", setup.work / "ops-again.log")  # fmt: skip
        again.run(min(CONFIRM_S, time_left_s() - 5), patience)
        for name, facts in again.read().items():
            unsteady = any(sample.get("unsteady") for sample in facts.get("samples", []))
            if unsteady or compare_torch.compare_op(ours[name], facts)[0] == compare_torch.DIFFERENT:  # fmt: skip
                found.verdicts[name] = (compare_torch.UNSTEADY, found.verdicts[name][1])
    report.put("ops", {"planned": len(plan), "reached": len(reached), "counts": found.counts(), "bitwise_fraction": found.fraction()})  # fmt: skip
    by_type: dict[str, dict[str, int]] = {}
    for name, (kind, _) in found.verdicts.items():
        counts = by_type.setdefault(name.split("/")[0], {})
        counts[kind] = counts.get(kind, 0) + 1
    report.put("by_type", by_type)
    wrong = found.names(*compare_torch.WRONG)
    report.put("not_bitwise", dict(list(wrong.items())[:150]))
    others = {name: list(one) for name, one in found.verdicts.items() if one[0] != compare_torch.BITWISE}  # fmt: skip
    write_whole(setup.keep / "torch-ops.json", json.dumps(others, indent=0) + "\n")
    if len(reached) < len(plan) and not setup.small:
        # Passed by with --ops-start, they are another call's.
        behind = plan[plan.index(setup.ops_start) :] if setup.ops_start in plan else plan
        todo = next((name for name in behind if name not in theirs or name not in ours), "")
        if todo:
            report.put(GO_ON, todo)
    if wrong:
        first = "; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:8])
        raise Failed(f"{len(wrong)} of {len(reached)} are not bitwise as natively: {first}")
    if not found.names(compare_torch.BITWISE):
        raise Failed("nothing could be compared")


@stage(130, 50)
def t_models(setup: Setup, report: Report) -> None:
    """MLP, ResNet, BERT, GPT-2, LSTM, U-Net in plain torch, 20 steps each by many ways (autocast, scaler, channels_last, fused, attention): losses, parameters and moments bit for bit."""
    need_plugin(setup)
    found = compare_cases(setup, report, "torch_models.py", [], "result", twice=True)
    not_reached = found.names(compare_torch.NOT_REACHED)
    if not_reached:
        report.put(NOT_REACHED, list(not_reached))
        report.say(f"not reached: {', '.join(not_reached)}")
    judge(Table({n: v for n, v in found.verdicts.items() if n not in not_reached}), "models")


# Of the native time of a step.
TORCH_TARGETS = {"resnet50": 1.01, "bert_base": 1.01, "gpt2_small": 1.01, "launch_bound": 1.0}
TORCH_STEPS = {"resnet50": 8, "bert_base": 8, "gpt2_small": 8, "launch_bound": 500}
PAIRS = 7


class Partner:
    """A program that is told by lines what to do and answers each with a line of JSON (tests/gpu/torch_cost.py)."""

    def __init__(self, way: Way, line: Sequence[str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as said:
            self.process = subprocess.Popen(
                [*way.prefix, *line], env=way.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=said, start_new_session=True,
            )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self.lines.put(line.decode(errors="replace"))
        self.lines.put("")

    def answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=max(0.1, limit_s))
        except queue.Empty:
            raise Failed(f"no answer within {limit_s:.0f} s") from None
        if not line:
            said = (read(str(self.log)) or "").splitlines()[-3:]
            raise Failed(f"the program ended: {' | '.join(said)[:500]}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def ask(self, line: str, limit_s: float) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return self.answer(limit_s)


@stage(120, 40)
def t_cost(setup: Setup, report: Report) -> None:
    """A step of ResNet-50, BERT base, GPT-2 small and of twenty small ops, natively and proxied by turns: medians and ratios."""
    need_plugin(setup)
    ways = dict(zip(("native", "proxied"), torch_ways(setup), strict=True))
    line = torch_line(setup, "torch_cost.py")
    partners = {title: Partner(way, line, setup.work / f"cost-{title}.log") for title, way in ways.items()}  # fmt: skip
    wrong = []
    try:
        ready = {title: one.answer(min(100, time_left_s() - 10)) for title, one in partners.items()}
        report.put("ready", {title: facts["ready"] for title, facts in ready.items()})
        cases = [c for c in TORCH_TARGETS if c in ready["native"]["cases"]]
        for number, case in enumerate(reversed(cases)):  # the launch-bound one first: it is quick
            budget = (time_left_s() - 8) / (len(cases) - number)
            if why := cost_of(case, partners, report, budget, setup.small):
                wrong.append(f"{case}: {why}")
        for one in partners.values():
            assert one.process.stdin
            one.process.stdin.close()
    except (BrokenPipeError, Failed) as error:
        wrong.append(str(error) or "a program ended")
    if wrong:
        raise Failed("; ".join(wrong))


def cost_of(case: str, partners: dict[str, Partner], report: Report, budget_s: float, small: bool) -> str:  # fmt: skip
    """Puts medians and ratios into the report. Returns what is wrong: not the ratios, those are only shown."""
    end = time.monotonic() + budget_s
    steps = 2 if small else TORCH_STEPS[case]
    losses = {}
    for title, partner in partners.items():
        answer = partner.ask(f"warm {case} {2 if small else 12}", end - time.monotonic() + 20)
        if "error" in answer:
            return f"{title}: {answer['error']}"
        losses[title] = answer["loss"]
    taken: dict[str, dict[str, list[float]]] = {}
    for turn in range(2 if small else PAIRS):
        began = time.monotonic()
        order = list(partners) if turn % 2 == 0 else list(reversed(partners))
        for title in order:
            answer = partners[title].ask(
                f"time {case} {steps}", max(10, end - time.monotonic() + 20)
            )
            if "error" in answer:
                return f"{title}: {answer['error']}"
            for key in ("ms", "waiting_ms"):
                taken.setdefault(key, {}).setdefault(title, []).append(answer[key])
        if time.monotonic() + (time.monotonic() - began) > end:  # another turn would not fit
            break
    for partner in partners.values():
        partner.ask(f"drop {case}", 20)
    facts: dict[str, Any] = {"target": TORCH_TARGETS[case], "loss": losses}
    for key, sides in taken.items():
        pairs = [b / a for a, b in zip(sides["native"], sides["proxied"], strict=True)]
        facts[key] = {t: round(statistics.median(v), 4) for t, v in sides.items()}
        facts[key] |= {
            "ratio_of_medians": round(facts[key]["proxied"] / facts[key]["native"], 4),
            "median_of_ratios": round(statistics.median(pairs), 4),
            "pairs": [[round(a, 4), round(b, 4)] for a, b in zip(sides["native"], sides["proxied"], strict=True)],
        }  # fmt: skip
    facts["target_met"] = facts["ms"]["ratio_of_medians"] <= TORCH_TARGETS[case]
    report.put(case, facts)
    return ""


def gpt2_line(setup: Setup, steps: int) -> list[str]:
    line = [torch_python(setup), str(setup.bundle / "programs" / "torch_train.py"), "--steps", str(steps)]  # fmt: skip
    if setup.small:
        return [*line, "--small", "1", "--ballast-mib", "16"]
    return [*line, "--ballast-mib", "1024"]


def gate_of(setup: Setup, name: str) -> Path:
    """How far the job may go (tests/subjects/gate.py): it waits for what is done with it, however long that takes."""
    return setup.work / f"{name}.gate"


def open_gate(setup: Setup, name: str, to: str) -> None:
    gate = gate_of(setup, name)
    fresh = gate.with_suffix(".fresh")
    fresh.symlink_to(to)
    fresh.rename(gate)


@contextlib.contextmanager
def gpt2_job(setup: Setup, name: str, steps: int, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:  # fmt: skip
    """A job in training, slowly, begun; yields it and the environment for devproxy's verbs."""
    _, way = torch_ways(setup, "--name", name, "--store", str(setup.work / f"{name}.store"))
    env = way.env | {"DEVPROXY_LOG": "warn,server=info", "TEST_GATE": str(gate_of(setup, name))}
    line = [*way.prefix, *gpt2_line(setup, steps), "--seconds-per-step", "0.08"]
    with open(log, "wb") as out:
        job = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)  # fmt: skip
    try:
        yield job, env
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def gpt2_digest(setup: Setup, report: Report, steps: int) -> str | None:
    """Of the native run, kept for the stages behind; a run of other steps is another one."""
    kept = setup.work / f"gpt2-{steps}.digest"
    if not kept.exists():
        native, _ = torch_ways(setup)
        done = native.run(gpt2_line(setup, steps), 60)
        report.put("native", {"code": done.code, "seconds": done.seconds, "median step": re.findall(r"median step ([\d.]+) us", done.out)})  # fmt: skip
        if done.code or not digest_of(done.out):
            raise Failed(f"the training program does not run natively: {done.brief()}")
        kept.write_text(digest_of(done.out) or "")
    return kept.read_text()


def gpt2_steps(setup: Setup) -> int:
    return 120 if setup.small else 200


def at_step(log: Path, step: int, job: subprocess.Popen[bytes]) -> bool:
    """Or has it ended?"""
    return steps_in(log) >= step or job.poll() is not None


@stage(90, 25)
def t_migrate(setup: Setup, report: Report) -> None:
    """Device memory and torch's state out and in, without CRIU: the GPT-2 job's server is replaced on the same GPU (devproxy migrate), twice; the digest is the native one."""
    need_plugin(setup)
    steps = gpt2_steps(setup)
    want = gpt2_digest(setup, report, steps)
    log, name = setup.work / "gpt2-migrate.log", "gpucheck-migrate"
    ctl = [sys.executable, "-m", "devproxy.cli.ctl"]
    open_gate(setup, name, str(steps // 3 + 10))
    with gpt2_job(setup, name, steps, log) as (job, env):
        for turn, step in ((1, steps // 6), (2, steps // 3)):
            begun = functools.partial(at_step, log, step, job)
            wait_for(begun, 60, f"step {step}")
            if job.poll() is not None:
                raise Failed(f"the job ended with {job.returncode}: {log.read_text()[-800:]}")
            begin = time.perf_counter()
            moved = run([*ctl, "migrate", name, "--to", "0", "--json"], env, 40)
            facts = json.loads(moved.out) if moved.code == 0 else moved.brief()
            report.put(f"migrate {turn}", {"code": moved.code, "s": round(time.perf_counter() - begin, 2), "at_step": steps_in(log), "facts": facts})  # fmt: skip
            if moved.code:
                raise Failed(f"devproxy migrate: {(moved.out + moved.err)[-1200:]}")
            for what, way in (("dumped", "out"), ("loaded", "in")):
                if told := servers_say(setup, what):
                    report.put(f"{what} {turn}", rate(setup, *told, way))
        open_gate(setup, name, "end")
        wait_for(lambda: digest_of(log.read_text()) or job.poll() is not None, 60, "the digest")
        wait_for(lambda: digest_of(log.read_text()), 2, f"the digest: {log.read_text()[-600:]}")
    got = digest_of(log.read_text())
    report.put("digests", {"native": want, "after": got})
    if got != want:
        raise Failed("after two changes of the server the numbers are others")


@stage(120, 30)
def t_checkpoint(setup: Setup, report: Report) -> None:
    """The GPT-2 job: checkpoint, kill -9 of everything, restore, the native digest. Where CRIU works; else t_migrate is what there is."""
    need_plugin(setup)
    criu = setup.bundle / "criu" / "sbin" / "criu"
    if not setup.rehearse:
        checked = run([str(criu), "check"], dict(os.environ), 15) if criu.exists() else None
        if checked is None or checked.code:
            why = checked.brief() if checked else "the bundle was made without CRIU"
            raise Refused(f"CRIU does not work here ({why}): t_migrate tests dump and restore of the device's side")  # fmt: skip
    checkpoint_of(setup, report, "gpt2")


@stage(80, 20)
def t_memory(setup: Setup, report: Report) -> None:
    """What torch says is allocated and free, OutOfMemoryError at the right call, and a kernel's own fault as an exception: as natively."""
    need_plugin(setup)
    names = ["memory", "oom", "fault"]
    # One behind the other: each fills the whole GPU.
    found = compare_cases(setup, report, "torch_chapters.py", names, "same", at_once=False)
    judge(found, "chapters")


@stage(60, 15)
def t_graphs(setup: Setup, report: Report) -> None:
    """torch.cuda.graph: forward, a whole step, dropout, shared pools, make_graphed_callables: bit for bit. And an error that only the op finds."""
    need_plugin(setup)
    names = ["graph", "graph_training", "graph_callables", "check_types"]
    judge(compare_cases(setup, report, "torch_chapters.py", names, "same"), "chapters")


@stage(130, 30)
def t_compile(setup: Setup, report: Report) -> None:
    """torch.compile: Inductor's Triton kernels beside ATen's ops in one job, bit for bit; with graphs (reduce-overhead) it may be refused by name."""
    need_plugin(setup)
    names = ["compile", "compile_conv", "compile_reduce_overhead"]
    found = compare_cases(setup, report, "torch_chapters.py", names, "same", alarm_s=90)
    kind, why = found.verdicts["compile_reduce_overhead"]
    if kind == compare_torch.PROXY_ERROR and "not supported behind devproxy" in why:
        report.put("refused", why)
        del found.verdicts["compile_reduce_overhead"]
    judge(found, "chapters")


@stage(70, 15)
def t_two(setup: Setup, report: Report) -> None:
    """Two GPT-2 jobs at once on one GPU: both have the native digest."""
    need_plugin(setup)
    steps = gpt2_steps(setup)
    want = gpt2_digest(setup, report, steps)
    _, way = torch_ways(setup)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: way.run(gpt2_line(setup, steps), time_left_s() / patience - 3), range(2)))  # fmt: skip
    for number, done in enumerate(both):
        report.put(f"job {number}", {"code": done.code, "seconds": done.seconds, "digest": digest_of(done.out), "said": done.brief() if done.code else ""})  # fmt: skip
    report.put("native digest", want)
    if any(digest_of(done.out) != want for done in both):
        raise Failed("not the native digest in both")


# -- d. cost ------------------------------------------------------------------------------------------------------------


@stage(130, 40, call=2, needs=("e_host_memory",))
def d_cost(setup: Setup, report: Report) -> None:
    """What calls cost at the client, in turn natively, proxied, as a job that can be checkpointed, and with pinned memory
    registered: medians of up to three runs each, and their ratios."""
    ways = {
        "native": setup.native(),
        "proxied": setup.proxied("--plain"),
        "namespaces": setup.proxied(),
        "registered": setup.proxied("--plain", registered=True),
    }
    if why := cannot_register(setup):
        report.put("registered", f"refused: {why}")
        del ways["registered"]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    # Turn by turn, so that whatever time there is, each way has had as much of it.
    for turn in range(1 if setup.small else 3):
        for title in ("cost", "cudart/cost"):
            program = setup.bundle / "programs" / title
            if not program.exists():
                continue
            for name, way in ways.items():
                if turn and not found.get((title, name)):
                    continue  # it did not run the first time
                done = way.run([str(program), *(["small"] if setup.small else [])], 30)
                if done.code:
                    report.say(f"{title}, {name}, run {turn}: {done.code}: {done.err.strip()[-800:]}")  # fmt: skip
                    if name in ("native", "proxied"):
                        raise Failed(f"{title}, {name}: it does not run: {done.brief()}")
                    continue
                found.setdefault((title, name), []).append(json.loads(done.out.splitlines()[0]))
                report.put(f"{title}, {name}, runs", found[title, name])
        table = medians_of(found)
        report.put("medians", table)
        for call in ("launch_async_us", "cudart_launch_async_us"):
            if row := table.get(call):
                report.put(f"{call}, target met", {n: row[n] <= row["native"] for n in ways if n in row and n != "native"})  # fmt: skip
    if lost := [f"{title}, {n}" for title, _ in found for n in ways if not found.get((title, n))]:
        raise Failed(f"did not run: {', '.join(sorted(set(lost)))}")


def medians_of(found: dict[tuple[str, str], list[dict[str, float]]]) -> dict[str, Any]:
    """By the call's name: the median of each way's runs, and what it is of the native one."""
    table: dict[str, Any] = {}
    for (_, way), runs in found.items():
        for call in runs[0]:
            table.setdefault(call, {})[way] = statistics.median(one[call] for one in runs)
    for row in table.values():
        if native := row.get("native"):
            row["ratio"] = {w: round(us / native, 3) for w, us in row.items() if w != "native"}
    return table


# -- e. host memory, dump and load --------------------------------------------------------------------------------------


@stage(40, 8, direct=True)
def e_host_memory(setup: Setup, report: Report) -> None:
    """Registering shared memory: from memfd and tmpfs, by size, cost of it, and with pages taken away underneath."""
    gpu = Gpu(setup.driver)
    usual_mib, most_mib = (16, 64) if setup.small else (256, 1024)
    size, most = usual_mib * MIB, most_mib * MIB
    stream, device = gpu.stream(), gpu.memory(size)

    def moved(host: int, size: int) -> dict[str, float]:
        figures = {}
        for way, copy in (("h2d", gpu.to_device), ("d2h", lambda a, b, n, s: gpu.to_host(b, a, n, s))):  # fmt: skip
            took = []
            for _ in range(5):
                begin = time.perf_counter()
                copy(device, host, size, stream)
                gpu.wait(stream)
                took.append(time.perf_counter() - begin)
            figures[f"{way}_GBps"] = round(size / statistics.median(took) / 1e9, 2)
        return figures

    host = gpu.pinned(size)
    ctypes.memset(host, 1, size)
    report.put("driver_allocated", moved(host, size))
    for kind in ("memfd", "tmpfs"):
        if kind == "memfd":
            fd = os.memfd_create("gpu-check")
        else:
            fd = os.open(setup.shm() / "registered", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, most)
        # hal/cuda's is a file of /dev/shm, behind the device's range.
        at = map_at(RANGE_BASE + DEVICE_BYTES, fd, most) if kind == "tmpfs" else 0
        figures: dict[str, Any] = {"at_the_windows_address": at != 0}
        if not at:
            at, _view = host_map(fd, most)
        for size_mib in sorted({2, 64, usual_mib, most_mib}):
            ctypes.memset(at, 2, min(size_mib * MIB, size))
            begin = time.perf_counter()
            code = gpu.result("cuMemHostRegister_v2", PTR(at), SIZE(size_mib * MIB), U32(2))
            took = time.perf_counter() - begin
            figures[f"{size_mib}MiB"] = gpu.text(code) if code else {"register_ms": round(took * 1e3, 2)}  # fmt: skip
            if code:
                continue
            pointer = U64()
            code = gpu.result(
                "cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), PTR(at), U32(0)
            )
            figures[f"{size_mib}MiB"]["same_address"] = (
                gpu.text(code) if code else pointer.value == at
            )
            if size_mib == usual_mib:
                figures[f"{size_mib}MiB"] |= moved(at, size)
                ctypes.memset(at, 3, size)
                gpu.to_device(device, at, size, stream)
                gpu.wait(stream)
                same = gpu.words(device + size - 16, 4) == [0x03030303] * 4
                figures[f"{size_mib}MiB"]["content"] = same
            begin = time.perf_counter()
            gpu.call("cuMemHostUnregister", PTR(at))
            figures[f"{size_mib}MiB"]["unregister_ms"] = round(
                (time.perf_counter() - begin) * 1e3, 2
            )
        report.put(kind, figures)
        # The client gives pages of freed pinned memory back (MADV_REMOVE): what does a registration show then?
        if gpu.result("cuMemHostRegister_v2", PTR(at), SIZE(2 * MIB), U32(2)) == 0:
            removed = ctypes.CDLL(None, use_errno=True).madvise(PTR(at), SIZE(2 * MIB), 9)
            ctypes.memset(at, 4, 2 * MIB)
            gpu.to_device(device, at, 2 * MIB, stream)
            gpu.wait(stream)
            report.put(f"{kind}_after_MADV_REMOVE", {"madvise": removed, "device_sees_new_pages": gpu.words(device, 1) == [0x04040404]})  # fmt: skip
            gpu.call("cuMemHostUnregister", PTR(at))
        os.close(fd)


@stage(40, 8, direct=True)
def e_dump(setup: Setup, report: Report) -> None:
    """Device memory out and in as hal/cuda does it: staged through page-locked pieces, two in flight, into a memfd."""
    gpu = Gpu(setup.driver)
    total = 64 * MIB if setup.small else GIB
    device, stream = gpu.memory(total, RANGE_BASE), gpu.stream()
    gpu.call("cuMemsetD32Async", U64(device), U32(0x01020304), SIZE(total // 4), stream)
    gpu.wait(stream)
    fd = os.memfd_create("gpu-check")
    os.ftruncate(fd, total)
    at, _view = host_map(fd, total)
    ctypes.memset(at, 0, total)
    raw, once = gpu.pinned(64 * MIB), min(512 * MIB, total)

    def raw_rate(out: bool) -> float:
        took = []
        for _ in range(5):
            begin = time.perf_counter()
            for n in range(once // (64 * MIB)):
                (gpu.to_host if out else lambda h, d, s, t: gpu.to_device(d, h, s, t))(raw, device + n * 64 * MIB, 64 * MIB, stream)  # fmt: skip
            gpu.wait(stream)
            took.append(time.perf_counter() - begin)
        return round(once / statistics.median(took) / 1e9, 2)

    rates = {"out": raw_rate(True), "in": raw_rate(False)}
    report.put("pcie_GBps", rates)
    for piece_mib in (1, 4, 16):
        piece, streams = piece_mib * MIB, (gpu.stream(), gpu.stream())
        slots = (gpu.pinned(piece), gpu.pinned(piece))
        figures = {}
        for way in ("out", "in"):
            begin = time.perf_counter()
            for n in range(total // piece):
                slot, lane, offset = slots[n % 2], streams[n % 2], n * piece
                gpu.wait(lane)
                if way == "out":
                    if n >= 2:
                        ctypes.memmove(at + offset - 2 * piece, slot, piece)
                    gpu.to_host(slot, device + offset, piece, lane)
                else:
                    ctypes.memmove(slot, at + offset, piece)
                    gpu.to_device(device + offset, slot, piece, lane)
            for n in (total // piece, total // piece + 1):
                gpu.wait(streams[n % 2])
                if way == "out":
                    ctypes.memmove(at + (n - 2) * piece, slots[n % 2], piece)
            figures[f"{way}_GBps"] = round(total / (time.perf_counter() - begin) / 1e9, 2)
        figures["of_pcie_out"] = round(figures["out_GBps"] / rates["out"], 2)
        figures["of_pcie_in"] = round(figures["in_GBps"] / rates["in"], 2)
        report.put(f"staged_{piece_mib}MiB", figures)
    same = all(U32.from_address(at + o).value == 0x01020304 for o in range(0, total, 4093 * 4))
    report.put("content", same)
    code = gpu.result("cuMemHostRegister_v2", PTR(at), SIZE(total), U32(0))
    if code == 0:
        begin = time.perf_counter()
        gpu.to_host(at, device, total, stream)
        gpu.wait(stream)
        report.put("straight_into_a_registered_memfd_GBps", round(total / (time.perf_counter() - begin) / 1e9, 2))  # fmt: skip
    else:
        report.put("straight_into_a_registered_memfd_GBps", gpu.text(code))
    if not same:
        raise Failed("what came out is not what was in device memory")


# -- f. checkpoints -----------------------------------------------------------------------------------------------------


@stage(40, 8, call=2)
def f_criu(setup: Setup, report: Report) -> None:
    """Is CRIU usable here, by its own check and by `devproxy doctor`?"""
    criu = setup.bundle / "criu" / "sbin" / "criu"
    if not criu.exists():
        raise Refused("the bundle was made without CRIU")
    report.put("version", run([str(criu), "--version"], dict(os.environ), 10).out.strip().splitlines()[:2])  # fmt: skip
    plain = run([str(criu), "check"], dict(os.environ), 15)
    report.put("check", {"code": plain.code, "said": (plain.out + plain.err).strip()[-1500:]})
    every = run([str(criu), "check", "--all"], dict(os.environ), 15)
    report.put("check_all", {"code": every.code, "said": (every.out + every.err).strip()[-1500:]})
    doctor = run([sys.executable, "-m", "devproxy.cli.ctl", "doctor"], setup.proxied_env(), 30)
    report.put("doctor", {"code": doctor.code, "said": (doctor.out + doctor.err).strip()[-3000:]})
    if plain.code:
        raise Failed("criu check: " + plain.brief())


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s * patience
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.02)


def steps_in(path: Path) -> int:
    text = path.read_text(errors="replace") if path.exists() else ""
    return max(map(int, re.findall(r" step (\d+) ", text)), default=0)


# Device memory that the training programs hold besides their own, so that a rate can be told from a time. numba's and
# PyTorch's fill theirs from the host.
BALLAST_MIB = {"driver": 4096, "cudart": 1024, "numba": 256, "torch": 256}


def ballast_mib(setup: Setup, subject: str) -> int:
    return 16 if setup.small else BALLAST_MIB[subject]


@stage(60, 20, call=2, direct=True, needs=("e_dump",))
def f_cuda_checkpoint(setup: Setup, report: Report) -> None:
    """The driver's own checkpoints (cuCheckpointProcess*) of the training program that f_checkpoint takes, running natively."""
    control = Driver(setup.driver)
    control.call("cuInit", U32(0))
    names = ("Lock", "Checkpoint", "GetState", "Restore", "Unlock")
    there = {n: control.has(f"cuCheckpointProcess{n}") for n in names}
    report.put("api", there)
    report.put("cuda-checkpoint", shutil.which("cuda-checkpoint"))
    if not all(there.values()):
        raise Refused("the driver has no cuCheckpointProcess*")
    log, mib = setup.work / "native-train.log", ballast_mib(setup, "driver")
    line = train(setup, 150, "--ballast-mib", str(mib))
    whole = setup.native().run(line, 30)
    report.put("digest_uninterrupted", digest_of(whole.out))
    if whole.code:
        raise Failed(f"the training program does not run natively: {whole.brief()}")
    with open(log, "wb") as out:
        native = setup.native()
        slow = [*native.prefix, *line, "--seconds-per-step", "0.02"]
        job = subprocess.Popen(slow, env=native.env, stdout=out, stderr=out, start_new_session=True)
    wait_for(lambda: steps_in(log) >= 20 or job.poll() is not None, 20, "the training program's steps")  # fmt: skip
    if job.poll() is not None:
        raise Failed(f"the training program ended natively: {log.read_text()[-600:]}")
    zeros, state = (U64 * 8)(), INT(-1)
    lock = (U32 * 16)(10_000)
    took = {}
    for name, arguments in (("Lock", lock), ("Checkpoint", zeros), ("Restore", zeros), ("Unlock", zeros)):  # fmt: skip
        begin = time.perf_counter()
        code = control.result(f"cuCheckpointProcess{name}", INT(job.pid), arguments)
        took[name] = time.perf_counter() - begin
        report.put(name, {"result": control.text(code), "ms": round(took[name] * 1e3, 1)})
        control.result("cuCheckpointProcessGetState", INT(job.pid), ctypes.byref(state))
        report.put(f"state_after_{name}", state.value)
        if code:
            kind = Refused if code == 801 else Failed
            raise kind(f"cuCheckpointProcess{name}: {control.text(code)}")
    report.put("dump", rate(setup, mib * MIB, took["Checkpoint"], "out"))
    report.put("load", rate(setup, mib * MIB, took["Restore"], "in"))
    if job.wait(20):
        raise Failed(f"the training program ended with {job.returncode}: {log.read_text()[-600:]}")
    report.put("digest", digest_of(log.read_text()))
    if digest_of(log.read_text()) != digest_of(whole.out):
        raise Failed("after the driver's own checkpoint the numbers are others")


PCIE_TARGET = 0.8  # of what e_dump measured


def rate(setup: Setup, size: int, seconds: float, way: str) -> dict[str, Any]:
    """Of bytes moved between device and host memory, against the PCIe rate of this campaign. way: out or in."""
    speed = size / seconds / 1e9 if seconds > 0 else 0.0
    facts: dict[str, Any] = {"bytes": size, "s": round(seconds, 4), "GBps": round(speed, 2)}
    if pcie := earlier(setup, "e_dump").get("pcie_GBps", {}).get(way):
        facts |= {"of_pcie": round(speed / pcie, 3), "target_met": speed >= PCIE_TARGET * pcie}
    return facts


@stage(110, 40, call=2, needs=("e_dump",))
def f_checkpoint(setup: Setup, report: Report) -> None:
    """The whole job: checkpoint, kill -9 of everything, restore, equal to native; dump and load against the PCIe rate."""
    report.put("beside: cuCheckpointProcess*", {
        key: earlier(setup, "f_cuda_checkpoint").get(key) for key in ("Lock", "Checkpoint", "Restore", "Unlock", "dump", "load")
    })  # fmt: skip
    checkpoint_of(setup, report, "driver")


@stage(110, 35, call=3, needs=("e_dump",))
def f_checkpoint_cudart(setup: Setup, report: Report) -> None:
    """The same with a training program in CUDA C++, on the runtime."""
    checkpoint_of(setup, report, "cudart")


@stage(110, 45, call=3, needs=("e_dump",))
def f_checkpoint_numba(setup: Setup, report: Report) -> None:
    """The same with a training program on numba-cuda, which compiles its kernels while it runs."""
    checkpoint_of(setup, report, "numba")


@stage(110, 45, call=3, needs=("e_dump",))
def f_checkpoint_torch(setup: Setup, report: Report) -> None:
    """The same with PyTorch's unmodified wheel, without the plugin: a model of element-wise layers under AdamW."""
    checkpoint_of(setup, report, "torch")


def checkpoint_of(setup: Setup, report: Report, subject: str) -> None:
    line = subjects(setup)[subject]
    if missing := missing_of(subject, line, setup):
        raise Refused(missing)
    if subject != "gpt2":
        steps = "300" if setup.small else "400"
        line += ["--steps", steps, "--ballast-mib", str(ballast_mib(setup, subject))]
    name = f"gpucheck-{subject}"
    log, store = setup.work / f"{name}.log", setup.work / f"{name}.store"
    job_options = ("--name", name, "--store", str(store))
    if subject == "gpt2":
        (_, job_way), first, second, start_s = torch_ways(setup, *job_options), 15, 25, 80.0
        want = gpt2_digest(setup, report, gpt2_steps(setup))
        open_gate(setup, name, str(second))
        job_way = Way(job_way.prefix, job_way.env | {"TEST_GATE": str(gate_of(setup, name))})
    else:
        job_way, first, second, start_s = setup.proxied(*job_options), 30, 60, 40.0
        if subject == "torch":
            job_way = Way(job_way.prefix, job_way.env | WITHOUT_PLUGIN)
        native = setup.native().run(line, 40)
        want = digest_of(native.out)
        report.put("native", {"code": native.code, "digest": want, "seconds": native.seconds})
        if native.code:
            raise Failed(f"the training program does not run natively: {native.brief()}")
    # The servers say in their logs how long device memory took; these are in the runtime folder while the job lives.
    env = job_way.env | {"DEVPROXY_LOG": "warn,server=info"}
    ctl = [sys.executable, "-m", "devproxy.cli.ctl"]
    with open(log, "wb") as out:
        whole = [*job_way.prefix, *line, "--seconds-per-step", "0.03"]
        job = subprocess.Popen(whole, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)  # fmt: skip
    wait_for(lambda: steps_in(log) >= first or job.poll() is not None, start_s, f"step {first}")
    if job.poll() is not None:
        raise Failed(f"the job ended with {job.returncode}: {log.read_text()[-800:]}")
    begin = time.perf_counter()
    image = run([*ctl, "checkpoint", name, "--json"], env, 60)
    facts = json.loads(image.out) if image.code == 0 else image.brief()
    report.put("checkpoint", {"code": image.code, "s": round(time.perf_counter() - begin, 2), "facts": facts})  # fmt: skip
    if image.code:
        raise Failed(f"devproxy checkpoint: {(image.out + image.err)[-1500:]}")
    if told := servers_say(setup, "dumped"):
        report.put("dump", rate(setup, *told, "out"))
    wait_for(lambda: steps_in(log) >= second, 30, f"step {second}")
    report.put("killed", kill_marked(f"DEVPROXY_SHM_DIR={setup.shm()}".encode()))
    at = steps_in(log)
    if subject == "gpt2":
        open_gate(setup, name, "end")
    begin = time.perf_counter()
    line_of_restore = [*ctl, "restore", name, "--store", str(store), "--output", str(log), "--json"]
    told = None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(run, line_of_restore, env, 60)
        while not restoring.done():  # afterwards the job may end, and the log with it
            told = servers_say(setup, "loaded") or told
            time.sleep(0.02)
        restore = restoring.result()
    facts = json.loads(restore.out) if restore.code == 0 else restore.brief()
    report.put("restore", {"code": restore.code, "s": round(time.perf_counter() - begin, 2), "killed_at_step": at, "facts": facts})  # fmt: skip
    if restore.code:
        raise Failed(f"devproxy restore: {(restore.out + restore.err)[-1500:]}")
    if told := servers_say(setup, "loaded") or told:
        report.put("load", rate(setup, *told, "in"))
    wait_for(lambda: digest_of(log.read_text()), 40, "the digest")
    got, nonces = (
        digest_of(log.read_text()),
        set(re.findall(r"^(\w+) step \d+ ", log.read_text(), re.M)),
    )
    report.put("digest_after_restore", got)
    report.put("one_process_throughout", len(nonces) == 1)
    if got == want and len(nonces) == 1:
        return
    if got != want:  # is it the checkpoint's fault?
        plain = Way(setup.proxied("--plain").prefix, job_way.env).run(line, 40)
        report.put("proxied", {"code": plain.code, "digest": digest_of(plain.out)})
    raise Failed("the restored run is not the native one")


def servers_say(setup: Setup, what: str) -> tuple[int, float] | None:
    """Bytes and seconds of the last line about device memory `dumped` or `loaded` in the logs of the living servers."""
    found = []
    # Not by pathlib: a folder that goes in the middle of the walk, as that of staging does, would be an error.
    for name in glob.glob("**/*.log", root_dir=setup.shm(), recursive=True):
        path = setup.shm() / name
        with contextlib.suppress(OSError):  # a job that ends takes its folder away
            found += re.findall(
                rf"\b{what}: bytes=(\d+) us=(\d+)", path.read_text(errors="replace")
            )
    return (int(found[-1][0]), int(found[-1][1]) / 1e6) if found else None


def kill_marked(mark: bytes) -> int:
    """kill -9 of every process of this campaign's runtime folder but ourselves. Returns how many."""
    killed: set[int] = set()
    for _ in range(100):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return len(killed)


# -- the command line -----------------------------------------------------------------------------------------------------


def find_driver(named: str) -> str:
    """An absolute path, or nothing: then each stage that needs the driver is refused."""
    for place in (named,) if named else DRIVER_PLACES:
        if os.path.exists(place):
            return os.path.abspath(place)
    if named:
        return ""
    # Where the loader itself finds it: ask a process that is not this one.
    code = 'import ctypes; ctypes.CDLL("libcuda.so.1"); print([l.split()[-1] for l in open("/proc/self/maps") if "libcuda.so" in l][0])'
    done = run([sys.executable, "-c", code], dict(os.environ), 20)
    return done.out.strip() if done.code == 0 else ""


@contextlib.contextmanager
def workplace(driver: str, bundle: Path) -> Iterator[Path]:
    """The campaign's folders: on disk, and one in /dev/shm."""
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    shm = Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/dev/shm"))
    try:
        (work / "shm").write_text(str(shm))
        (work / "native").mkdir()
        (work / "shim").mkdir()
        (work / "driver_alone").mkdir()
        for name in ("libcuda.so.1", "libcuda.so"):
            if driver:
                (work / "native" / name).symlink_to(driver)
                (work / "driver_alone" / name).symlink_to(driver)
            (work / "shim" / name).symlink_to(bundle / "lib" / "libcuda.so.1")
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def parse(argv: list[str]) -> argparse.Namespace:
    here = Path(__file__).resolve().parent
    beside = here if (here / "manifest.json").exists() else here.parent / "build" / "gpu-bundle"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=beside)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or here.parent / "gpu-check" if beside == here else here.parent / "build" / "gpu-check"))  # fmt: skip
    parser.add_argument("--driver", default="", help="the genuine libcuda.so.1")
    parser.add_argument("--limit", type=float, default=TOTAL_LIMIT_S, help="seconds for everything")
    parser.add_argument("--only", default="", help="names of stages, separated by commas")
    parser.add_argument(
        "--second", action="store_true", help="the stages that a first call keeps no time for"
    )
    parser.add_argument("--third", action="store_true", help="and those of a third call")
    parser.add_argument("--ops-start", default="", help="t_ops begins with this case (TYPE/OP)")
    parser.add_argument("--ops", default="", help="t_ops takes these cases alone (TYPE/OP,...)")
    parser.add_argument("--list", action="store_true", help="names the stages, in their order")
    parser.add_argument("--rehearse", default="", choices=["record", "soft"], help="for developers, without a GPU: this device of devproxy's on both sides of each comparison; with record no kernel is executed, so nothing is learnt but that the stages run")  # fmt: skip
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sysroot", default="", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--spoil", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    global patience
    options = parse(argv)
    patience = 5.0 if options.rehearse else 1.0
    if options.list:
        for one in STAGES:
            when = ("first", "second", "third")[one.call - 1]
            print(f"{one.name:20} {when:6} {one.least_s:3.0f} to {one.limit_s:3.0f} s  {' '.join((one.run.__doc__ or '').split())}")  # fmt: skip
        return 0
    bundle, options.out = options.bundle.resolve(), options.out.resolve()
    if options.stage:
        one = next(s for s in STAGES if s.name == options.stage)
        return run_here(
            one,
            Setup(
                bundle,
                options.work,
                options.driver,
                options.sysroot,
                options.small,
                options.rehearse,
                options.out,
                options.ops_start,
                options.ops,
                options.spoil,
            ),
            Report(options.report),
        )
    if not (bundle / "manifest.json").exists():
        print(f"gpu_check: no bundle at {bundle}: make gpu-bundle", file=sys.stderr)
        return 2
    only = frozenset(filter(None, options.only.split(",")))
    if unknown := only - {s.name for s in STAGES}:
        print(f"gpu_check: no stage {', '.join(sorted(unknown))}: --list", file=sys.stderr)
        return 2
    for asked, call in ((options.second, 2), (options.third, 3)):
        if asked:
            only |= {s.name for s in STAGES if s.call == call}
    if options.ops or (options.ops_start and only):
        only |= {"t_ops"}
    if only:
        only |= {name for s in STAGES if s.name in only for name in s.needs}
        if options.rehearse or any(
            n[:2] in ("c_", "d_", "f_", "t_") or n == "machine" for n in only
        ):
            only |= {"prepare"}  # the proxy needs what it unpacks
    begin = time.monotonic()
    become_subreaper()
    held = [] if options.rehearse else hold_devices()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu-check.log").write_bytes(b"")
    # In a rehearsal the stages that call the driver are jobs themselves, and their driver is devproxy's.
    shim = str(bundle / "lib" / "libcuda.so.1")
    driver_path = shim if options.rehearse else find_driver(options.driver)
    facts = json.loads((bundle / "manifest.json").read_text())
    about = {
        "command": " ".join([os.path.basename(sys.executable), *sys.argv]),
        "begun_unix_s": int(time.time()),
        "driver": driver_path,
        "devices_held_open": len(held),
        "bundle": {
            k: v
            for k, v in facts.items()
            if k not in ("files", "needs", "driver_symbols", "optional_driver_symbols")
        },
    }
    if options.rehearse:
        about["rehearsal"] = f"over devproxy's {options.rehearse} device: no GPU, no driver"
    with workplace("" if options.rehearse else driver_path, bundle) as work:
        setup = Setup(bundle, work, driver_path, options.sysroot, options.small, options.rehearse)

        def command_of(one: Stage, report: Path) -> list[str]:
            line = [
                sys.executable, os.path.abspath(__file__), "--stage", one.name, "--bundle", str(bundle),
                "--driver", driver_path, "--work", str(work), "--report", str(report), "--sysroot", options.sysroot,
                "--out", str(options.out), "--ops-start", options.ops_start, "--ops", options.ops, "--spoil", options.spoil,
                *(["--small"] if options.small else []),
            ]  # fmt: skip
            if not options.rehearse:
                return line
            return [*(setup.native().prefix if one.direct else []), *line, "--rehearse", options.rehearse]  # fmt: skip

        def env_of(one: Stage) -> dict[str, str] | None:
            return setup.native().env if options.rehearse and one.direct else None

        limit_s = options.limit - (time.monotonic() - begin)
        stages = [dataclasses.replace(s, limit_s=s.limit_s * patience) for s in STAGES]
        results = campaign(stages, command_of, options.out, work, about, limit_s, only, env_of)
    counts = {s: sum(r["status"] == s for r in results) for s in (OK, FAILED, REFUSED, NOT_RUN)}
    print(f"{counts} in {time.monotonic() - begin:.0f} s: {options.out / 'gpu-check.json'}")
    if about["next"]:
        print(f"next: {about['next']}")
    return 0 if counts[FAILED] == counts[REFUSED] == 0 and counts[OK] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
