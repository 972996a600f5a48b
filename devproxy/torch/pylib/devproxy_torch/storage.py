# SPDX-License-Identifier: Apache-2.0
"""torch.UntypedStorage of a GPU: made, resized, and not shared with another process."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from devproxy_torch import plugin
from devproxy_torch.stand_ins import refuse

# Late imports: torch is being imported when this module is.


def complete(module: ModuleType) -> None:
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
        plugin.bindings().resize_storage(self, size)
        return self

    storage.__new__ = __new__
    storage.resize_ = resize_
    # pickled for another process: arguments of torch.multiprocessing's, queues, share_memory() of a module
    ipc = refuse(
        "a tensor of the GPU that another process shares (CUDA IPC)",
        "send tensor.cpu(), or share the CPU's tensors and copy them to the GPU in each process",
    )
    storage._share_cuda_ = ipc
    storage._new_shared_cuda = staticmethod(ipc)
