# SPDX-License-Identifier: Apache-2.0
"""The GPUs themselves: their number, properties, which one is current, and torch.cuda.cudart()."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from devproxy_torch.plugin import ops_run_on_cuda
from devproxy_torch.stand_ins import constant, refuse

# Late imports: torch is being imported when this module is.

CUDA_VERSION = "13.0"


def names(sc: Any) -> dict[str, object]:
    class _CudaDeviceProperties:
        def __init__(self, device: int) -> None:
            values = sc.properties(device)
            raw = values.pop("uuid").hex()
            self.uuid = f"{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"
            for name, value in values.items():
                setattr(self, name, value)
            self.gcnArchName = self.name

        name: str
        major: int
        minor: int
        total_memory: int
        multi_processor_count: int

        def __repr__(self) -> str:
            return (
                f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
                f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
                f"uuid={self.uuid})"
            )

    class _cudart:
        """The few calls of the CUDA runtime that torch.cuda.cudart() is used for."""

        class cudaError:
            success = 0

            def __new__(cls, value: int) -> Any:
                return value

        class cudaOutputMode:
            KeyValuePair = 0
            CSV = 1

        cudaGetErrorString = staticmethod(lambda error: sc.error_text(int(error)))
        cudaMemGetInfo = staticmethod(lambda device: tuple(sc.memory_info(device)))
        cudaProfilerStart = staticmethod(constant(0))
        cudaProfilerStop = staticmethod(constant(0))
        # Numbers of the driver's errors are those of the runtime's.
        cudaHostRegister = staticmethod(
            lambda pointer, size, flags: sc.register_host(pointer, size, flags)
        )
        cudaHostUnregister = staticmethod(lambda pointer: sc.unregister_host(pointer))
        cudaStreamCreate = staticmethod(refuse("cudart().cudaStreamCreate"))
        cudaStreamDestroy = staticmethod(refuse("cudart().cudaStreamDestroy"))

    def cuda_init() -> None:
        import torch

        if sc.device_count() == 0:
            raise RuntimeError("No CUDA GPUs are available")
        sc.bind_device(-1)
        sc.lazy_init()
        torch.cuda.default_generators = tuple(
            sc.default_generator(i) for i in range(sc.device_count())
        )

    def exchange(device: int) -> int:
        return int(sc.exchange_device(device))

    def maybe_exchange(device: int) -> int:
        return int(sc.maybe_exchange_device(device))

    return {
        "_CudaDeviceProperties": _CudaDeviceProperties,
        "_cudart": _cudart,
        "_has_cuda": True,
        "_cuda_init": cuda_init,
        "_cuda_getDeviceCount": lambda: sc.device_count(),
        "_cuda_isInBadFork": lambda: sc.in_bad_fork(),
        "_cuda_getCompiledVersion": constant(13000),
        "_cuda_getArchFlags": constant("sm_80"),
        "_cuda_getDevice": lambda: sc.get_device(),
        "_cuda_setDevice": lambda device: sc.set_device(device),
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": maybe_exchange,
        "_cuda_canDeviceAccessPeer": lambda a, b: sc.can_access_peer(a, b),
        "_cuda_synchronize": lambda: sc.synchronize(),
        "_cuda_hasPrimaryContext": lambda device: sc.has_context(device),
        "_cuda_ipc_collect": constant(None),
        "_cuda_sleep": lambda cycles: sc.sleep(cycles),
        "_cuda_lock_mutex": constant(None),
        "_cuda_unlock_mutex": constant(None),
    }


def complete_cuda(module: ModuleType) -> None:
    """After torch.cuda: a GPU's properties are asked for once, and torch.version names a CUDA."""
    import torch

    properties = torch._C._CudaDeviceProperties
    cache: dict[int, Any] = {}

    def _get_device_properties(device: int) -> Any:
        index = int(device)
        if index not in cache:
            cache[index] = properties(index)
        return cache[index]

    setattr(module, "_get_device_properties", _get_device_properties)
    if not ops_run_on_cuda():
        setattr(torch.version, "cuda", CUDA_VERSION)
