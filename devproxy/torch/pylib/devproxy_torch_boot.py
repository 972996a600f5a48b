# SPDX-License-Identifier: Apache-2.0
"""Makes torch, of the CPU wheel or the CUDA wheel, a CUDA build over the CUDA driver API of the preloaded libcuda.so.1.

The order is the delicate point. torch's C++ side asks for its CUDA hooks while `torch._C` is being made, so the plugin's
core library is loaded before that; the Python names of a CUDA build (`torch._C._cuda_*`) are added right after
`torch._C` ran and before any other module of torch looks for them. A finder on sys.meta_path sits at those moments, and
only there: a process that never imports torch pays nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

# Late imports: every process of a job loads this module, and most never import torch.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

CUDA_VERSION = "13.0"
CORE = "libdevproxy_torch.so"
BINDINGS = "_devproxy_torch"
CLIENT_SHIM_MARK = "cuInit"  # a process with the shim preloaded has this symbol globally


def install() -> None:
    """Puts the finder in place, once. It does nothing before torch is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_real_gpu() -> bool:
    """Is there a real GPU behind the server?"""
    env = os.environ
    return env.get("DEVPROXY_DEVICE") == "cuda" and env.get("DEVPROXY_CUDA_EXECUTOR") != "host"


def ops_run_on_cuda() -> bool:
    """As client/executor.cc decides: so it is, or tests try the client as it is there."""
    return is_real_gpu() or os.environ.get("DEVPROXY_TORCH_OPS") == "cuda"


def is_cuda_wheel(torch_dir: str) -> bool:
    return os.path.exists(os.path.join(torch_dir, "lib", "libtorch_cuda.so"))


def shim_is_loaded() -> bool:
    import ctypes

    return hasattr(ctypes.CDLL(None), CLIENT_SHIM_MARK)


def plugin_dir(torch_dir: str) -> str:
    """Folder of the plugin built for that torch. ImportError, with the remedy, where there is none."""
    with open(os.path.join(torch_dir, "version.py"), encoding="utf-8") as file:
        text = file.read()
    version = text.split("__version__ = '", 1)[-1].split("'", 1)[0]
    minor = ".".join(version.split(".")[:2])
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.abspath(os.path.join(here, "..", "..", ".."))
    lib = os.environ.get("DEVPROXY_LIB") or os.path.join(root, "build", "lib")
    # The CUDA wheel needs the build that overrides its kernels; both kinds may be installed on one machine.
    kind = "-cuda" if is_cuda_wheel(torch_dir) else ""
    folder = os.path.join(lib, f"torch-{minor}{kind}")
    if not os.path.isfile(os.path.join(folder, CORE)):
        raise ImportError(
            f"devproxy's plugin for torch {version} is not in {folder}; build it: "
            f"devproxy build-torch --python {sys.executable}"
        )
    return folder


def _load_core(spec: ModuleSpec) -> None:
    import ctypes

    torch_dir = os.path.dirname(str(spec.origin))
    lib = os.path.join(torch_dir, "lib")
    # torch's own order: its helper with the OpenMP runtime first, globally, then what the core is linked to.
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(os.path.join(lib, name), ctypes.RTLD_GLOBAL)
    # The ordinary CUDA wheel has CUDA kernels, hooks and a device guard of its own. They register themselves when this
    # library is loaded; the plugin's, loaded after it, take their places, so that nothing reaches NVIDIA's runtime.
    theirs = os.path.join(lib, "libtorch_cuda.so")
    if os.path.exists(theirs):
        ctypes.CDLL(theirs, ctypes.RTLD_GLOBAL)
        if not ops_run_on_cuda():
            # torch's own Triton versions of a few ops (bmm) are machine code of a real chip; the ATen ones take their place.
            os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
    ctypes.CDLL(os.path.join(plugin_dir(torch_dir), CORE), ctypes.RTLD_GLOBAL)


def _load_bindings(torch_dir: str) -> Any:
    import importlib.util

    folder = plugin_dir(torch_dir)
    names = [n for n in sorted(os.listdir(folder)) if n.startswith(BINDINGS) and n.endswith(".so")]
    if not names:
        raise ImportError(f"{BINDINGS}*.so is missing in {folder}; build it: devproxy build-torch")
    spec = importlib.util.spec_from_file_location(BINDINGS, os.path.join(folder, names[0]))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[BINDINGS] = module
    return module


def _refuse(what: str, remedy: str = "") -> Callable[..., Any]:
    """A function that says by name what devproxy does not have."""

    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError(
            f"{what} is not supported behind devproxy" + (f"; {remedy}" if remedy else "")
        )

    return refuse


def _constant(value: object) -> Callable[..., Any]:
    """A new function that returns `value`: torch compares some of these by identity, so none is shared."""
    return lambda *_, **__: value


def _only_off(what: str) -> Callable[..., None]:
    """A switch of what devproxy does not have: it is off, and may be told so."""
    refuse = _refuse(what)
    return lambda on=False, *_: refuse() if on else None


class NcclAllocator:
    """ProcessGroupNCCL.mem_allocator: NCCL reaches all memory directly here, so a pool of it is as any other."""


def _make_classes(C: Any, sc: Any) -> dict[str, object]:
    class _CudaStreamBase(C.Stream):  # type: ignore[misc]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                stream_id, device_index, device_type = sc.external_stream(stream_ptr, -1)
            elif not (stream_id or device_index or device_type):
                device_index = sc.get_device()
                stream_id, device_type = sc.pool_stream(device_index, priority), 1
            return C.Stream.__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type
            )

        @property
        def cuda_stream(self) -> int:
            return int(sc.raw_stream(self.device_index, self.stream_id))

        @property
        def priority(self) -> int:
            return int(sc.stream_priority(self.device_index, self.stream_id))

        @staticmethod
        def priority_range() -> tuple[int, int]:
            least, greatest = sc.stream_priority_range()
            return (least, greatest)

    class _CudaEventBase(C.Event):  # type: ignore[misc]
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            if interprocess:
                raise RuntimeError(
                    "events shared between processes are not supported behind devproxy"
                )
            return C.Event.__new__(
                cls,
                "cuda",
                enable_timing=enable_timing,
                blocking=blocking,
                interprocess=interprocess,
            )

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def elapsed_time(self, end_event: Any) -> float:
            device = self.device.index if self.device is not None else -1
            return float(sc.elapsed_ms(self.cuda_event, end_event.cuda_event, device))

        @classmethod
        def from_ipc_handle(cls, device: object, handle: object) -> Any:
            raise RuntimeError("events shared between processes are not supported behind devproxy")

        def ipc_handle(self) -> bytes:
            raise RuntimeError("events shared between processes are not supported behind devproxy")

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

    class _CUDAGraph:
        _capturing: dict[int, Any] = {}  # by the address of the plugin's own object
        _graph: Any

        def __new__(cls, keep_graph: bool = False) -> Any:
            self = object.__new__(cls)
            self._graph = sc.Graph(keep_graph)
            return self

        def register_generator_state(self, generator: Any) -> None:
            self._graph.register_generator(generator)

        def capture_begin(
            self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
        ) -> None:
            self._graph.capture_begin(pool, capture_error_mode)
            self._capturing[self._graph.address()] = self

        def capture_end(self) -> None:
            self._capturing.pop(self._graph.address(), None)
            self._graph.capture_end()

        def instantiate(self) -> None:
            self._graph.instantiate()

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._capturing.pop(self._graph.address(), None)
            self._graph.reset()

        def pool(self) -> tuple[int, int]:
            return tuple(self._graph.pool())

        def enable_debug_mode(self) -> None:
            self._graph.enable_debug_mode()

        def debug_dump(self, debug_path: str) -> None:
            self._graph.debug_dump(debug_path)

        def raw_cuda_graph(self) -> int:
            return int(self._graph.raw_graph())

        def raw_cuda_graph_exec(self) -> int:
            return int(self._graph.raw_exec())

        @staticmethod
        def get_currently_capturing_graph() -> Any:
            graph = _CUDAGraph._capturing.get(sc.capturing_graph())
            if graph is None:
                raise RuntimeError("The current stream is not currently capturing.")
            return graph

        begin_capture_to_if_node = _refuse("a conditional node of a CUDA graph")
        end_capture_to_conditional_node = _refuse("a conditional node of a CUDA graph")

    class _AllocatorState:
        """Of a CUDA graph pool, which is never checkpointed here; torch._inductor.cudagraph_trees names the class."""

    class _MemPool:
        """A pool of the device that is current when it is made; torch.cuda.MemPool derives from it."""

        def __init__(
            self,
            allocator: object = None,
            is_user_created: bool = True,
            use_on_oom: bool = False,
            no_split: bool = False,
        ) -> None:
            if not isinstance(allocator, (NcclAllocator, type(None))):
                _refuse("an allocator of one's own in a torch.cuda.MemPool")()
            self._allocator = allocator
            self._device = int(sc.get_device())
            self._id = tuple(sc.new_pool_id())
            sc.retain_pool(self._device, self._id)
            if use_on_oom:
                sc.spare_pool(self._device, self._id)

        def __del__(self) -> None:
            if hasattr(self, "_id"):
                sc.release_pool(self._device, self._id)

        @property
        def id(self) -> tuple[int, ...]:
            return self._id

        @property
        def device(self) -> int:
            return self._device

        @property
        def allocator(self) -> object:
            return self._allocator

        def use_count(self) -> int:
            return int(sc.pool_holders(self._device, self._id))

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
        cudaProfilerStart = staticmethod(_constant(0))
        cudaProfilerStop = staticmethod(_constant(0))
        # Numbers of the driver's errors are those of the runtime's.
        cudaHostRegister = staticmethod(
            lambda pointer, size, flags: sc.register_host(pointer, size, flags)
        )
        cudaHostUnregister = staticmethod(lambda pointer: sc.unregister_host(pointer))
        cudaStreamCreate = staticmethod(_refuse("cudart().cudaStreamCreate"))
        cudaStreamDestroy = staticmethod(_refuse("cudart().cudaStreamDestroy"))

    return {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_CudaDeviceProperties": _CudaDeviceProperties,
        "_CUDAGraph": _CUDAGraph,
        "_MemPool": _MemPool,
        "_cuda_CUDAAllocator_AllocatorState": _AllocatorState,
        "_cudart": _cudart,
    }


def _make_functions(sc: Any) -> dict[str, object]:
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

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        sc.set_stream(stream_id, device_index)

    def memory_snapshot(which: Sequence[int] | None = None) -> dict[str, object]:
        """Of all pools, or of one: (a, b), from torch 2.11 on (a, b, whether to have traces)."""
        pool = (which[0], which[1]) if which else (0, 0)
        traces = which is None or len(which) < 3 or bool(which[2])
        snapshot: dict[str, object] = sc.snapshot(pool == (0, 0), pool, traces)
        return snapshot

    contexts = {None: 0, "state": 1, "alloc": 2, "all": 3}

    def one_of(what: str, value: object, known: Sequence[object]) -> None:
        if value not in known:
            raise RuntimeError(f"expected {what} to be one of {tuple(known)}, but it is {value!r}")

    def record_memory_history(
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        *more: object,
    ) -> None:
        """As torch.cuda.memory._record_memory_history; more: of newer torches, the last may be skip_actions."""
        one_of("enabled", enabled, (None, "state", "all"))
        one_of("context", context, tuple(contexts))
        one_of("stacks", stacks, ("python", "all"))
        if enabled is None:
            return sc.stop_history(clear_history)
        skips = more[-1] if more and isinstance(more[-1], (list, tuple)) else []
        entries = max_entries if enabled == "all" else 0
        sc.record_history(contexts[context], stacks == "all", entries, clear_history, list(skips))

    def record_memory_history_legacy(
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        *_: object,
    ) -> None:
        context = "all" if trace_alloc_record_context else "state"
        stacks = "all" if record_context_cpp else "python"
        record_memory_history(
            "all" if enabled else None,
            context if record_context else None,
            stacks,
            trace_alloc_max_entries,
            clear_history,
        )

    def sync_debug_warns_once() -> Callable[[int], None]:
        warned: list[bool] = []

        def set_mode(mode: int) -> None:
            if not warned:  # in torch's own words
                warned.append(True)
                import warnings

                warnings.warn(
                    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
                    "operations",
                    stacklevel=3,
                )
            sc.set_sync_debug(mode)

        return set_mode

    def end_route(device: int, pool: Sequence[int]) -> None:
        sc.end_route(device, (pool[0], pool[1]))

    def route(users: int) -> Callable[[int, Sequence[int]], None]:
        """users: PoolUsers of client/allocator.h."""
        return lambda device, pool: sc.begin_route(device, (pool[0], pool[1]), users)

    def nccl_version() -> int:
        """As torch.cuda.nccl.version() takes it apart, from NCCL's own number: 22907 is 2.29.7."""
        number = int(sc.nccl_version())
        return number // 10000 << 32 | number % 10000 // 100 << 16 | number % 100

    functions: dict[str, object] = {
        "_has_cuda": True,
        "_has_cudnn": False,
        "_has_magma": False,
        "_graph_pool_handle": lambda: tuple(sc.new_pool_id()),
        # device
        "_cuda_init": cuda_init,
        "_cuda_getDeviceCount": lambda: sc.device_count(),
        "_cuda_isInBadFork": lambda: sc.in_bad_fork(),
        "_cuda_getCompiledVersion": _constant(13000),
        "_cuda_getArchFlags": _constant("sm_80"),
        "_cuda_getDevice": lambda: sc.get_device(),
        "_cuda_setDevice": lambda device: sc.set_device(device),
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": maybe_exchange,
        "_cuda_canDeviceAccessPeer": lambda a, b: sc.can_access_peer(a, b),
        "_cuda_synchronize": lambda: sc.synchronize(),
        "_cuda_hasPrimaryContext": lambda device: sc.has_context(device),
        "_cuda_ipc_collect": _constant(None),
        "_cuda_sleep": lambda cycles: sc.sleep(cycles),
        "_cuda_lock_mutex": _constant(None),
        "_cuda_unlock_mutex": _constant(None),
        # streams
        "_cuda_getCurrentStream": lambda device: sc.current_stream(device),
        "_cuda_getDefaultStream": lambda device: sc.default_stream(device),
        "_cuda_getCurrentRawStream": lambda device: sc.raw_stream(
            device, sc.current_stream(device)[0]
        ),
        "_cuda_setStream": set_stream,
        "_cuda_getStreamFromExternal": lambda pointer, device: sc.external_stream(pointer, device),
        "_cuda_isCurrentStreamCapturing": lambda: sc.stream_is_capturing(),
        # memory
        "_cuda_emptyCache": lambda: sc.empty_cache(),
        "_host_emptyCache": lambda: sc.host_empty_cache(),
        "_cuda_memoryStats": lambda device: sc.memory_stats(device),
        "_cuda_resetPeakMemoryStats": lambda device: sc.reset_peak_stats(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: sc.reset_accumulated_stats(device),
        "_cuda_hostMemoryStats": lambda: sc.host_memory_stats(),
        "_cuda_resetPeakHostMemoryStats": lambda: sc.host_reset_peak_stats(),
        "_cuda_resetAccumulatedHostMemoryStats": lambda: sc.host_reset_accumulated_stats(),
        "_cuda_memorySnapshot": memory_snapshot,
        "_cuda_getAllocatorBackend": _constant("native"),
        "_cuda_setMemoryFraction": lambda fraction, device: sc.set_memory_fraction(
            fraction, device
        ),
        "_cuda_getMemoryFraction": lambda device: sc.memory_fraction(device),
        "_cuda_record_memory_history": record_memory_history,
        "_cuda_record_memory_history_legacy": record_memory_history_legacy,
        "_cuda_isHistoryEnabled": lambda: sc.history_on(),
        "_cuda_attach_out_of_memory_observer": lambda observer: sc.observe_out_of_memory(observer),
        "_cuda_beginAllocateToPool": route(0),
        "_cuda_beginAllocateCurrentStreamToPool": route(1),
        "_cuda_beginAllocateCurrentThreadToPool": route(2),
        "_cuda_endAllocateToPool": end_route,
        "_cuda_releasePool": lambda device, pool: sc.release_pool(device, (pool[0], pool[1])),
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: sc.allocate_raw(size, stream),
        "_cuda_cudaCachingAllocator_raw_delete": lambda pointer: sc.free_raw(pointer),
        "_cuda_cudaCachingAllocator_is_enabled": _constant(False),
        # torch's own cache is not here, on or off.
        "_cuda_cudaCachingAllocator_enable": _constant(None),
        "_cuda_cudaCachingAllocator_set_allocator_settings": lambda settings: _say_once(
            f"the settings of torch's CUDA allocator ({settings}) change nothing: devproxy's own allocator has none of them"
        ),
        "_cuda_setMemoryMetadata": lambda metadata: sc.set_memory_metadata(metadata),
        "_cuda_getMemoryMetadata": lambda: sc.memory_metadata(),
        # libraries that are not there
        "_cuda_clearCublasWorkspaces": _constant(None),
        "_cuda_getCurrentBlasHandle": _refuse("a cuBLAS handle"),
        "_cuda_getCurrentSolverHandle": _refuse("a cuSOLVER handle"),
        "_cuda_get_sync_debug_mode": lambda: sc.sync_debug(),
        "_cuda_set_sync_debug_mode": sync_debug_warns_once(),
        "_cuda_get_cudnn_benchmark_limit": lambda: sc.cudnn_benchmark_limit(),
        "_cuda_set_cudnn_benchmark_limit": lambda limit: sc.set_cudnn_benchmark_limit(limit),
        "_cuda_get_conv_benchmark_empty_cache": lambda: sc.conv_benchmark_empties_cache(),
        "_cudnn_set_conv_benchmark_empty_cache": lambda on: sc.set_conv_benchmark_empties_cache(on),
        "_cuda_jiterator_compile_and_launch_kernel": _refuse("torch.cuda.jiterator"),
        "_nccl_version": nccl_version,
        "_nccl_version_suffix": _constant(b""),
    }
    refused = {
        "_cuda_cudaHostAllocator": "torch.cuda.memory._host_allocator",
        "_cuda_getAllocator": "torch.cuda.memory._get_current_allocator",
        "_cuda_customAllocator": "CUDAPluggableAllocator",
        "_cuda_changeCurrentAllocator": "change_current_allocator",
        "_cuda_checkPoolLiveAllocations": "checking a CUDA graph pool's allocations",
        "_cuda_getCheckpointState": "checkpointing a CUDA graph pool",
        "_cuda_setCheckpointPoolState": "checkpointing a CUDA graph pool",
        "_cuda_allocationTraceback": "allocation tracebacks",
        "_nccl_all_reduce": "torch.cuda.nccl",
        "_nccl_all_gather": "torch.cuda.nccl",
        "_nccl_broadcast": "torch.cuda.nccl",
        "_nccl_reduce_scatter": "torch.cuda.nccl",
        "_nccl_init_rank": "torch.cuda.nccl",
        "_nccl_unique_id": "torch.cuda.nccl",
    }
    workspaces = "the size of a cuBLAS workspace"
    refused |= {
        f"_cuda_{verb}Cublas{lt}WorkspaceSize": workspaces
        for verb in ("get", "set", "reset")
        for lt in ("", "Lt")
    }
    # Operators run in the server, whose torch it would be to tune.
    refused |= {f"_cuda_tunableop_{name}": TUNABLE for name in _TUNABLE_REFUSED}
    functions |= {f"_cuda_{name}": _only_off(TUNABLE) for name in _TUNABLE_SWITCHES}
    functions |= {
        f"_cuda_{name.replace('enable', 'is_enabled')}": _constant(False)
        for name in _TUNABLE_SWITCHES
    }
    remedies = {
        "torch.cuda.nccl": "use torch.distributed with the backend 'nccl'",
        workspaces: "set CUBLAS_WORKSPACE_CONFIG before torch is imported",
    }
    functions.update(
        {name: _refuse(what, remedies.get(what, "")) for name, what in refused.items()}
    )
    return functions


TUNABLE = "torch.cuda.tunable"
_TUNABLE_SWITCHES = ("tunableop_enable", "tunableop_tuning_enable", "record_untuned_enable")
_TUNABLE_REFUSED = (
    "get_filename",
    "get_max_tuning_duration",
    "get_max_tuning_iterations",
    "get_results",
    "get_rotating_buffer_size",
    "get_validators",
    "read_file",
    "set_filename",
    "set_max_tuning_duration",
    "set_max_tuning_iterations",
    "set_numerical_check_tolerances",
    "set_rotating_buffer_size",
    "write_file",
    "write_file_on_exit",
)

_OF_THE_WHEEL = frozenset(
    {
        "_has_cudnn",
        "_has_magma",
        "_cuda_getCompiledVersion",
        "_cuda_getArchFlags",
        "_nccl_version",
        "_nccl_version_suffix",
    }
)


def _cudnn_version(number: int) -> tuple[int, int, int]:
    """(major, minor, patch) of CUDNN_VERSION: 9.13.2 is 91302, 8.9.2 was 8902 (cudnn_version.h)."""
    thousands = 10000 if number >= 90000 else 1000
    return number // thousands, number % thousands // 100, number % 100


class _NoRanges:
    """torch._C._nvtx where the wheel has none: what NVTX answers when no tool is attached (nvToolsExt.h)."""

    NO_TRACKING = -2  # NVTX_NO_PUSH_POP_TRACKING
    rangePushA = staticmethod(lambda message: _NoRanges.NO_TRACKING)
    rangePop = staticmethod(lambda: _NoRanges.NO_TRACKING)
    rangeStartA = staticmethod(lambda message: 0)
    rangeEnd = staticmethod(lambda handle: None)
    markA = staticmethod(lambda message: None)


def _complete_nvtx(module: ModuleType) -> None:
    """The CUDA wheel's own ranges stay: they tell a tool that is attached to this process, and ask no GPU. Those in a stream
    would be host functions of NVIDIA's runtime, and become nothing."""
    ranges: Any = getattr(module, "_nvtx", None)
    if ranges is None:
        ranges = _NoRanges()
        setattr(module, "_nvtx", ranges)
    ranges.deviceRangeStart = lambda message, stream=0: None
    ranges.deviceRangeEnd = lambda handle, stream=0: None


def _make_copies_between_gpus() -> dict[str, object]:
    """What torch.nn.parallel.comm is made of: nn.DataParallel, which transformers.Trainer takes for several GPUs."""

    def broadcast(tensor: Any, devices: Sequence[int]) -> list[Any]:
        return [tensor.to(f"cuda:{d}", non_blocking=True) for d in devices]

    def broadcast_out(tensor: Any, out: Sequence[Any]) -> Sequence[Any]:
        for one in out:
            one.copy_(tensor, non_blocking=True)
        return out

    def broadcast_coalesced(
        tensors: Sequence[Any], devices: Sequence[int], buffer_size: int
    ) -> list[list[Any]]:
        return [[t.to(f"cuda:{d}", non_blocking=True) for t in tensors] for d in devices]

    def scatter(
        tensor: Any,
        devices: Sequence[int],
        chunk_sizes: Sequence[int] | None,
        dim: int,
        streams: Sequence[Any] | None,
    ) -> list[Any]:
        import torch

        chunks = (
            tensor.split(list(chunk_sizes), dim)
            if chunk_sizes is not None
            else tensor.chunk(len(devices), dim)
        )
        found = []
        for i, (chunk, device) in enumerate(zip(chunks, devices)):
            with torch.cuda.stream(streams[i] if streams is not None else None):
                found.append(chunk.contiguous().to(f"cuda:{device}", non_blocking=True))
        return found

    def scatter_out(
        tensor: Any, out: Sequence[Any], dim: int, streams: Sequence[Any] | None
    ) -> Sequence[Any]:
        import torch

        chunks = tensor.split([o.size(dim) for o in out], dim)
        for i, (chunk, one) in enumerate(zip(chunks, out)):
            with torch.cuda.stream(streams[i] if streams is not None else None):
                one.copy_(chunk, non_blocking=True)
        return out

    def gather(tensors: Sequence[Any], dim: int, destination: int | None) -> Any:
        import torch

        where = "cuda" if destination is None else f"cuda:{destination}"
        return torch.cat([t.to("cpu" if destination == -1 else where) for t in tensors], dim)

    def gather_out(tensors: Sequence[Any], out: Any, dim: int) -> Any:
        return out.copy_(gather(tensors, dim, out.device.index if out.is_cuda else -1))

    def reduce(
        inputs: Sequence[Any], output: Any, root: int, op: int, streams: object, comms: object
    ) -> None:
        if op != 0 or comms:
            _refuse("torch.cuda.nccl.reduce but for the sum")()
        total = inputs[0].to(output.device, copy=True)
        for one in inputs[1:]:
            total += one.to(output.device)
        output.copy_(total)

    return {
        "_broadcast": broadcast,
        "_broadcast_out": broadcast_out,
        "_broadcast_coalesced": broadcast_coalesced,
        "_scatter": scatter,
        "_scatter_out": scatter_out,
        "_gather": gather,
        "_gather_out": gather_out,
        "_nccl_reduce": reduce,
    }


def _complete_torch_c(module: ModuleType) -> None:
    """After `torch._C`: the names of a CUDA build."""
    sc = _load_bindings(os.path.dirname(str(module.__file__)))
    names = {**_make_classes(module, sc), **_make_functions(sc), **_make_copies_between_gpus()}
    if ops_run_on_cuda():
        # What the wheel says of itself without asking a device is the truth there.
        names = {k: v for k, v in names.items() if k not in _OF_THE_WHEEL or not hasattr(module, k)}
        cudnn = getattr(module, "_cudnn", None)
        if cudnn is not None:  # the library that it would ask is the server's
            cudnn.getRuntimeVersion = lambda: _cudnn_version(sc.facts()["cudnn_runtime"])
    for name, value in names.items():
        setattr(module, name, value)
    setattr(module._dynamo.guards, "_empty_strided_cuda", sc.empty_strided)
    _keep_torchscript_unfused(module)
    _complete_nvtx(module)
    _complete_c10d(module, sc)
    # torch.cuda.memory takes the presence of this one as a promise of pluggable allocators.
    if hasattr(module, "_cuda_CUDAAllocator"):
        delattr(module, "_cuda_CUDAAllocator")


def _keep_torchscript_unfused(C: Any) -> None:
    """TorchScript's fuser writes CUDA kernels at a function's third call, and asks NVIDIA's runtime in this process about
    the GPU. Without it each op runs by itself. torch.jit.fuser() puts the switch on, and then back to what it was."""
    C._jit_override_can_fuse_on_gpu(False)
    C._jit_override_can_fuse_on_gpu = lambda on: None


def _complete_c10d(C: Any, sc: Any) -> None:
    """ProcessGroupNCCL belongs into torch._C._distributed_c10d before torch.distributed looks for it."""
    plain_init = getattr(C, "_c10d_init", None)
    if plain_init is None:
        return

    def _c10d_init() -> object:
        done = plain_init()
        c10d = C._distributed_c10d
        # The CUDA wheel's own makes its stream the current one of torch's CUDA library, which the plugin does not ask: what
        # it copies there, and its futures, would not wait for the operation.
        if hasattr(c10d, "ProcessGroupNCCL"):
            delattr(c10d, "ProcessGroupNCCL")
        sc.add_process_group(c10d)
        c10d.ProcessGroupNCCL.mem_allocator = property(lambda _: NcclAllocator())
        if hasattr(c10d, "ProcessGroupNCCL2"):
            c10d.ProcessGroupNCCL2 = _refuse("ProcessGroupNCCL2")
        sc.add_staged_gloo(c10d)
        _stage_gloo(c10d)
        return done

    C._c10d_init = _c10d_init


def _stage_gloo(c10d: Any) -> None:
    """The backend 'gloo' of a GPU's tensors: gloo itself, on copies in host memory (client/c10d/gloo.cc)."""
    group = c10d.ProcessGroup
    plain = group._register_backend

    def _register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> None:
        if device.type == "cuda" and kind == group.BackendType.GLOO and backend is not None:
            backend = c10d._StagedGloo(backend)
            # A group has one backend of each type, and that of the CPU's tensors stays gloo's own.
            if any(known.type == "cpu" for known in self._device_types):
                kind = group.BackendType.CUSTOM
        plain(self, device, kind, backend)

    group._register_backend = _register_backend


def _complete_torch_cuda(module: ModuleType) -> None:
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


def _complete_torch_storage(module: ModuleType) -> None:
    """UntypedStorage(n, device='cuda') and resize_(): their C++ has CUDA behind a compile-time switch."""
    storage = module.UntypedStorage
    plain_new = storage.__new__
    plain_resize = storage.resize_

    def __new__(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        import torch

        if device is None or torch.device(device).type != "cuda":
            return plain_new(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        content = args[0] if args else 0
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        bindings: Any = sys.modules[BINDINGS]
        bindings.resize_storage(self, size)
        return self

    storage.__new__ = __new__
    storage.resize_ = resize_
    # pickled for another process: arguments of torch.multiprocessing's, queues, share_memory() of a module
    ipc = _refuse(
        "a tensor of the GPU that another process shares (CUDA IPC)",
        "send tensor.cpu(), or share the CPU's tensors and copy them to the GPU in each process",
    )
    storage._share_cuda_ = ipc
    storage._new_shared_cuda = staticmethod(ipc)


def _complete_torch_cudnn(module: ModuleType) -> None:
    """On the host there is no cuDNN and nothing misses it: nn.LSTM asks, and must not warn."""
    if ops_run_on_cuda():
        return
    setattr(module, "is_acceptable", lambda tensor: False)


_said: set[str] = set()


def _say_once(line: str) -> None:
    """On stderr as all of devproxy's warnings; not a Python warning, which a script may have made an error."""
    if line in _said:
        return
    _said.add(line)
    import ctypes

    try:
        warn = ctypes.CDLL(None).devproxy_warn
    except AttributeError:  # a libcuda that is not ours
        return
    warn(line.encode())


def _complete_torch_autograd(module: ModuleType) -> None:
    """A profile may be asked for CUDA, which the CPU wheel's torch does not know."""
    import torch

    plain = module._supported_activities
    cuda = torch._C._profiler.ProfilerActivity.CUDA
    setattr(
        module,
        "_supported_activities",
        lambda: plain() | ({cuda} if torch._C._cuda_getDeviceCount() > 0 else set()),
    )


class _ServersRecord:
    """What this process's GPUs did while a profile ran, as the servers know it (csrc/server/trace.h), and into an exported
    trace with it."""

    # csrc/server/trace.h: Event and Kind, and what Kineto calls them. The rest is no work of a GPU.
    EVENT = "<QQQQIHBx"
    KINDS = {1: "gpu_memcpy", 2: "gpu_memset", 3: "kernel", 7: "kernel"}
    PAGE_BYTES, KEPT_MS = 4096, 3_600_000

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lost = 0

    def _ask(self, gpu: int, what: int, first: int = 0) -> tuple[bytes, int, int, int] | None:
        """(tail, the server's clock, total, lost)"""
        import ctypes

        rep, tail = (ctypes.c_ulong * 3)(), ctypes.create_string_buffer(self.PAGE_BYTES)
        ask = getattr(ctypes.CDLL(None), "devproxy_trace", None)
        if ask is None:  # a libcuda that is not ours
            return None
        ask.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_ulong, ctypes.c_ulong, *[ctypes.c_void_p] * 2, ctypes.c_int]  # fmt: skip
        got = ask(gpu, what, self.KEPT_MS, first, rep, tail, self.PAGE_BYTES)
        return None if got < 0 else (tail.raw[:got], rep[0], rep[1], rep[2])

    def begin(self) -> None:
        import torch

        self.events, self.lost = [], 0
        if torch.cuda._is_in_bad_fork():
            return
        if not torch.cuda.is_current_stream_capturing():  # then there is somebody to ask
            try:
                torch.cuda.synchronize()  # also makes the GPU's context where there is none
            except RuntimeError:
                return  # a broken context: the program's own calls say so
        for gpu in range(torch.cuda.device_count()):
            self._ask(gpu, 0)

    def end(self) -> None:
        import struct
        import time

        import torch

        for gpu in range(torch.cuda.device_count()):
            begun = self._ask(gpu, 1)
            if begun is None:
                continue
            day_ns = time.time_ns() - begun[1]
            size = struct.calcsize(self.EVENT)
            data = self._all(gpu, 2, begun[2], size)
            named = self._ask(gpu, 3)
            names = (
                self._all(gpu, 3, named[2], 1).decode(errors="replace").split("\0") if named else []
            )
            self._ask(gpu, 4)
            self.lost += begun[3]
            for queued, start, end, count, name, stream, kind in struct.iter_unpack(self.EVENT, data):  # fmt: skip
                if kind not in self.KINDS or name >= len(names):
                    continue
                self.events.append(
                    {
                        "ph": "X",
                        "cat": self.KINDS[kind],
                        "name": names[name] or self.KINDS[kind],
                        "pid": gpu,
                        "tid": stream,
                        "ts": start + day_ns,
                        "dur": end - start,
                        "args": {
                            "device": gpu,
                            "stream": stream,
                            "queued": start - queued,
                            "bytes": count,
                        },  # fmt: skip
                    }
                )

    def _all(self, gpu: int, what: int, total: int, size: int) -> bytes:
        """Less where the server was replaced meanwhile: what it had recorded went with it."""
        data = b""
        while len(data) < total * size:
            page = self._ask(gpu, what, len(data) // size)
            if page is None or not page[0]:
                break
            data += page[0]
        return data[: len(data) // size * size]

    def add_to(self, path: str) -> None:
        """To a trace in Chrome's format, whose times are microseconds since a base."""
        import json

        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        base_ns = trace.get("baseTimeNanoseconds", 0)
        events = trace["traceEvents"]
        for gpu in sorted({event["pid"] for event in self.events}):
            for what, said in (("name", f"GPU {gpu}"), ("labels", "by devproxy's server")):
                named = {what: said}
                events.append({"ph": "M", "name": f"process_{what}", "pid": gpu, "tid": 0, "ts": 0, "args": named})  # fmt: skip
        for event in self.events:
            ts, dur = (event["ts"] - base_ns) / 1e3, event["dur"] / 1e3
            events.append(event | {"ts": ts, "dur": dur})
        if self.lost:
            trace["devproxyLostEvents"] = self.lost
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)


def _complete_torch_profiler(module: ModuleType) -> None:
    """Kineto sees no kernel in this process, so torch takes events for the GPU's times (client/profile.cc)."""
    import functools

    import torch

    cuda = module.ProfilerActivity.CUDA
    plain_activities = module._supported_activities
    plain_prepare = module._prepare_profiler
    plain_init = module.profile.__init__
    plain_enter = module.emit_nvtx.__enter__

    @functools.wraps(plain_init)
    def init(self: Any, enabled: bool = True, **given: Any) -> None:
        wanted = given.get("use_cuda") or given.get("use_device") == "cuda"
        if enabled and wanted and torch.cuda.is_available():
            _say_once(
                "torch.profiler sees no GPU kernels, copies or CUDA calls of this job, which run in devproxy's server; "
                "its CUDA times are those of whole operators on their streams, by events; an exported trace shows what the "
                "server did on each stream"
            )
            # The times by events are those of the operators that it records.
            given["use_cpu"] = True
            self._devproxy_record = _ServersRecord()
        plain_init(self, enabled, **given)

    def in_record(step: str) -> Callable[..., Any]:
        """The profile's own step, and the record's beside it."""
        plain = getattr(module.profile, step)

        @functools.wraps(plain)
        def run(self: Any, *given: Any, **named: Any) -> Any:
            record = getattr(self, "_devproxy_record", None)
            if record and step == "_start_trace":
                record.begin()
            answer = plain(self, *given, **named)
            if record and step == "__exit__":
                record.end()
            if record and record.events and step == "export_chrome_trace":
                record.add_to(given[0] if given else named["path"])
            return answer

        return run

    @functools.wraps(plain_enter)
    def enter(self: Any) -> Any:
        if self.enabled:
            _say_once(
                "emit_nvtx: a tool that is attached to this job sees its ranges and no GPU work, which runs in devproxy's "
                "server"
            )
        return plain_enter(self)

    def prepare(*given: Any, **named: Any) -> None:
        bindings: Any = sys.modules[BINDINGS]
        bindings.hide_gpu_from_kineto(True)
        try:
            plain_prepare(*given, **named)
        finally:
            bindings.hide_gpu_from_kineto(False)

    setattr(module, "_prepare_profiler", prepare)
    setattr(module, "_supported_activities", lambda: plain_activities() - {cuda})
    module.profile.__init__ = init
    for step in ("_start_trace", "__exit__", "export_chrome_trace"):
        setattr(module.profile, step, in_record(step))
    module.emit_nvtx.__enter__ = enter


def _complete_inductor(module: ModuleType) -> None:
    """Inductor makes kernels of Triton for a GPU, which the software GPU cannot run; its C++ kernels can be run there."""
    if ops_run_on_cuda():
        return
    import devproxy_torch_inductor

    devproxy_torch_inductor.complete(module, _say_once)


def _say_own_kernels(spec: ModuleSpec) -> None:
    """Before the package is run: its CUDA half may fail then, with a library's name for a reason."""
    if not ops_run_on_cuda():
        _say_once(
            f"{spec.name} brings kernels of its own, which are a GPU's machine code: the software GPU runs none of them; what "
            "needs them runs with --device cuda"
        )


def _count_steps(module: ModuleType) -> None:
    """Tells the client shim of every optimizer step, by torch's own hook: `--checkpoint-every 50steps` counts them."""
    import ctypes

    try:
        count = ctypes.PyDLL(
            None
        ).devproxy_step  # PyDLL: a few instructions, not worth giving the GIL away
    except AttributeError:
        return
    count.argtypes, count.restype = [], ctypes.c_int
    getattr(module, "register_optimizer_step_post_hook")(lambda *_: count() and None)


def _stable(function: Callable[..., Any], by: int = 1) -> Callable[..., Any]:
    """What the function allocates is kept from step to step, or made in each step again (paper 5.2.2): it lies apart from
    activations and gradients, so that equal ranks have it at equal offsets. by = -1: after all it is neither."""
    import ctypes
    import functools

    try:
        make_stable = ctypes.PyDLL(None).devproxy_make_stable
    except AttributeError:  # a libcuda that is not ours
        return function
    make_stable.argtypes, make_stable.restype = [ctypes.c_int], None

    @functools.wraps(function)
    def inner(*given: Any, **named: Any) -> Any:
        make_stable(by)
        try:
            return function(*given, **named)
        finally:
            make_stable(-by)

    return inner


def _complete_torch_optimizer(module: ModuleType) -> None:
    """An optimizer's states, and what its step makes on the way."""
    import functools

    _count_steps(module)
    optimizer: Any = getattr(module, "Optimizer")
    plain = optimizer.profile_hook_step

    def hook_step(step: Callable[..., Any]) -> Any:
        inner = _stable(step)

        # A closure runs the model.
        @functools.wraps(step)
        def outer(self: Any, *given: Any, **named: Any) -> Any:
            given = tuple(_stable(one, -1) if callable(one) else one for one in given)
            named = {k: _stable(one, -1) if callable(one) else one for k, one in named.items()}
            return inner(self, *given, **named)

        return plain(outer)

    optimizer.profile_hook_step = staticmethod(hook_step)
    optimizer.load_state_dict = _stable(optimizer.load_state_dict)


def _complete_torch_module(module: ModuleType) -> None:
    """Parameters and buffers that a module takes to the GPU: cuda(), to(), half() and their kin."""
    modules: Any = getattr(module, "Module")
    modules._apply = _stable(modules._apply)


def _take_package_ops(torch: Any) -> None:
    """A package's library may have CUDA kernels (torchvision's), which the software GPU cannot run; the op's CPU kernel runs
    instead, as it does where the package has no other."""
    import functools

    plain = torch.ops.load_library

    @functools.wraps(plain)
    def load_library(path: Any) -> Any:
        bindings: Any = sys.modules[BINDINGS]
        bindings.note_known_ops()
        answer = plain(path)
        bindings.take_package_ops()
        return answer

    torch.ops.load_library = load_library


def _complete_torch(module: ModuleType) -> None:
    """torch.cuda.FloatTensor and its kin, which a CPU build has and cannot use, and the default tensor type."""
    torch: Any = module

    class Legacy(type):
        dtype: Any
        layout: Any
        # tensor.type() looks at the C name of a class, which torch's own have the module's name in.
        __name__ = property(lambda cls: cls.__qualname__)  # type: ignore[assignment]

        def __instancecheck__(cls, value: object) -> bool:
            wanted = (True, cls.dtype, cls.layout)
            return (
                isinstance(value, torch.Tensor)
                and (value.is_cuda, value.dtype, value.layout) == wanted
            )

    def make(dtype: Any) -> Callable[..., Any]:
        def __new__(cls: type, *args: Any, **_: Any) -> Any:
            if not args:
                return torch.empty(0, dtype=dtype, device="cuda")
            if all(isinstance(a, int) for a in args):
                return torch.empty(args, dtype=dtype, device="cuda")
            if isinstance(args[0], torch.Size):
                return torch.empty(args[0], dtype=dtype, device="cuda")
            if isinstance(args[0], torch.Tensor):
                if not isinstance(args[0], cls):
                    raise TypeError(
                        f"expected {cls.__module__}.{cls.__name__} (got {args[0].type()})"
                    )
                return torch.ops.aten.alias(args[0])
            return torch.tensor(*args, dtype=dtype, device="cuda")

        return __new__

    def make_sparse(dtype: Any) -> Callable[..., Any]:
        def __new__(cls: type, *args: Any, **_: Any) -> Any:
            given = args or ((0,),)
            return torch.sparse_coo_tensor(*given, dtype=dtype, device="cuda")

        return __new__

    def legacy(module: str, name: str, dtype: Any, layout: Any, new: Callable[..., Any]) -> Any:
        body = {
            "__new__": new, "dtype": dtype, "layout": layout, "__module__": module, "__qualname__": name,
            "is_cuda": True, "is_sparse": layout == torch.sparse_coo,
        }  # fmt: skip
        return Legacy(f"{module}.{name}", (), body)

    types = {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }  # fmt: skip
    made = {}
    for prefix, dtype in types.items():
        name = prefix + "Tensor"
        made[dtype] = legacy("torch.cuda", name, dtype, torch.strided, make(dtype))
        setattr(torch.cuda, name, made[dtype])
        of_coo = legacy("torch.cuda.sparse", name, dtype, torch.sparse_coo, make_sparse(dtype))
        setattr(torch.cuda.sparse, name, of_coo)

    plain = torch.set_default_tensor_type

    def new_tensor(cls: type, *args: Any, **named: Any) -> Any:
        """torch.Tensor(2, 3), which a default device alone does not reach."""
        if cls is torch.Tensor and not named:
            return made[torch.get_default_dtype()](*args)
        return torch._C.TensorBase.__new__(cls, *args, **named)

    def set_default_tensor_type(kind: Any) -> None:
        given = torch._import_dotted_name(kind) if isinstance(kind, str) else kind
        if not isinstance(given, Legacy):
            plain(kind)
            if torch.Tensor.__new__ is new_tensor:
                torch.set_default_device(None)
                del torch.Tensor.__new__
            return
        plain(getattr(torch, given.__name__))
        torch.set_default_device("cuda")
        torch.Tensor.__new__ = new_tensor

    set_default_tensor_type.__doc__ = plain.__doc__
    torch.set_default_tensor_type = set_default_tensor_type
    _take_package_ops(torch)


class _Loader:
    """The module's own loader, with something to do before the module is made and after it ran."""

    def __init__(
        self,
        inner: Any,
        before: Callable[[ModuleSpec], None] | None,
        after: Callable[[ModuleType], None],
    ) -> None:
        self._inner, self._before, self._after = inner, before, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._before is not None:
            self._before(spec)
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _plugin_is_for(torch: ModuleSpec | None) -> bool:
    """Not for torch's CPU build where there is a real GPU: natively it would not see that either. Nor where the job was
    told to use devproxy's CUDA runtime alone (DEVPROXY_TORCH=cudart), below which the wheel's own kernels run."""
    if torch is None or torch.origin is None:
        return False
    if not is_real_gpu():
        return True
    return os.environ.get("DEVPROXY_TORCH") != "cudart" and is_cuda_wheel(
        os.path.dirname(torch.origin)
    )


PACKAGES_WITH_KERNELS = ("bitsandbytes", "flash_attn")


class _Finder:
    """Stands before the other finders and wraps the loaders of some modules of torch."""

    _hooks: dict[str, tuple[Callable[[ModuleSpec], None] | None, Callable[[ModuleType], None]]] = {
        "torch": (None, _complete_torch),
        "torch._C": (_load_core, _complete_torch_c),
        "torch._inductor.compile_fx": (None, _complete_inductor),
        "torch.autograd": (None, _complete_torch_autograd),
        "torch.autograd.profiler": (None, _complete_torch_profiler),
        "torch.backends.cudnn": (None, _complete_torch_cudnn),
        "torch.cuda": (None, _complete_torch_cuda),
        "torch.nn.modules.module": (None, _complete_torch_module),
        "torch.optim.optimizer": (None, _complete_torch_optimizer),
        "torch.storage": (None, _complete_torch_storage),
        **dict.fromkeys(PACKAGES_WITH_KERNELS, (_say_own_kernels, lambda module: None)),
    }
    _active: bool | None = (
        None  # whether the client shim is in this process; asked when torch is first imported
    )

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hooks = self._hooks.get(name)
        if hooks is None:
            return None
        if self._active is None:
            self._active = shim_is_loaded() and _plugin_is_for(PathFinder.find_spec("torch"))
        if not self._active:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, *hooks)  # type: ignore[assignment]
        return spec
