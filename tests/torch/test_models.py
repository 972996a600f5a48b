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


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("as_floats", [False, True])
def test_an_encoder_that_makes_nested_tensors_of_its_padding(normed: bool, as_floats: bool) -> None:
    padded = torch.tensor([[False] * 7, [False] * 5 + [True] * 2, [False] + [True] * 6])
    mask = torch.zeros(3, 7).masked_fill(padded, -torch.inf) if as_floats else padded

    def encoded(device: str, nested: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        norm = nn.LayerNorm(32) if normed else None
        net = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=nested).to(device).eval()
        words = torch.randn(3, 7, 32).to(device)
        with torch.no_grad():
            return net(words, src_key_padding_mask=mask.to(device)).cpu()

    found, dense = encoded("cuda", nested=True), encoded("cpu", nested=False)
    assert found[~padded].equal(dense[~padded])
    torch.testing.assert_close(found, encoded("cpu", nested=True))  # zeros in the padding, too
    if not normed:
        assert not found[padded].any()


def test_a_scripted_encoder() -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    words, padded = torch.randn(2, 7, 32), torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    wanted = net(words, src_key_padding_mask=padded)
    with torch.no_grad():
        assert torch.jit.script(net)(words, src_key_padding_mask=padded).shape == wanted.shape


def test_a_nested_tensor_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="devproxy has no nested tensors"):
        torch._nested_tensor_from_mask(
            torch.zeros(2, 3, 4, device="cuda"), torch.ones(2, 3, dtype=torch.bool, device="cuda")
        )
