# SPDX-License-Identifier: Apache-2.0
"""Process groups: ProcessGroupNCCL of devproxy's NCCL, and gloo for tensors of a GPU."""

from __future__ import annotations

from typing import Any

from devproxy_torch.pools import NcclAllocator
from devproxy_torch.stand_ins import refuse


def complete(C: Any, sc: Any) -> None:
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
            c10d.ProcessGroupNCCL2 = refuse("ProcessGroupNCCL2")
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
