# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges: torch._C._nvtx."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class _NoRanges:
    """torch._C._nvtx where the wheel has none: what NVTX answers when no tool is attached (nvToolsExt.h)."""

    NO_TRACKING = -2  # NVTX_NO_PUSH_POP_TRACKING
    rangePushA = staticmethod(lambda message: _NoRanges.NO_TRACKING)
    rangePop = staticmethod(lambda: _NoRanges.NO_TRACKING)
    rangeStartA = staticmethod(lambda message: 0)
    rangeEnd = staticmethod(lambda handle: None)
    markA = staticmethod(lambda message: None)


def complete(module: ModuleType) -> None:
    """The CUDA wheel's own ranges stay: they tell a tool that is attached to this process, and ask no GPU. Those in a stream
    would be host functions of NVIDIA's runtime, and become nothing."""
    ranges: Any = getattr(module, "_nvtx", None)
    if ranges is None:
        ranges = _NoRanges()
        setattr(module, "_nvtx", ranges)
    ranges.deviceRangeStart = lambda message, stream=0: None
    ranges.deviceRangeEnd = lambda handle, stream=0: None
