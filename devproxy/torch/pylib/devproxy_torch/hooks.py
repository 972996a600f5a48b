# SPDX-License-Identifier: Apache-2.0
"""What is done to which module: the list that the finder of boot goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from devproxy_torch import (
    device,
    graphs,
    legacy,
    libraries,
    nested,
    packages,
    plugin,
    profiler,
    steps,
    storage,
    torch_c,
)
from devproxy_torch.say import say_once

# What to do before the module is made, and after it ran.
Hook = tuple[Callable[[ModuleSpec], None] | None, Callable[[ModuleType], None]]


def _complete_torch(module: ModuleType) -> None:
    legacy.complete(module)
    packages.take_ops(module)


def _complete_inductor(module: ModuleType) -> None:
    """Inductor makes kernels of Triton for a GPU, which the software GPU cannot run; its C++ kernels can be run there."""
    if plugin.ops_run_on_cuda():
        return graphs.complete_compile_fx(module)
    # It imports torch.
    from devproxy_torch import inductor

    inductor.complete(module, say_once)


def of(with_kernels: Sequence[str]) -> dict[str, Hook]:
    """with_kernels: packages that bring kernels of their own."""
    return {
        "torch": (None, _complete_torch),
        "torch._C": (plugin.load_core, torch_c.complete),
        "torch._dynamo.backends.cudagraphs": (None, graphs.complete_backend),
        "torch._inductor.compile_fx": (None, _complete_inductor),
        "torch.autograd": (None, profiler.complete_autograd),
        "torch.autograd.profiler": (None, profiler.complete),
        "torch.backends.cudnn": (None, libraries.complete_cudnn),
        "torch.cuda": (None, device.complete_cuda),
        "torch.nn.modules.module": (None, steps.complete_module),
        "torch.nn.modules.transformer": (None, nested.complete),
        "torch.optim.optimizer": (None, steps.complete_optimizer),
        "torch.storage": (None, storage.complete),
        **dict.fromkeys(with_kernels, (packages.say_own_kernels, lambda module: None)),
    }
