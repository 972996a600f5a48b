# SPDX-License-Identifier: Apache-2.0
"""The allocator as torch.cuda.memory sees it: what it holds, its numbers, its history, and what of torch's own it is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from devproxy_torch.say import say_once
from devproxy_torch.stand_ins import constant, refuse


def names(sc: Any) -> dict[str, object]:
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
            sc.stop_history(clear_history)
            return
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

    return {
        "_cuda_emptyCache": lambda: sc.empty_cache(),
        "_host_emptyCache": lambda: sc.host_empty_cache(),
        "_cuda_memoryStats": lambda device: sc.memory_stats(device),
        "_cuda_resetPeakMemoryStats": lambda device: sc.reset_peak_stats(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: sc.reset_accumulated_stats(device),
        "_cuda_hostMemoryStats": lambda: sc.host_memory_stats(),
        "_cuda_resetPeakHostMemoryStats": lambda: sc.host_reset_peak_stats(),
        "_cuda_resetAccumulatedHostMemoryStats": lambda: sc.host_reset_accumulated_stats(),
        "_cuda_memorySnapshot": memory_snapshot,
        "_cuda_getAllocatorBackend": constant("native"),
        "_cuda_setMemoryFraction": lambda fraction, device: sc.set_memory_fraction(
            fraction, device
        ),
        "_cuda_getMemoryFraction": lambda device: sc.memory_fraction(device),
        "_cuda_record_memory_history": record_memory_history,
        "_cuda_record_memory_history_legacy": record_memory_history_legacy,
        "_cuda_isHistoryEnabled": lambda: sc.history_on(),
        "_cuda_attach_out_of_memory_observer": lambda observer: sc.observe_out_of_memory(observer),
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: sc.allocate_raw(size, stream),
        "_cuda_cudaCachingAllocator_raw_delete": lambda pointer: sc.free_raw(pointer),
        "_cuda_cudaCachingAllocator_is_enabled": constant(False),
        # torch's own cache is not here, on or off.
        "_cuda_cudaCachingAllocator_enable": constant(None),
        "_cuda_cudaCachingAllocator_set_allocator_settings": lambda settings: say_once(
            f"the settings of torch's CUDA allocator ({settings}) change nothing: devproxy's own allocator has none of them"
        ),
        "_cuda_setMemoryMetadata": lambda metadata: sc.set_memory_metadata(metadata),
        "_cuda_getMemoryMetadata": lambda: sc.memory_metadata(),
        "_cuda_cudaHostAllocator": refuse("torch.cuda.memory._host_allocator"),
        "_cuda_getAllocator": refuse("torch.cuda.memory._get_current_allocator"),
        "_cuda_customAllocator": refuse("CUDAPluggableAllocator"),
        "_cuda_changeCurrentAllocator": refuse("change_current_allocator"),
        "_cuda_allocationTraceback": refuse("allocation tracebacks"),
    }
