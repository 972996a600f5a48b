# SPDX-License-Identifier: Apache-2.0
"""Packages that bring kernels of their own, which the software GPU cannot run."""

from __future__ import annotations

import functools
from importlib.machinery import ModuleSpec
from typing import Any

from devproxy_torch import plugin
from devproxy_torch.say import say_once


def say_own_kernels(spec: ModuleSpec) -> None:
    """Before the package is run: its CUDA half may fail then, with a library's name for a reason."""
    if not plugin.ops_run_on_cuda():
        say_once(
            f"{spec.name} brings kernels of its own, which are a GPU's machine code: the software GPU runs none of them; what "
            "needs them runs with --device cuda"
        )


def take_ops(torch: Any) -> None:
    """A package's library may have CUDA kernels (torchvision's), which the software GPU cannot run; the op's CPU kernel runs
    instead, as it does where the package has no other."""
    plain = torch.ops.load_library

    @functools.wraps(plain)
    def load_library(path: Any) -> Any:
        bindings = plugin.bindings()
        bindings.note_known_ops()
        answer = plain(path)
        bindings.take_package_ops()
        return answer

    torch.ops.load_library = load_library
