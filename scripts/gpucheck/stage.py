# SPDX-License-Identifier: Apache-2.0
"""What a stage is, which there are, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucheck.report import Report
from gpucheck.setup import Setup


@dataclass(frozen=True)
class Stage:
    """limit_s: after that it is ended. least_s: with less time left it is not begun, and the stages before it leave it
    that much; but for a spare one, which gets what the others leave. call: whose time is kept for it (1, 2 or 3)."""

    name: str
    limit_s: float
    least_s: float
    run: Callable[[Setup, Report], None] | None = None
    call: int = 1
    direct: bool = False  # it calls the driver itself, not by way of programs
    needs: tuple[str, ...] = ()  # stages whose figures it reads

    @property
    def spare(self) -> bool:
        return self.call > 1


STAGES: list[Stage] = []
# First what decides most: whether whole training jobs run on a GPU through the torch plugin, with the native bits, at the
# native speed, and whether they can be checkpointed. Before that only what this stands on. Then what nobody can know
# without a GPU about single calls of the driver. The second and third call have the older suites.
ORDER = (
    "prepare", "machine", "driver", "a_ranges", "c_first",
    "t_first", "t_models", "t_cost", "t_migrate", "t_checkpoint", "t_memory", "t_graphs", "t_compile", "t_two",
    "b_layouts", "b_modules", "e_host_memory", "b_order", "b_faults", "a_vmm_cost", "a_alias", "e_dump",
    "t_tune", "t_ranks", "t_share", "t_ops", "f_criu", "f_cuda_checkpoint", "f_checkpoint", "c_training", "d_cost", "c_cudart", "c_registered", "c_nvml",
    "c_programs", "c_compile_conv", "c_torch", "f_checkpoint_cudart", "c_third_party", "c_triton", "f_checkpoint_numba", "c_training_numba",
    "f_checkpoint_torch", "c_numba_tests",
)  # fmt: skip


def stage(
    limit_s: float,
    least_s: float,
    *,
    call: int = 1,
    direct: bool = False,
    needs: tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Adds the function to STAGES, whose order is ORDER."""

    def add(run: Callable[[Setup, Report], None]) -> Callable[[Setup, Report], None]:
        STAGES.append(Stage(run.__name__, limit_s, least_s, run, call, direct, needs))
        STAGES.sort(key=lambda one: ORDER.index(one.name))
        return run

    return add
