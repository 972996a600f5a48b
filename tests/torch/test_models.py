# SPDX-License-Identifier: Apache-2.0
"""Five training steps on 'cuda' against device='cpu' in a plain process: every loss, parameter, buffer and moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = ("LD_PRELOAD", "DEVPROXY_DEVICE", "DEVPROXY_JOB_DIR", "DEVPROXY_GPUS", "PYTHONPATH")


@pytest.fixture(scope="module")
def cpu_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a process that knows nothing of devproxy."""
    out = tmp_path_factory.mktemp("cpu") / "cpu.pt"
    env = {k: v for k, v in os.environ.items() if k not in OURS}
    command = [
        sys.executable,
        os.path.join(HERE, "models.py"),
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = torch.load(out)
    return results


@pytest.mark.parametrize("name", list(models.MODELS))
def test_training_is_bitwise_equal_to_the_cpu(name: str, cpu_results: dict[str, Any]) -> None:
    theirs = models.train(name, "cuda", 5)
    mine = cpu_results[name]
    assert torch.equal(mine["losses"], theirs["losses"])
    assert mine["state"].keys() == theirs["state"].keys()
    different = [k for k, v in mine["state"].items() if not torch.equal(v, theirs["state"][k])]
    assert not different


def test_training_is_equal_from_run_to_run() -> None:
    a, b = models.train("gpt-dropout", "cuda", 3), models.train("gpt-dropout", "cuda", 3)
    assert torch.equal(a["losses"], b["losses"])
    assert all(torch.equal(v, b["state"][k]) for k, v in a["state"].items())


def test_example_trains(tmp_path: Path) -> None:
    example = os.path.join(HERE, "..", "..", "examples", "train_gpt.py")
    command = [sys.executable, example, "--steps", "12", "--every", "4", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[5]) for line in done.stdout.splitlines() if "  step " in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0] < 6


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
def test_quantization_aware_training() -> None:
    """Per channel, the observers get their size in their first run."""
    import torch.ao.quantization as quantization

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            quantization.QuantStub(),
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 36, 5),
        ).train()
        net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        net = quantization.prepare_qat(net).to(device)
        images, kinds = torch.randn(6, 3, 8, 8).to(device), torch.randint(5, (6,)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), kinds).backward()
            optimizer.step()
        scale = net[1].weight_fake_quant.scale
        assert scale.shape == (4,) and scale.device.type == device
        return [t.detach().cpu() for t in net.state_dict().values()]

    for found, wanted in zip(trained("cuda"), trained("cpu"), strict=True):
        assert found.equal(wanted)


def test_an_encoder_that_makes_nested_tensors_is_told_how_not_to() -> None:
    padded = torch.tensor([[False] * 5 + [True] * 2] * 2)

    def encoded(device: str, nested: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).to(device).eval()
        with torch.no_grad():
            words = torch.randn(2, 7, 32).to(device)
            return net(words, src_key_padding_mask=padded.to(device)).cpu()

    with pytest.raises(NotImplementedError, match="enable_nested_tensor=False"):
        encoded("cuda", nested=True)
    assert encoded("cuda", nested=False).equal(encoded("cpu", nested=False))
