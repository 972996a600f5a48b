# SPDX-License-Identifier: Apache-2.0
"""The stages, by family. Each module adds its own to STAGES when it is imported, which happens here."""

from __future__ import annotations

from gpucheck.stage import STAGES
from gpucheck.stages import (
    addresses,
    checkpoints,
    cost,
    machine,
    memory,
    modules,
    programs,
    shared,
    third_party,
    torch_compared,
    torch_jobs,
    training,
)

__all__ = [
    "STAGES",
    "addresses",
    "checkpoints",
    "cost",
    "machine",
    "memory",
    "modules",
    "programs",
    "shared",
    "third_party",
    "torch_compared",
    "torch_jobs",
    "training",
]
