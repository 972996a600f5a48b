# SPDX-License-Identifier: Apache-2.0
"""torch.profiler and emit_nvtx: their GPU's times by events, and what the servers record besides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from devproxy_torch import plugin
from devproxy_torch.say import say_once
from devproxy_torch.servers_record import ServersRecord

# Late imports: torch is being imported when this module is.


def complete_autograd(module: ModuleType) -> None:
    """A profile may be asked for CUDA, which the CPU wheel's torch does not know."""
    import torch

    plain = module._supported_activities
    cuda = torch._C._profiler.ProfilerActivity.CUDA
    setattr(
        module,
        "_supported_activities",
        lambda: plain() | ({cuda} if torch._C._cuda_getDeviceCount() > 0 else set()),
    )


def complete(module: ModuleType) -> None:
    """Kineto sees no kernel in this process, so torch takes events for the GPU's times (client/profile.cc)."""
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
            say_once(
                "torch.profiler sees no GPU kernels, copies or CUDA calls of this job, which run in devproxy's server; "
                "its CUDA times are those of whole operators on their streams, by events; an exported trace shows what the "
                "server did on each stream"
            )
            # The times by events are those of the operators that it records.
            given["use_cpu"] = True
            self._devproxy_record = ServersRecord()
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
            say_once(
                "emit_nvtx: a tool that is attached to this job sees its ranges and no GPU work, which runs in devproxy's "
                "server"
            )
        return plain_enter(self)

    def prepare(*given: Any, **named: Any) -> None:
        bindings = plugin.bindings()
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
