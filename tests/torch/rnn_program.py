# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as the client sends them where a real GPU is behind the server, over an executor in this process.

Run by test_plugin.py. cuDNN's ops are given to the executor here, by the CPU's own layers: what they are given is checked,
and what the job gets is compared with a plain CPU run. The layout is the stand-in of executor/cpu.cc.
"""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import Tensor, nn

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # cudnnRNNMode_t
NAMES = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}
GAP = 3
calls: list[tuple[bool, bool]] = []  # was there a buffer? was there a state of dropout?
kept: list[bool] = []  # does the backward get the buffer that the weights lie in, and not a copy?


def layer(
    mode: int, input: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor | None, stride0: int, layers: int,
    batch_first: bool, dropout: float, train: bool, both: bool, batch_sizes: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The CPU's layer. Without dropout between layers: what is drawn there is not what is tested."""
    run: Any = getattr(torch, NAMES[mode])
    hidden: Any = hx if cx is None else (hx, cx)
    if batch_sizes:
        sizes = torch.tensor(batch_sizes)
        return tuple(run(input, sizes, hidden, weights, stride0 > 3, layers, 0.0, train, both))
    return tuple(run(input, hidden, weights, stride0 > 3, layers, 0.0, train, both, batch_first))


def cudnn_rnn(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None,
    mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: list[int], dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls.append((weight_buf is not None, dropout_state is not None))
    if weight_buf is None:
        weight_buf = torch.full((7,), 5.0)
    elif weight_buf.data_ptr() == weight[0].data_ptr() - GAP * weight[0].element_size():
        for w in weight:  # not the first call of this form, which gets copies
            at = (w.data_ptr() - weight_buf.data_ptr()) // w.element_size()
            assert torch.equal(weight_buf[at : at + w.numel()], w.flatten())
    with torch.no_grad():
        out = layer(
            mode, input, weight, hx, cx, weight_stride0, num_layers, batch_first, dropout, train, bidirectional,
            batch_sizes,
        )  # fmt: skip
    c = out[2] if cx is not None else torch.empty(0)
    return out[0], out[1], c, torch.empty(0, dtype=torch.uint8), weight_buf


def cudnn_rnn_backward(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor, cx: Tensor | None,
    output: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: list[int], dropout_state: Tensor | None, reserve: Tensor,
    output_mask: list[bool],
) -> tuple[Any, ...]:  # fmt: skip
    first = weight[0].data_ptr() - GAP * weight[0].element_size()
    kept.append(weight_buf.data_ptr() == first)
    found: list[Tensor] = []

    def differentiate() -> None:
        leaves = [t.detach().requires_grad_() for t in (input, hx, *weight)]
        c = None if cx is None else cx.detach().requires_grad_()
        out = layer(
            mode, leaves[0], leaves[2:], leaves[1], c, weight_stride0, num_layers, batch_first, dropout, train,
            bidirectional, batch_sizes,
        )  # fmt: skip
        given = [(o, g) for o, g in zip(out, (grad_output, grad_hy, grad_cy)) if g is not None]
        wanted = leaves + ([c] if c is not None else [])
        found.extend(torch.autograd.grad([o for o, _ in given], wanted, [g for _, g in given]))

    # The executor runs ops below autograd; a thread of its own is above it.
    thread = threading.Thread(target=differentiate)
    thread.start()
    thread.join()
    dc = found[-1] if cx is not None else torch.empty(0)
    return found[0], found[1], dc, found[2 : 2 + len(weight)]


def compare(make: Any, packed: bool, flatten: bool) -> None:
    torch.manual_seed(0)
    mine = make()
    theirs = copy.deepcopy(mine)
    theirs.__class__.flatten_parameters = lambda self: None  # here it is called as it comes
    theirs = theirs.cuda()
    weights = theirs._flat_weights
    per_layer = 4 if theirs.bias else 2
    per_layer += theirs.proj_size > 0
    if flatten:
        with torch.no_grad():
            buffer = torch._cudnn_rnn_flatten_weight(
                weights, per_layer, theirs.input_size, MODES[theirs.mode], theirs.hidden_size, theirs.proj_size,
                theirs.num_layers, theirs.batch_first, theirs.bidirectional,
            )  # fmt: skip
        at = GAP
        for dims in (2, 1):
            for w in weights:
                if w.dim() == dims:
                    assert w.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                    assert w.storage_offset() == at and w.is_contiguous()
                    at += w.numel() + GAP
        assert buffer.numel() == at - GAP
    for p, q in zip(mine.parameters(), theirs.parameters()):
        assert q.is_cuda and isinstance(q, nn.Parameter) and torch.equal(p, q.cpu())
    shape = (3, 6, mine.input_size) if mine.batch_first else (6, 3, mine.input_size)
    x = torch.randn(shape)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, theirs)]
    for step in range(3):
        results = []
        for model, data in ((mine, x), (theirs, x.cuda())):
            given = data
            if packed:
                given = nn.utils.rnn.pack_padded_sequence(
                    data, torch.tensor([6, 4, 1]), batch_first=model.batch_first
                )
            out, state = model(given)
            loss = (out.data if packed else out).sin().sum()
            loss.backward()
            results.append(
                [(out.data if packed else out), *([state] if torch.is_tensor(state) else state)]
            )
        calls_now = calls[-1]
        assert calls_now == (flatten, theirs.dropout > 0), (calls_now, flatten)
        assert kept[-1] == flatten
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b.cpu(), atol=1e-6), (step, a, b)
        for p, q in zip(mine.parameters(), theirs.parameters()):
            assert torch.allclose(p.grad, q.grad.cpu(), atol=1e-5)
        for o in optimizers:
            o.step()
            o.zero_grad()
    if flatten:  # an optimizer writes into the buffer
        w = weights[-1]
        assert torch.equal(
            buffer[w.storage_offset() : w.storage_offset() + w.numel()].cpu(),
            w.detach().cpu().flatten(),
        )


def main() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", cudnn_rnn, "CPU")
    library.impl("_cudnn_rnn_backward", cudnn_rnn_backward, "CPU")
    state = torch.zeros(8, dtype=torch.uint8)
    seeds = []

    def init(dropout: float, train: bool, dropout_seed: int, **_: object) -> Tensor:
        seeds.append(dropout_seed)
        return state.clone()

    library.impl("_cudnn_init_dropout_state", init, "CPU")
    layers = [
        lambda: nn.LSTM(4, 5, 2),
        lambda: nn.LSTM(4, 5, bidirectional=True, proj_size=3),
        lambda: nn.LSTM(4, 5, bias=False, batch_first=True),
        lambda: nn.GRU(4, 5, 2, bidirectional=True),
        lambda: nn.RNN(4, 5),
        lambda: nn.RNN(4, 5, nonlinearity="relu"),
    ]
    for make in layers:
        for packed in (False, True):
            for flatten in (False, True):
                compare(make, packed, flatten)
    # The state of dropout: made once, used by all, and made anew after the job has seeded.
    model = nn.LSTM(4, 5, 2, dropout=0.5).cuda()
    x = torch.randn(6, 3, 4, device="cuda")
    torch.manual_seed(1)
    for seed in (None, None, 1, 2):
        before = len(seeds)
        if seed is not None:
            torch.manual_seed(seed)
        model(x)
        torch.cuda.synchronize()
        assert (len(seeds) > before) == (seed is not None or before == 0), (seed, seeds)
        assert calls[-1] == (False, True)
    model.eval()(x)
    assert calls[-1][0] is False
    assert len(set(seeds)) == 2, seeds  # of seed 1 the same again
    with torch.autocast("cuda"), torch.no_grad():
        y, _ = model(x)
    assert y.dtype == torch.float16
    print("all as on the CPU")


if __name__ == "__main__":
    sys.exit(main())
