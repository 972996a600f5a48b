# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.CUDAGraph: what is captured does, replayed, what it does eagerly on the same device, to the last bit."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

STREAM_CAPTURING = "operation not permitted when stream is capturing"


@pytest.fixture(autouse=True)
def _default_stream_afterwards() -> Iterator[None]:
    """torch leaves the capture's stream current where a capture fails; and no test sees another's garbage go."""
    gc.collect()
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def warm_up(function: Callable[[], object], times: int = 3) -> None:
    """On a side stream, as torch's documentation asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def net(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(32), nn.Linear(32, 5)]
    return nn.Sequential(*layers).to("cuda")


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


# -- inference -------------------------------------------------------------------------------------------------------


def test_replayed_forward_is_the_eager_one() -> None:
    torch.manual_seed(1)
    model = net().eval()
    static = torch.zeros(7, 12, device="cuda")
    inputs = [torch.randn(7, 12) * scale for scale in (0.1, 1, 10, 1)]
    with torch.no_grad():
        warm_up(lambda: model(static))
        graph, out = captured(lambda: model(static))
        for x in inputs:
            static.copy_(x)
            graph.replay()
            assert torch.equal(out, model(x.cuda()))


def test_signatures_that_were_never_seen_are_captured() -> None:
    """Without a warm-up, also ops that read indices which nobody has computed yet, and masks."""
    table = torch.randn(11, 3, device="cuda")
    static = torch.zeros(2, 13, dtype=torch.long, device="cuda")
    # Memory that the capture will take is full of what is no index.
    junk = [torch.full((64,), -(2**60), dtype=torch.long, device="cuda") for _ in range(64)]
    del junk

    def function() -> Tensor:
        index = static.remainder(11)
        rows = torch.nn.functional.embedding(index, table)
        picked = table[index.flatten()].view(2, 13, 3)
        gathered = table.gather(0, index.view(-1, 1).expand(-1, 3)).view(2, 13, 3)
        total = (rows + picked * 2 + gathered * 4).cumsum(1)
        return total.masked_fill(total > 3, 0.5).softmax(-1)

    graph, out = captured(function)
    for x in (torch.arange(26), torch.randint(0, 1000, (26,))):
        static.copy_(x.view(2, 13))
        graph.replay()
        assert torch.equal(out, function())


def test_pivots_that_nobody_has_computed_yet() -> None:
    """Without a warm-up: an op is tried with made-up pivots, which must be rows that there are."""
    a = torch.randn(9, 9)
    lu, lu_pivots = torch.linalg.lu_factor(a)
    ldl, ldl_pivots = torch.linalg.ldl_factor(a + a.T)
    b = torch.randn(9, 2)

    def function(*given: Tensor) -> Tensor:
        lu, lu_pivots, ldl, ldl_pivots, b = given
        solved = torch.linalg.lu_solve(lu, lu_pivots, b) + torch.linalg.ldl_solve(
            ldl, ldl_pivots, b
        )
        return torch.lu_unpack(lu, lu_pivots)[0] @ solved

    given = [t.cuda() for t in (lu, lu_pivots, ldl, ldl_pivots, b)]
    graph, out = captured(lambda: function(*given))
    graph.replay()
    assert torch.equal(out, function(*given))


def test_graph_of_the_second_device(two_devices: None) -> None:
    x = torch.ones(4, device="cuda:1")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(1)  # torch.cuda.graph's own is of the device where it was first used
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
        noise = torch.rand(4, device="cuda")
        y = x * 3 + noise
    assert y.device.index == 1 and torch.cuda.current_device() == 0
    x.fill_(5)
    torch.cuda.manual_seed_all(15)
    graph.replay()  # its own device, whichever is current
    torch.cuda.synchronize(1)
    torch.cuda.manual_seed_all(15)
    assert torch.equal(y, x * 3 + torch.rand(4, device="cuda:1"))


def test_replays_on_the_default_stream_and_in_order_with_eager_work() -> None:
    x = torch.zeros(4, device="cuda")
    graph, out = captured(lambda: x + 1)
    for i in range(20):
        x.fill_(i)
        graph.replay()
        x.copy_(out)
        x.mul_(2)
    assert x.tolist() == [40.0] * 4
    assert not torch.cuda.is_current_stream_capturing()


def test_work_of_two_streams_is_one_graph() -> None:
    x = torch.arange(5.0, device="cuda")
    other = torch.cuda.Stream()

    def function() -> Tensor:
        here = torch.cuda.current_stream()
        doubled = x * 2
        place = doubled.data_ptr()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            assert torch.cuda.is_current_stream_capturing()
            more = doubled + 1
            doubled.record_stream(other)
        del doubled
        again = x * 100
        assert again.data_ptr() != place  # where `doubled` is still to be read
        here.wait_stream(other)
        return more + again

    graph, out = captured(function)
    x.add_(3)
    graph.replay()
    assert out.tolist() == [(v + 3) * 102 + 1 for v in range(5)]


def test_pinned_copies_are_captured() -> None:
    source, result = torch.arange(6.0).pin_memory(), torch.zeros(6).pin_memory()
    x = torch.empty(6, device="cuda")

    def function() -> Tensor:
        x.copy_(source, non_blocking=True)
        y = x * 3
        result.copy_(y, non_blocking=True)
        return y

    graph, _ = captured(function)
    source.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [3.0 * (i + 1) for i in range(6)]


# -- training --------------------------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)


@pytest.mark.parametrize("optimizer_of", [sgd, adam])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_whole_training_step(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], dropout: float
) -> None:
    """The example of torch's documentation, and the same steps eagerly."""
    torch.manual_seed(5)
    data = [(torch.randn(8, 12), torch.randn(8, 5)) for _ in range(6)]

    def train(graphed: bool) -> list[Tensor]:
        torch.manual_seed(6)
        model, loss_of = net(dropout), nn.MSELoss()
        optimizer = optimizer_of(model)
        x, y = torch.randn(8, 12, device="cuda"), torch.randn(8, 5, device="cuda")

        def step() -> Tensor:
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def eager() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            return step()

        warm_up(eager)
        torch.manual_seed(7)
        run = eager
        if graphed:
            optimizer.zero_grad(set_to_none=True)
            graph, loss = captured(step)

            def run() -> Tensor:
                graph.replay()
                return loss

        seen = []
        for one, two in data:
            x.copy_(one)
            y.copy_(two)
            seen.append(run().detach().clone())
            seen += [p.detach().clone() for p in model.parameters()]
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append(torch.cuda.get_rng_state())
        return seen

    eager, replayed = train(False), train(True)
    assert len(eager) == len(replayed)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


def test_make_graphed_callables() -> None:
    def train(graphed: bool) -> list[Tensor]:
        torch.manual_seed(8)
        first, second = net(), nn.Linear(5, 2).to("cuda")
        x, h = torch.randn(8, 12, device="cuda"), torch.randn(8, 5, device="cuda")
        h.requires_grad_(True)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        if graphed:
            first, second = torch.cuda.make_graphed_callables((first, second), ((x,), (h,)))
        torch.manual_seed(9)
        losses = []
        for i in range(4):
            optimizer.zero_grad(set_to_none=True)
            # A branch on the host in between: what graphed callables are for.
            middle = first(torch.randn(8, 12).cuda())
            loss = second(middle * 2 if i % 2 else middle).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        return [*losses, *(p.detach() for p in (*first.parameters(), *second.parameters()))]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


# -- random numbers --------------------------------------------------------------------------------------------------


def test_each_replay_draws_what_eager_would() -> None:
    mine = torch.Generator("cuda").manual_seed(11)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(mine)

    def draw() -> list[Tensor]:
        return [
            torch.rand(5, device="cuda"),
            torch.randn(5, device="cuda", generator=mine),
            torch.nn.functional.dropout(torch.ones(50, device="cuda"), 0.5),
            torch.randperm(9, device="cuda"),
        ]

    with torch.cuda.graph(graph):
        static = draw()
    torch.manual_seed(12)
    eager = [draw() for _ in range(3)]
    after = torch.rand(3, device="cuda")
    torch.manual_seed(12)
    mine.manual_seed(11)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append([t.clone() for t in static])
    for one, two in zip(eager, replayed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(replayed[0][0], replayed[1][0])
    assert torch.equal(torch.rand(3, device="cuda"), after)


def test_backward_of_a_whole_layer_draws_its_forward_numbers_again() -> None:
    torch.manual_seed(13)
    layer = nn.GRU(4, 6, num_layers=2, dropout=0.5).to("cuda")
    x = torch.randn(5, 3, 4, device="cuda")

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        y, _ = layer(x)
        y.square().sum().backward()
        return y

    warm_up(step)
    layer.zero_grad(set_to_none=True)
    graph, y = captured(step)
    torch.manual_seed(14)
    graph.replay()
    replayed = [y.detach().clone(), *(p.grad.clone() for p in layer.parameters())]
    torch.manual_seed(14)
    eager = [step().detach(), *(p.grad for p in layer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


def test_a_generator_that_the_graph_does_not_know_is_refused() -> None:
    mine = torch.Generator("cuda")
    with pytest.raises(RuntimeError, match="register_generator_state"):
        captured(lambda: torch.rand(3, device="cuda", generator=mine))
    with pytest.raises(RuntimeError, match="during CUDA graph capture"):
        captured(lambda: torch.cuda.manual_seed(3) or torch.rand(1, device="cuda"))  # type: ignore[func-returns-value]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_graphs_that_share_a_pool() -> None:
    x = torch.arange(1000.0, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        a = (x + 1) * 2
    reserved = torch.cuda.memory_reserved()
    with torch.cuda.graph(second, pool=first.pool()):
        b = (a + 1) * 3
    assert second.pool() == first.pool()
    # What the first graph has used up (x + 1) serves the second: one block more, not two.
    assert torch.cuda.memory_reserved() - reserved == 4096
    x.mul_(2)
    first.replay()
    second.replay()
    expected = (torch.arange(1000.0) * 2 + 1) * 2
    assert torch.equal(a.cpu(), expected) and torch.equal(b.cpu(), (expected + 1) * 3)
    first.reset()
    x.zero_()
    second.replay()  # the pool is still the second's
    assert torch.equal(b.cpu(), (expected + 1) * 3)
    handle = torch.cuda.graph_pool_handle()
    assert handle != torch.cuda.graph_pool_handle()
    third = torch.cuda.CUDAGraph()
    with torch.cuda.graph(third, pool=handle):
        c = x + 7
    assert third.pool() == handle
    third.replay()
    assert torch.equal(c, x + 7)


def test_eager_memory_never_lies_in_a_graphs() -> None:
    x = torch.ones(300, device="cuda")
    graph, out = captured(
        lambda: ((x + 1) * 2 - 3).sqrt()
    )  # its intermediates are free in torch's eyes
    eager = [torch.full((300,), float(i), device="cuda") for i in range(50)]
    graph.replay()
    x.fill_(6.5)
    graph.replay()
    assert all(bool((t == i).all()) for i, t in enumerate(eager))
    assert out.tolist() == [(7.5 * 2 - 3) ** 0.5] * 300 or torch.equal(
        out, ((x + 1) * 2 - 3).sqrt()
    )


def test_memory_freed_in_a_capture_is_given_back_after_it() -> None:
    before = torch.cuda.memory_reserved()
    big = [torch.empty(1 << 20, device="cuda") for _ in range(3)]
    x = torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        big.clear()
        y = x + 1
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 1 << 20
    graph.replay()
    assert y.item() == 2


def test_reset_gives_memory_back() -> None:
    x = torch.ones(1 << 20, device="cuda")
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ((x + 1) * 2).exp()
    held = torch.cuda.memory_reserved() - reserved
    assert held >= 2 << 22  # the result and at least one intermediate
    assert torch.cuda.memory_allocated() - allocated == 1 << 22
    graph.replay()
    expected = y.clone()
    del y
    assert torch.cuda.memory_reserved() - reserved == held + (1 << 22)  # `expected` is eager's
    graph.replay()
    graph.reset()
    assert torch.cuda.memory_reserved() - reserved == 1 << 22
    del expected
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.mem_get_info()[0] >= free
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):  # it may be used again
        z = x + 41
    graph.replay()
    assert z[0].item() == 42
    # What outlives its graph stays until it is freed.
    del graph
    gc.collect()
    assert z[0].item() == 42
    del z
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved


def test_state_of_a_warm_up_may_be_dropped_behind_its_replays() -> None:
    """Memory of a side stream that only the current stream still uses: torch's own allocator would have kept it."""
    x = torch.randn(700, 700, device="cuda")
    side, main = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        state = torch.ones(700, 700, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(main):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state.mul_(2)
        for _ in range(20):
            x = (x @ x).tanh()  # keeps that stream busy for a while
        graph.replay()
        result = state + 1
        del state
        assert bool((result == 3).all())


# -- what a capture forbids ------------------------------------------------------------------------------------------


def item(x: Tensor) -> object:
    return x.sum().item()


def synchronize(x: Tensor) -> object:
    return torch.cuda.synchronize()


def stream_synchronize(x: Tensor) -> object:
    return torch.cuda.current_stream().synchronize()


def nonzero(x: Tensor) -> object:
    return x.nonzero()


def mask(x: Tensor) -> object:
    return x[x > 2]


@pytest.mark.parametrize("wait", [item, synchronize, stream_synchronize, nonzero, mask])
def test_waiting_in_a_capture_is_an_error_and_ends_it(wait: Callable[[Tensor], object]) -> None:
    x = torch.arange(5.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        y = x + 1
        with pytest.raises(RuntimeError, match=STREAM_CAPTURING):
            wait(y)
        with pytest.raises(RuntimeError, match="CUDA error"):
            graph.capture_end()
        assert not torch.cuda.is_current_stream_capturing()
    del y
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    # Nothing is lost but the capture.
    assert (x + 1).tolist() == [1, 2, 3, 4, 5]
    again, z = captured(lambda: x * 2)
    again.replay()
    assert z.tolist() == [0, 2, 4, 6, 8]


def test_copies_of_pageable_memory_are_refused() -> None:
    x = torch.arange(5.0, device="cuda")
    for copy in (lambda: x.cpu(), lambda: x.copy_(torch.ones(5)), lambda: x + torch.ones(5).cuda()):
        with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
            captured(copy)
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert x.tolist() == [0, 1, 2, 3, 4]


def test_an_exception_in_a_capture_leaves_nothing_open() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(ZeroDivisionError):
        captured(lambda: x + 1 / 0)
    with pytest.raises(RuntimeError, match="size"):
        captured(lambda: x + torch.ones(4, device="cuda"))
    assert not torch.cuda.is_current_stream_capturing()
    assert (x + 1).sum().item() == 6


def test_misuse_is_named() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="before capture_begin"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.pool()
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(RuntimeError, match="capture error mode"):
            graph.capture_begin(capture_error_mode="none")
        graph.capture_begin()
        assert torch.cuda.CUDAGraph.get_currently_capturing_graph() is graph
        x = torch.zeros(2, device="cuda")
        graph.capture_end()
        with pytest.raises(RuntimeError, match="not currently capturing"):
            torch.cuda.CUDAGraph.get_currently_capturing_graph()
        with pytest.raises(RuntimeError, match="already owns a captured graph"):
            graph.capture_begin()
    graph.replay()
    assert x.tolist() == [0, 0]
    with warnings.catch_warnings(), pytest.warns(UserWarning, match="Graph is empty"):
        empty, _ = captured(lambda: torch.empty(0, device="cuda"))
    empty.replay()


def test_kept_graph_and_its_picture(tmp_path: Path) -> None:
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = x + 1
    assert graph.raw_cuda_graph() != 0
    graph.instantiate()
    assert graph.raw_cuda_graph_exec() != 0
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5, 5]
    graph.debug_dump(str(tmp_path / "graph.dot"))
    assert "digraph" in (tmp_path / "graph.dot").read_text()
    plain, _ = captured(lambda: x + 1)
    with pytest.raises(RuntimeError, match="keep_graph"):
        plain.raw_cuda_graph()
    with pytest.raises(RuntimeError, match="enable_debug_mode"):
        plain.debug_dump(str(tmp_path / "none.dot"))


def test_another_thread_works_on_during_a_capture() -> None:
    """It allocates, frees, infers and waits for its own: in torch's eyes none of that is the capture's business."""
    import threading

    x = torch.ones(64, device="cuda")
    errors: list[BaseException] = []
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        try:
            begun.wait(60)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(1, 20):
                    t = torch.full((i, 7), float(i), device="cuda")
                    t = (t @ t.t()).relu()  # a new signature each time
                    del t
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=work)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        begun.set()
        over.wait(120)
        y = y * 3
    thread.join()
    assert not errors
    graph.replay()
    assert y.tolist() == [6.0] * 64


def run_script(text: str) -> None:
    """In a process of its own, which has to end by itself and in silence."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")


def test_process_ends_with_graphs_in_its_hands() -> None:
    run_script("""
        import torch
        x = torch.randn(300, 300, device="cuda")
        graph, again = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.nn.functional.dropout(x @ x, 0.5)
        for _ in range(50):
            graph.replay()
        torch.cuda.set_stream(torch.cuda.Stream())
        again.capture_begin()
        z = x + 1
        print("whole")
    """)


def test_forked_children_leave_a_graph_alone() -> None:
    run_script("""
        import os
        import torch
        x = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        for i in range(3):
            pid = os.fork()
            if pid == 0:
                del graph, y
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            x.fill_(i)
            graph.replay()
            assert y.tolist() == [i + 1.0] * 3
        print("whole")
    """)
