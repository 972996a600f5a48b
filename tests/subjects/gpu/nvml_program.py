# SPDX-License-Identifier: Apache-2.0
"""What NVML says of the machine and of GPU 0, as one line of JSON: the functions that devproxy's NVML answers in a job.

No package: libnvidia-ml.so.1 by ctypes. Run natively and through the proxy by scripts/gpu_check.py, which compares. Exit
code 3 where the library is not there. A function that fails is told as "error N".
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

U32, U64, INT = ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_int


class Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16), ("domain", U32), ("bus", U32), ("device", U32), ("id", U32),
        ("subsystem", U32), ("name", ctypes.c_char * 32),
    ]  # fmt: skip


class Memory(ctypes.Structure):
    _fields_ = [("total", U64), ("free", U64), ("used", U64)]


class MemoryV2(ctypes.Structure):
    _fields_ = [("version", U32), ("total", U64), ("reserved", U64), ("free", U64), ("used", U64)]


def main() -> None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    facts: dict[str, Any] = {}

    def ask(key: str, name: str, *arguments: Any, answer: Any) -> None:
        """answer: what to say when it went well."""
        try:
            code = getattr(nvml, name)(*arguments)
        except AttributeError:
            facts[key] = f"no {name}"
            return
        facts[key] = answer() if code == 0 else f"error {code}"

    ask("init", "nvmlInit_v2", answer=lambda: "ok")
    number, text = INT(), ctypes.create_string_buffer(96)
    device, other = ctypes.c_void_p(), ctypes.c_void_p()

    def said() -> str:
        return text.value.decode()

    ask("driver", "nvmlSystemGetDriverVersion", text, U32(80), answer=said)
    ask("nvml", "nvmlSystemGetNVMLVersion", text, U32(80), answer=said)
    ask("cuda", "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number), answer=lambda: number.value)  # fmt: skip
    ask("count", "nvmlDeviceGetCount_v2", ctypes.byref(number), answer=lambda: number.value)
    ask("handle", "nvmlDeviceGetHandleByIndex_v2", U32(0), ctypes.byref(device), answer=lambda: "ok")  # fmt: skip
    ask("index", "nvmlDeviceGetIndex", device, ctypes.byref(number), answer=lambda: number.value)
    ask("name", "nvmlDeviceGetName", device, text, U32(96), answer=said)
    ask("uuid", "nvmlDeviceGetUUID", device, text, U32(96), answer=said)
    uuid = text.value

    def same() -> bool:
        return bool(other.value == device.value)

    ask("by_uuid", "nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(other), answer=same)
    pci = Pci()
    ask("bus", "nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci), answer=lambda: pci.name.decode())  # fmt: skip
    ask("pci", "nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci), answer=lambda: [
        pci.legacy.decode(), pci.domain, pci.bus, pci.device, hex(pci.id), hex(pci.subsystem)])  # fmt: skip
    ask("by_bus", "nvmlDeviceGetHandleByPciBusId_v2", pci.name, ctypes.byref(other), answer=same)
    major, minor = INT(), INT()
    ask("capability", "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor),
        answer=lambda: [major.value, minor.value])  # fmt: skip
    memory, memory2 = Memory(), MemoryV2()
    memory2.version = ctypes.sizeof(MemoryV2) | 2 << 24
    ask("memory", "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory), answer=lambda: [memory.total, memory.used])  # fmt: skip
    ask("memory_v2", "nvmlDeviceGetMemoryInfo_v2", device, ctypes.byref(memory2), answer=lambda: [memory2.total, memory2.reserved, memory2.used])  # fmt: skip
    processes = U32(0)
    ask("processes", "nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(processes), None,
        answer=lambda: processes.value)  # fmt: skip
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
