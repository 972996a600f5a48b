# SPDX-License-Identifier: Apache-2.0
"""Health and topology of this machine's NVIDIA GPUs, from the driver's own management library (package nvidia-ml-py).

For the host's side: devproxy doctor, and preflight of --device cuda. The job's NVML is our shim, which knows neither.
Reads only. Importing this module loads nothing; read() loads the library, and unloads its session again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from devproxy.errors import Refused

SONAME = "libnvidia-ml.so.1"
MOST_LINKS = 18
# nvml.h, nvmlGpuTopologyLevel_t: how the paths of two GPUs meet, from the best to the worst.
LEVELS = {0: "board", 10: "switch", 20: "switches", 30: "bridge", 40: "numa", 50: "system"}
# nvml.h, nvmlClocksEventReasons: those that a fault of the machine causes; power caps and idling are no faults.
SLOWED = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
FABRIC_IN_PROGRESS, FABRIC_COMPLETED = 2, 3  # nvml.h, nvmlGpuFabricState_t
PROHIBITED = "prohibited"
COMPUTE_MODES = {0: "default", 2: PROHIBITED, 3: "exclusive process"}


@dataclass(frozen=True)
class Gpu:
    """One GPU. A value that this GPU or driver does not tell is None."""

    index: int
    name: str = ""
    uuid: str = ""
    bus: str = ""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: int | None = None
    temperature_c: int | None = None
    slowdown_at_c: int | None = None
    slowed: int | None = None  # bits of SLOWED
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retire_pending: bool | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    fabric_state: int | None = None
    fabric_error: int | None = None
    numa_node: int | None = None
    links_up: int | None = None
    links_down: int | None = None
    lost: str = ""  # the library's words, where the GPU does not answer


@dataclass(frozen=True)
class Machine:
    """links: (i, j) -> NVLink connections between them, where they are direct. levels: (i, j) -> a word of LEVELS."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]
    levels: dict[tuple[int, int], str] = field(default_factory=dict)
    links: dict[tuple[int, int], int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For --json: pairs as "0-1"."""
        return {
            "driver": self.driver,
            "cuda": self.cuda,
            "gpus": [asdict(gpu) | {"problems": problems(gpu)} for gpu in self.gpus],
            "topology": {f"{i}-{j}": word for (i, j), word in self.levels.items()},
            "nvlink": {f"{i}-{j}": count for (i, j), count in self.links.items()},
        }


def unusable(gpu: Gpu) -> tuple[str, str] | None:
    """Why no job can be served by this GPU, and what to do; None where nothing of that kind is known. Pure."""
    if gpu.lost:
        return f"it does not answer ({gpu.lost})", "reset it or restart the machine"
    if gpu.mig:
        return "it is partitioned (MIG), and devproxy takes whole GPUs", "nvidia-smi -mig 0"
    if gpu.compute_mode == PROHIBITED:
        return f"its compute mode is {PROHIBITED}", "nvidia-smi -c 0"
    return None


def problems(gpu: Gpu) -> list[str]:
    """What makes this GPU unfit for a job, or will soon; empty for a healthy one. Pure."""
    out = []
    if why := unusable(gpu):
        out.append(": ".join(why))
        if gpu.lost:
            return out
    if gpu.compute_mode not in (None, "default", PROHIBITED):
        out.append(
            f"its compute mode is {gpu.compute_mode}, and servers share a GPU: nvidia-smi -c 0"
        )
    if gpu.fabric_state == FABRIC_IN_PROGRESS:
        out.append("its NVSwitch fabric is not ready: wait, or look at nvidia-fabricmanager")
    if gpu.fabric_state == FABRIC_COMPLETED and gpu.fabric_error:
        out.append(
            f"its NVSwitch fabric failed (status {gpu.fabric_error}): restart nvidia-fabricmanager"
        )
    if gpu.remap_failed:
        out.append("row remapping failed: replace it")
    if gpu.remap_pending or gpu.retire_pending:
        out.append("it has bad memory rows that a reset takes out of use: nvidia-smi --gpu-reset")
    if gpu.ecc_uncorrected:
        out.append(
            f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded: reset it"
        )
    hot = gpu.temperature_c is not None and gpu.slowdown_at_c is not None
    if hot and gpu.temperature_c >= gpu.slowdown_at_c:  # type: ignore[operator]
        out.append(f"it is at {gpu.temperature_c} C and slows down from {gpu.slowdown_at_c} C on")
    slowed = [word for bit, word in SLOWED.items() if (gpu.slowed or 0) & bit]
    if slowed:
        out.append(f"it is slowed down: {', '.join(slowed)}")
    if gpu.links_up and gpu.links_down:
        out.append(f"{gpu.links_down} of {gpu.links_up + gpu.links_down} NVLinks are down")
    return out


def seen_by_cuda(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu] | None:
    """The GPUs by CUDA's numbers, or None where those cannot be told from here. Pure.

    CUDA's programming guide, environment variables: the fastest come first, equal ones as they lie on the bus, which is
    NVML's order; CUDA_VISIBLE_DEVICES lists numbers or UUIDs, and ends at the first entry that is none.
    """
    alike = len({gpu.name for gpu in gpus if not gpu.lost}) <= 1
    if not alike and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    seen: list[Gpu] = []
    for word in listed.split(","):
        word = word.strip()
        by_uuid = [g for g in gpus if word.startswith("GPU-") and g.uuid.startswith(word)]
        found = [g for g in gpus if word == str(g.index)] or by_uuid
        if len(found) != 1:
            break
        seen += found
    return seen


def read(driver: str = "") -> Machine:
    """What the library says now. driver: path of libcuda.so.1, whose neighbour is taken where there is one.

    Raises Refused where the Python package or the library is not there, or the library cannot be started.
    """
    try:
        import pynvml  # an optional package
    except ImportError:
        raise Refused(
            "health and topology of GPUs cannot be read: no package nvidia-ml-py",
            "pip install nvidia-ml-py",
        ) from None
    beside = os.path.join(os.path.dirname(driver), SONAME) if driver else ""
    try:
        if beside and os.path.exists(beside):
            ctypes.CDLL(beside)  # the package opens it by its name, which is then taken
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError) as error:
        raise Refused(
            f"{SONAME} cannot be used: {error}", "install it with the driver, then: devproxy doctor"
        ) from None
    try:
        return _Reader(pynvml).machine()
    finally:
        pynvml.nvmlShutdown()


class _Reader:
    """One session of the library. Each question stands alone: a GPU or driver that knows no answer gives None."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def ask(self, name: str, *args: Any) -> Any:
        """The answer of nvml<name>; None where it is not known; raises NVMLError for a GPU that is gone."""
        nvml = self.nvml
        try:
            answer = getattr(nvml, f"nvml{name}")(*args)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None
        except (AttributeError, TypeError):  # an older or newer package
            return None
        return answer.decode() if isinstance(answer, bytes) else answer

    def machine(self) -> Machine:
        nvml = self.nvml
        driver = str(self.ask("SystemGetDriverVersion") or "")
        number = self.ask("SystemGetCudaDriverVersion") or 0
        count = int(self.ask("DeviceGetCount") or 0)
        handles: list[Any] = []
        gpus = []
        for index in range(count):
            handle = None
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(self.gpu(index, handle))
            except nvml.NVMLError as error:
                gpus.append(Gpu(index, lost=str(error)))
            handles.append(handle)
        levels, links = self.topology(handles, gpus)
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else ""
        return Machine(driver, cuda, tuple(gpus), levels, links)

    def gpu(self, index: int, handle: Any) -> Gpu:
        nvml, ask = self.nvml, self.ask
        memory = ask("DeviceGetMemoryInfo", handle)
        processes = ask("DeviceGetComputeRunningProcesses", handle)
        remapped = ask("DeviceGetRemappedRows", handle)  # corrected, uncorrected, pending, failed
        retire = ask("DeviceGetRetiredPagesPendingStatus", handle)
        mig = ask("DeviceGetMigMode", handle)  # now, after the next reset
        mode = ask("DeviceGetComputeMode", handle)
        fabric = self.fabric(handle)
        links = [ask("DeviceGetNvLinkState", handle, n) for n in range(MOST_LINKS)]
        return Gpu(
            index,
            name=str(ask("DeviceGetName", handle) or ""),
            uuid=str(ask("DeviceGetUUID", handle) or ""),
            bus=self.bus(handle),
            memory_bytes=memory.total if memory else None,
            memory_used_bytes=memory.used if memory else None,
            processes=None if processes is None else len(processes),
            temperature_c=ask("DeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_at_c=ask(
                "DeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
            slowed=ask("DeviceGetCurrentClocksThrottleReasons", handle),
            ecc_uncorrected=ask(
                "DeviceGetTotalEccErrors",
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remap_pending=bool(remapped[2]) if remapped else None,
            remap_failed=bool(remapped[3]) if remapped else None,
            retire_pending=None if retire is None else bool(retire),
            mig=bool(mig[0]) if mig else None,
            compute_mode=None if mode is None else COMPUTE_MODES.get(mode, str(mode)),
            fabric_state=fabric[0],
            fabric_error=fabric[1],
            numa_node=ask("DeviceGetNumaNodeId", handle),
            links_up=links.count(1) if any(s is not None for s in links) else None,
            links_down=links.count(0) if any(s is not None for s in links) else None,
        )

    def bus(self, handle: Any) -> str:
        info = self.ask("DeviceGetPciInfo", handle)
        if info is None:
            return ""
        return info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)

    def fabric(self, handle: Any) -> tuple[int | None, int | None]:
        """(state, status) of the NVSwitch fabric."""
        kind = getattr(self.nvml, "c_nvmlGpuFabricInfo_t", None)
        if kind is None:
            return None, None
        info = kind()
        if self.ask("DeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
            return None, None
        return int(info.state), int(info.status)

    def topology(
        self, handles: list[Any], gpus: list[Gpu]
    ) -> tuple[dict[tuple[int, int], str], dict[tuple[int, int], int]]:
        """(levels, links) between the GPUs that answer."""
        levels: dict[tuple[int, int], str] = {}
        links: dict[tuple[int, int], int] = {}
        by_bus = {gpu.bus: gpu.index for gpu in gpus if gpu.bus}
        alive = [gpu.index for gpu in gpus if not gpu.lost]
        for i in alive:
            for j in alive:
                if i < j:
                    level = self.ask("DeviceGetTopologyCommonAncestor", handles[i], handles[j])
                    if level is not None:
                        levels[i, j] = LEVELS.get(level, str(level))
            for n in range(MOST_LINKS):
                if self.ask("DeviceGetNvLinkState", handles[i], n) != 1:
                    continue
                far = self.ask("DeviceGetNvLinkRemotePciInfo", handles[i], n)
                bus = far.busId if far is not None else ""
                other = by_bus.get(bus.decode() if isinstance(bus, bytes) else bus)
                if other is not None and i < other:
                    links[i, other] = links.get((i, other), 0) + 1
        return levels, links
