# SPDX-License-Identifier: Apache-2.0
"""torch.compile in a job: the software GPU runs Inductor's C++ kernels; what it cannot run is eager, and one line says so."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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


@pytest.fixture(autouse=True)
def as_the_server() -> Iterator[None]:
    """The server runs a kernel with one thread, so the CPU's are compiled for one."""
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """Attention between two normalizations: one of rows, one of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.project = nn.Linear(16, 48)
        self.batches = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.project(self.norm(x)).chunk(3, -1)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = nn.functional.gelu(x + found.transpose(1, 2).flatten(2))
        return self.batches(x.transpose(1, 2)).softmax(-1)


def train(device: str, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Block().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = torch.compile(model, **options)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (called(torch.randn(4, 12, 16).to(device)) - 0.1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().cpu())
    return found + [value.cpu() for value in model.state_dict().values()]


def test_training_is_that_of_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    """The same backend on both, bit for bit."""
    wanted = train("cpu")
    for mode in ("default", "reduce-overhead", "max-autotune"):
        assert all(map(torch.equal, train("cuda", mode=mode), wanted)), mode
    assert LINE not in capfd.readouterr().err


def test_optimizer() -> None:
    """Compiled, torch.optim takes its forms for CUDA on the one and for CPU on the other: close is all there can be."""
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        value = torch.randn(50, device="cuda").requires_grad_()
        optimizer = torch.optim.AdamW([value])
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(3):
            value.grad = value.detach().sin()
            step()
        found.append(value.detach())
    torch.testing.assert_close(*found)


def test_shapes_that_change() -> None:
    @torch.compile(dynamic=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(0).max(-1)[0] + x.size(0)

    for rows in (3, 5, 40):
        x = torch.randn(rows, 20)
        assert torch.equal(f(x.cuda()).cpu(), f(x))


def test_dropout_is_drawn_from_the_generator() -> None:
    @torch.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) * 2

    x = torch.ones(1000, device="cuda", requires_grad=True)
    torch.manual_seed(3)
    found = f(x)
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.manual_seed(3)
    assert torch.equal(found, f(x))
    assert torch.equal(found, grad)
    assert 1.8 < found.mean() < 2.2


DYNAMIC: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)).cuda(),
    "attention": lambda: (
        lambda x: nn.functional.scaled_dot_product_attention(*[x[:, None]] * 3, dropout_p=0.5)
    ),
    "cell": lambda: Cells().cuda(),
}


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(16, 8), nn.GRUCell(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_batch_of_another_size(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As the last one of an epoch. It is compiled for all sizes then."""
    torch.manual_seed(0)
    model = DYNAMIC[name]()
    compiled = torch.compile(model)
    for size in (8, 8, 5, 3):
        x = torch.rand(size, 16, device="cuda", requires_grad=True)
        found = compiled(x)
        if name == "cell":
            torch.testing.assert_close(found, model(x))
        found.sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
    assert LINE not in capfd.readouterr().err


def test_what_belongs_to_the_host() -> None:
    """Tensors of the CPU that go into a graph of the GPU, that it changes, and that it returns."""

    @torch.compile
    def f(x: torch.Tensor, rows: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factor.add_(1)
        return x + rows.cuda() * factor, rows.sum(), factor * 2, x.sum().cpu()

    x, rows = torch.ones(3, device="cuda"), torch.arange(3.0)
    for _ in range(2):
        factor = torch.tensor(2.0)
        found = f(x, rows, factor)
        assert [one.device.type for one in found] == ["cuda", "cpu", "cpu", "cpu"]
        assert [one.tolist() for one in found] == [[1, 4, 7], 3, 6, 3]
        assert factor == 3


def test_the_current_stream_and_its_order() -> None:
    @torch.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    x = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(10):
            x = f(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert (x == 1023).all()


def test_an_index_that_is_out_of_bounds() -> None:
    run(
        """
        @torch.compile
        def f(x, i):
            return x[i] * 2
        try:
            f(torch.ones(10, device="cuda"), torch.tensor([3, 12], device="cuda"))
            torch.cuda.synchronize()
        except RuntimeError as error:
            assert "device-side assert" in str(error) and "cpp_fused" in str(error), error
        else:
            raise SystemExit("no error")
        """
    )


def inside(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return found


def drawn_on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return x + torch.rand(3).to(x.device)


def of_two_gpus(x: torch.Tensor) -> torch.Tensor:
    there = "cpu" if x.device.type == "cpu" else "cuda:1"
    return (x.to(there) * 2).sin().to(x.device)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (inside, "it has a graph inside"),
        (drawn_on_the_cpu, "it draws random numbers of the CPU"),
        (of_two_gpus, "it has tensors of several GPUs"),
    ],
)
def test_a_graph_that_runs_eager(
    function: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(torch.compile(function)(x.cuda()).cpu(), function(x))
    said = capfd.readouterr().err
    assert said.count(LINE) == 1 and "runs eager" in said and reason in said, said


def test_integers_divided_by_zero() -> None:
    """As eager ops do it (test_types.py). Rows of lengths that fill vectors, and that do not."""

    def divide(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        to_zero = torch.div(a, b, rounding_mode="trunc")
        return (
            a // b,
            a % b,
            to_zero,
            torch.fmod(a, b),
            a // 0,
            9 % b,
            torch.where(b > 0, to_zero, 7),
        )

    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        least = torch.iinfo(dtype).min
        for length in (1, 203):
            torch._dynamo.reset()
            draw = torch.Generator().manual_seed(length)
            a = torch.randint(-30 if least else 0, 30, (length,), generator=draw).to(dtype).cuda()
            b = torch.randint(-3 if least else 0, 4, (length,), generator=draw).to(dtype).cuda()
            a[::7] = least
            b[::14] = -1
            b[-1] = 0
            found = torch.compile(divide)(a, b)
            wanted = divide(a, b)
            assert [one.dtype for one in found] == [one.dtype for one in wanted]
            assert all(map(torch.equal, found, wanted)), (dtype, length)
    a, b = torch.tensor([5.0, 6.0], device="cuda"), torch.tensor([0.0, 4.0], device="cuda")
    assert torch.compile(divide)(a, b)[0].tolist() == [torch.inf, 1]


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from devproxy_torch import inductor

    monkeypatch.setattr(inductor, "MODULE", "no C++")
    x = torch.ones(3, 7, device="cuda", requires_grad=True)
    f = torch.compile(lambda x: x.sin() * 7)
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    assert torch.equal(grad, x.cos() * 7)
    said = capfd.readouterr().err
    assert said.count(LINE) == 1 and "Inductor's CPU backend failed: " in said, said
    assert "Triton" not in said, said


def test_the_modules_know_the_servers_header(tmp_path: Path) -> None:
    """What a module is told of devproxy_soft_module.h is written twice: the job's machine may not have the header."""
    from devproxy_torch import inductor

    types = {
        "devproxy_soft_launch": "params params_bytes services function_cookie error error_bytes state",
        "devproxy_soft_function": "kernel cookie max_threads shared_bytes n_params params",
        "devproxy_soft_module_table": "abi n_globals globals get_function load",
        "devproxy_soft_stretch": "place writes",
        "devproxy_soft_footprint": "name n_stretches repeatable stretches",
    }
    lines = [
        "#include <cstddef>",
        '#include "devproxy_soft_module.h"',
        "namespace ours {",
        inductor.MODULE_ABI.replace('extern "C" {', 'extern "C++" {'),
        "}",
        "static_assert(DEVPROXY_SOFT_MODULE_ABI == 1);",
    ]
    for name, fields in types.items():
        lines.append(f"static_assert(sizeof(ours::{name}) == sizeof(::{name}));")
        lines += [f"static_assert(offsetof(ours::{name}, {f}) == offsetof(::{name}, {f}));" for f in fields.split()]  # fmt: skip
    source = tmp_path / "abi.cc"
    source.write_text("\n".join(lines))
    include = Path(__file__).parents[2] / "devproxy/hal/host_module/include"
    done = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", f"-I{include}", str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_one_thread_that_compiles() -> None:
    """Inductor waits for no compiler then: so it is by itself on a machine of one core."""
    said = run(
        """
        torch._inductor.config.compile_threads = 1
        @torch.compile
        def on_gpu(x):
            return (x * 2 + 1).sin()
        found = on_gpu(torch.ones(1000, device="cuda")).cpu()
        assert torch.allclose(found, torch.full((1000,), 3.0).sin())
        """
    )
    assert LINE not in said, said


def test_a_kernel_of_so_many_tensors_that_a_launch_cannot_say_how_far_each_reaches() -> None:
    from devproxy_torch import inductor

    made = []
    plain = inductor.module_text

    def module_text(name: str, types: Sequence[str], source: str) -> str:
        made.append(types)
        return plain(name, types, source)

    many = [torch.full((64,), float(i)) for i in range(200)]
    settings = torch._inductor.config.patch(realize_reads_threshold=1000)
    with settings, pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "module_text", module_text)
        found = torch.compile(lambda *given: sum(given))(*(one.cuda() for one in many))
    assert len(made) == 1 and len(made[0]) > 200 and not inductor.told_pointers(made[0])
    assert torch.equal(found.cpu(), sum(many))


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


def test_compiled_code_runs_without_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, Inductor's own steps are left but for the trees of graphs. Seen on a graph of the host, which no hook takes."""
    from devproxy_torch import graphs
    from torch._inductor import compile_fx

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    x = torch.arange(8.0)
    said: list[str] = []
    settings: list[bool] = []
    for mode in ("default", "reduce-overhead", "reduce-overhead"):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            plain = compile_fx.compile_fx

            def seen(*given: object, plain: object = plain, **named: object) -> object:
                with compile_fx.config.patch(named.pop("config_patches", None) or {}):
                    settings.append(bool(compile_fx.config.triton.cudagraphs))
                    return plain(*given, **named)  # type: ignore[operator]

            patch.setattr(compile_fx, "compile_fx", seen)
            graphs.complete_compile_fx(compile_fx, said.append)
            assert torch.compile(double, mode=mode)(x).equal(double(x))
    assert settings == [False] * 3
    assert len(said) == 2 and "without CUDA graphs" in said[0]


def test_the_backend_of_graphs() -> None:
    text = run(
        """
        f = torch.compile(lambda x: (x @ x).tanh(), backend="cudagraphs")
        x = torch.eye(4, device="cuda", requires_grad=True)
        for _ in range(2):
            f(x).sum().backward()
        assert x.grad is not None and f(x).equal((x @ x).tanh())
        """
    )
    assert text.count("backend='cudagraphs') runs eager") == 1
