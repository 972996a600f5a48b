# SPDX-License-Identifier: Apache-2.0
"""Pools of the GPU's memory, for CUDA graphs and torch.cuda.MemPool, and which allocations go into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from devproxy_torch.stand_ins import refuse


class NcclAllocator:
    """ProcessGroupNCCL.mem_allocator: NCCL reaches all memory directly here, so a pool of it is as any other."""


def names(sc: Any) -> dict[str, object]:
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
                refuse("an allocator of one's own in a torch.cuda.MemPool")()
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

    def end_route(device: int, pool: Sequence[int]) -> None:
        sc.end_route(device, (pool[0], pool[1]))

    def route(users: int) -> Callable[[int, Sequence[int]], None]:
        """users: PoolUsers of client/allocator.h."""
        return lambda device, pool: sc.begin_route(device, (pool[0], pool[1]), users)

    return {
        "_MemPool": _MemPool,
        "_cuda_CUDAAllocator_AllocatorState": _AllocatorState,
        "_graph_pool_handle": lambda: tuple(sc.new_pool_id()),
        "_cuda_beginAllocateToPool": route(0),
        "_cuda_beginAllocateCurrentStreamToPool": route(1),
        "_cuda_beginAllocateCurrentThreadToPool": route(2),
        "_cuda_endAllocateToPool": end_route,
        "_cuda_releasePool": lambda device, pool: sc.release_pool(device, (pool[0], pool[1])),
        "_cuda_checkPoolLiveAllocations": refuse("checking a CUDA graph pool's allocations"),
        "_cuda_getCheckpointState": refuse("checkpointing a CUDA graph pool"),
        "_cuda_setCheckpointPoolState": refuse("checkpointing a CUDA graph pool"),
    }
