# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: torch._C._CUDAGraph, and torch.compile where it would put compiled code into trees of graphs.

Such a tree takes the memory of a graph's pool apart (torch._inductor.cudagraph_trees), which devproxy does not offer. The
compiled code runs without graphs instead, with the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from devproxy_torch.say import say_once
from devproxy_torch.stand_ins import refuse


def names(sc: Any) -> dict[str, object]:
    class _CUDAGraph:
        _capturing: dict[int, Any] = {}  # by the address of the plugin's own object
        _graph: Any

        def __new__(cls, keep_graph: bool = False) -> Any:
            self = object.__new__(cls)
            self._graph = sc.Graph(keep_graph)
            return self

        def register_generator_state(self, generator: Any) -> None:
            self._graph.register_generator(generator)

        def capture_begin(
            self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
        ) -> None:
            self._graph.capture_begin(pool, capture_error_mode)
            self._capturing[self._graph.address()] = self

        def capture_end(self) -> None:
            self._capturing.pop(self._graph.address(), None)
            self._graph.capture_end()

        def instantiate(self) -> None:
            self._graph.instantiate()

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._capturing.pop(self._graph.address(), None)
            self._graph.reset()

        def pool(self) -> tuple[int, int]:
            return tuple(self._graph.pool())

        def enable_debug_mode(self) -> None:
            self._graph.enable_debug_mode()

        def debug_dump(self, debug_path: str) -> None:
            self._graph.debug_dump(debug_path)

        def raw_cuda_graph(self) -> int:
            return int(self._graph.raw_graph())

        def raw_cuda_graph_exec(self) -> int:
            return int(self._graph.raw_exec())

        @staticmethod
        def get_currently_capturing_graph() -> Any:
            graph = _CUDAGraph._capturing.get(sc.capturing_graph())
            if graph is None:
                raise RuntimeError("The current stream is not currently capturing.")
            return graph

        begin_capture_to_if_node = refuse("a conditional node of a CUDA graph")
        end_capture_to_conditional_node = refuse("a conditional node of a CUDA graph")

    return {"_CUDAGraph": _CUDAGraph}


def complete_compile_fx(module: Any, say: Callable[[str], None] = say_once) -> None:
    """torch._inductor.compile_fx on a real GPU: mode="reduce-overhead" and its kin."""
    plain = module.compile_fx
    name = "triton.cudagraphs"

    # Not later, in what compiles a graph: code that Inductor has cached does not pass there, and gets its graphs by the setting.
    @functools.wraps(plain)
    def compile_fx(model: Any, inputs: Sequence[Any], *given: Any, **named: Any) -> Any:
        patches = named.get("config_patches") or {}
        if not given and patches.get(name, module.config.triton.cudagraphs):
            say("torch.compile: the compiled code runs without CUDA graphs behind devproxy")
            named["config_patches"] = {**patches, name: False}
        return plain(model, inputs, *given, **named)

    module.compile_fx = compile_fx


def complete_backend(module: Any) -> None:
    """torch._dynamo.backends.cudagraphs: eager operators in graphs."""

    def eager(model: Any, inputs: Sequence[Any], **named: Any) -> Any:
        say_once(
            "torch.compile(backend='cudagraphs') runs eager behind devproxy, without CUDA graphs"
        )
        return model

    module.CudagraphsBackend.__call__ = staticmethod(eager)
