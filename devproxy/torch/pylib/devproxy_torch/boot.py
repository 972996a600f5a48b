# SPDX-License-Identifier: Apache-2.0
"""When torch is completed: a finder before the others wraps the loaders of some modules.

The order is the delicate point. torch's C++ side asks for its CUDA hooks while `torch._C` is being made, so the plugin's
core library is loaded before that; the Python names of a CUDA build (`torch._C._cuda_*`) are added right after
`torch._C` ran and before any other module of torch looks for them. A finder on sys.meta_path sits at those moments, and
only there: a process that never imports torch pays nothing.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

# Late imports: every process of a job loads this module, and most never import torch.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    from devproxy_torch.hooks import Hook

WITH_KERNELS = ("bitsandbytes", "flash_attn")  # packages that bring kernels of their own


def install() -> None:
    """Puts the finder in place, once. It does nothing before torch is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _find_hooks() -> dict[str, Hook]:
    """Empty where the client shim is not in this process, or torch is none that the plugin is for."""
    from devproxy_torch import plugin

    if not plugin.shim_is_loaded() or not plugin.is_for(PathFinder.find_spec("torch")):
        return {}
    from devproxy_torch import hooks

    return hooks.of(WITH_KERNELS)


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


class _Finder:
    """Stands before the other finders."""

    _hooks: dict[str, Hook] | None = None  # not known before torch is first imported

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package != "torch" and package not in WITH_KERNELS:
            return None
        if self._hooks is None:
            self._hooks = _find_hooks()
        hook = self._hooks.get(name)
        if hook is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, *hook)  # type: ignore[assignment]
        return spec
