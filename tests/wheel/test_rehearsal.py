# SPDX-License-Identifier: Apache-2.0
"""Every stage of scripts/gpu_check.py over the recording device, on both sides: `make gpu-rehearsal`.

It says that a stage's body runs to its end, or how it ends there; nothing about a GPU, and nothing about what kernels
compute. What is cheap of it is a part of make test (tests/integration/test_gpu_check.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ["DEVPROXY_WHEEL_PYTHON"]
# What that device cannot do: stage -> how it ends, and words of its text. All others are ok.
OTHERWISE = {
    "a_ranges": ("failed", "not every slot gets the addresses that it needs"),
    "a_vmm_cost": ("failed", "CUDA_ERROR_OUT_OF_MEMORY"),
    "a_alias": ("refused", "cuMemMap: 801"),
    "b_order": ("refused", "cuStreamWriteValue64_v2: 801"),
    "c_programs": ("failed", "and do not: lost poll, lost wait"),  # those wait for a kernel
    "c_third_party": ("failed", "none passes natively: nothing was compared"),
    "f_cuda_checkpoint": ("refused", "cuCheckpointProcessLock: 801"),
}


def test_every_stage(tmp_path: Path) -> None:
    bundle = ROOT / "build" / "gpu-bundle"
    line = [
        PYTHON,
        str(bundle / "gpu_check.py"),
        "--rehearse",
        "record",
        "--small",
        "--limit",
        "2400",
    ]
    done = subprocess.run(
        [*line, "--out", str(tmp_path)], capture_output=True, text=True, timeout=2500, check=False
    )
    results = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    print(done.stdout)
    assert len(results) >= 30
    for result in results:
        usual = ("ok", "")
        if result["name"].startswith("t_"):
            usual = ("refused", "the recording device runs no operators")
        status, words = OTHERWISE.get(result["name"], usual)
        assert result["status"] == status, result
        assert words in result["text"]
