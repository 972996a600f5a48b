# SPDX-License-Identifier: Apache-2.0
"""A training's steps: who counts them, and what memory is kept from one to the next (paper 5.2.2)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _count_steps(module: ModuleType) -> None:
    """Tells the client shim of every optimizer step, by torch's own hook: `--checkpoint-every 50steps` counts them."""
    try:
        # PyDLL: a few instructions, not worth giving the GIL away.
        count = ctypes.PyDLL(None).devproxy_step
    except AttributeError:
        return
    count.argtypes, count.restype = [], ctypes.c_int
    getattr(module, "register_optimizer_step_post_hook")(lambda *_: count() and None)


def _stable(function: Callable[..., Any], by: int = 1) -> Callable[..., Any]:
    """What the function allocates is kept from step to step, or made in each step again (paper 5.2.2): it lies apart from
    activations and gradients, so that equal ranks have it at equal offsets. by = -1: after all it is neither."""
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


def complete_optimizer(module: ModuleType) -> None:
    """An optimizer's states, and what its step makes on the way."""
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


def complete_module(module: ModuleType) -> None:
    """Parameters and buffers that a module takes to the GPU: cuda(), to(), half() and their kin."""
    modules: Any = getattr(module, "Module")
    modules._apply = _stable(modules._apply)
