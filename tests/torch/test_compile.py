# SPDX-License-Identifier: Apache-2.0
"""torch.compile in a job: the software GPU runs no code of Inductor's, so a graph of the GPU runs eager, and one line says so."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

LINE = "torch.compile: "


def run(program: str) -> str:
    """What a script of its own says on stderr."""
    lines = "import torch\nfrom torch import nn\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def train(compiled: bool, **options: object) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    called = torch.compile(model, **options) if compiled else model

    def step() -> None:
        optimizer.step()

    stepped = torch.compile(step, **options) if compiled else step
    for _ in range(3):
        optimizer.zero_grad()
        called(torch.randn(4, 8, device="cuda")).square().mean().backward()
        stepped()
    return list(model.state_dict().values())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_training_is_that_of_the_eager_backend(mode: str) -> None:
    found = train(True, mode=mode)
    assert all(map(torch.equal, found, train(True, backend="eager")))
    # AdamW computes its corrections in another order while it is traced.
    torch.testing.assert_close(found, train(False))


def test_one_line_says_so() -> None:
    said = run(
        """
        for width in (3, 4):
            model = torch.compile(nn.Linear(width, 2).cuda())
            model(torch.ones(1, width, device="cuda")).sum().backward()
        @torch.compile
        def made_inside():
            return torch.ones(3, device="cuda") * 2
        assert made_inside().tolist() == [2, 2, 2]
        """
    )
    assert said.count(LINE) == 1, said
    assert "Triton" not in said.replace("Inductor and Triton", ""), said
    assert "SMs" not in said, said


def test_a_graph_of_the_host_is_compiled() -> None:
    said = run(
        """
        from torch._inductor import metrics
        @torch.compile
        def on_host(x):
            return (x * 2 + 1).sin()
        on_host(torch.ones(1000))
        assert metrics.generated_kernel_count + metrics.generated_cpp_vec_kernel_count > 0
        """
    )
    assert LINE not in said, said


def test_resets() -> None:
    torch._dynamo.reset()
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_attention(backend: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 16, 8, device="cuda", requires_grad=True)
    found = attend(q)
    torch.testing.assert_close(
        found, nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
    found.sum().backward()
    assert q.grad is not None


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: object, h: object, q: int, k: int) -> bool:
        return q >= k

    mask = create_block_mask(causal, None, None, 128, 128, device="cuda")
    q, k, v = (torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True) for _ in range(3))
    found = torch.compile(flex_attention)(q, k, v, block_mask=mask)
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert q.grad is not None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_runs_op_by_op() -> None:
    """Its fuser would write CUDA kernels for the GPU at the third call, also where the program turns it on."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * y + torch.exp(x) * 2

    x = torch.randn(100, device="cuda", requires_grad=True)
    y = torch.randn(100, device="cuda")
    for script in (torch.jit.trace(f, (x, y), check_trace=False), torch.jit.script(f)):
        for fuser in ("fuser0", "fuser1"):
            with torch.jit.fuser(fuser):
                for _ in range(4):
                    assert torch.equal(script(x, y), f(x, y))
                    (grad,) = torch.autograd.grad(script(x, y).sum(), x)
                    (wanted,) = torch.autograd.grad(f(x, y).sum(), x)
                    assert torch.equal(grad, wanted)
                assert not torch._C._jit_can_fuse_on_gpu()
                assert "FusionGroup" not in str(torch.jit.last_executed_optimized_graph())
