# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over gloo with tensors of the GPU: two ranks, against the same on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("gloo_program.py")


def test_gloo_on_a_gpus_tensors(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert all("PASS gloo" in text for text in said), said
