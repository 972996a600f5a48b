# SPDX-License-Identifier: Apache-2.0
"""Whole training programs, and what each of them needs."""

from __future__ import annotations

import os
import sys

from gpucheck.gpt2 import gpt2_line, gpt2_steps
from gpucheck.setup import Setup
from gpucheck.torch_sides import torch_python


def subjects(setup: Setup) -> dict[str, list[str]]:
    """Whole training programs, each a command: on the driver API, on the runtime (CUDA C++), on numba-cuda, on PyTorch."""
    programs = setup.bundle / "programs"
    return {
        "driver": [sys.executable, str(programs / "train.py")],
        "cudart": [str(programs / "cudart" / "mlp")],
        "numba": [sys.executable, str(programs / "train_numba.py")],
        "torch": [torch_python(setup), str(programs / "train_torch.py")],
        "gpt2": gpt2_line(setup, gpt2_steps(setup)),
    }


# Without importing it, which takes seconds.
TORCH_WITH_CUDA = (
    "import importlib.util, os, runpy; torch = importlib.util.find_spec('torch'); assert torch, 'no torch';"
    " assert runpy.run_path(os.path.join(os.path.dirname(torch.origin), 'version.py'))['cuda'], 'not with CUDA'"
)


def missing_of(subject: str, line: list[str], setup: Setup) -> str:
    """What it needs and is not here."""
    need = {"numba": "import numba.cuda", "torch": TORCH_WITH_CUDA}
    if subject == "gpt2":
        return ""
    if subject in need:
        there = setup.native().run([line[0], "-c", need[subject]], 40)
        return f"{subject} is not here, or not with CUDA: {there.brief()}" if there.code else ""
    return "" if os.path.exists(line[-1]) else f"{line[-1]} is not in the bundle"


# In the job: its torch runs over devproxy's CUDA runtime alone, as it did before there was a plugin for real GPUs.
WITHOUT_PLUGIN = {"DEVPROXY_TORCH": "cudart"}
# Device memory that the training programs hold besides their own, so that a rate can be told from a time. numba's and
# PyTorch's fill theirs from the host.
BALLAST_MIB = {"driver": 4096, "cudart": 1024, "numba": 256, "torch": 256}


def ballast_mib(setup: Setup, subject: str) -> int:
    return 16 if setup.small else BALLAST_MIB[subject]
