# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors on 'cuda': what they do on the CPU, bit for bit; what they cannot do is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


def same(a: Any, b: Any) -> bool:
    """A result on the CPU and its like on 'cuda': the same parts, bit for bit."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, Tensor):
        return bool(a == b)
    assert b.is_cuda
    if (a.layout, a.shape, a.dtype) != (b.layout, b.shape, b.dtype):
        return False
    if a.layout == torch.strided:
        return torch.equal(a, b.cpu())
    if a.layout == torch.sparse_coo:
        return (
            a.is_coalesced() == b.is_coalesced()
            and same(a._indices(), b._indices())
            and same(a._values(), b._values())
        )
    rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed, plain = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
    return all(same(getattr(a, f)(), getattr(b, f)()) for f in (compressed, plain, "values"))


def dense(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * (torch.rand(*shape, generator=generator) > 0.6)


def coo(coalesced: bool = True) -> Tensor:
    if coalesced:
        return dense(5, 6).to_sparse()
    indices = torch.tensor([[0, 4, 0, 2, 4], [1, 5, 1, 2, 5]])
    return torch.sparse_coo_tensor(indices, torch.arange(1.0, 6.0), (5, 6))


OPS: dict[str, Callable[[Tensor], Any]] = {
    "to_dense": lambda x: x.to_dense(),
    "coalesce": lambda x: x.coalesce(),
    "transpose": lambda x: x.t(),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "neg": lambda x: -x,
    "times a number": lambda x: x * 2.5,
    "divided": lambda x: x / 3,
    "plus itself": lambda x: x + x,
    "minus another": lambda x: x - x.t().t() * 2,
    "times dense": lambda x: x * dense(5, 6, seed=1).to(x.device),
    "times sparse": lambda x: x * x,
    "dense plus it": lambda x: dense(5, 6, seed=1).to(x.device) + x,
    "mm": lambda x: x @ dense(6, 3, seed=2).to(x.device),
    "sparse.mm": lambda x: torch.sparse.mm(x, dense(6, 3, seed=2).to(x.device)),
    "sparse times sparse": lambda x: torch.sparse.mm(x, x.t()),
    "mv": lambda x: torch.mv(x, torch.arange(6.0, device=x.device)),
    "addmm": lambda x: torch.sparse.addmm(
        dense(5, 3).to(x.device), x, dense(6, 3, seed=2).to(x.device), beta=0.5, alpha=2
    ),
    "sum": lambda x: torch.sparse.sum(x),
    "sum of rows": lambda x: torch.sparse.sum(x, 1),
    "softmax": lambda x: torch.sparse.softmax(x, 1),
    "log_softmax": lambda x: torch.sparse.log_softmax(x, 1),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 5, 2], device=x.device)),
    "select": lambda x: x[2],
    "narrow_copy": lambda x: x.narrow_copy(1, 1, 3),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "relu": lambda x: x.relu(),
    "sin in place": lambda x: x.coalesce().sin_(),
    "multiplied in place": lambda x: x.clone().mul_(3),
    "added in place": lambda x: x.clone().add_(x.t().t(), alpha=2),
    "zeroed": lambda x: x.clone().zero_(),
    "norm": lambda x: x.coalesce().norm(),
    "sparse_mask": lambda x: dense(5, 6, seed=3).to(x.device).sparse_mask(x.coalesce()),
    "to csr": lambda x: x.to_sparse_csr(),
    "to csc": lambda x: x.to_sparse_csc(),
    "numbers": lambda x: (x._nnz(), x.sparse_dim(), x.dense_dim(), x.is_coalesced(), x.is_sparse),
    "empty": lambda x: torch.sparse_coo_tensor((5, 6), device=x.device) + x,
    "bmm": lambda x: torch.bmm(torch.stack([x, x]), dense(2, 6, 3).to(x.device)),
}


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_coo_equals_the_cpu(name: str, coalesced: bool) -> None:
    x = coo(coalesced)
    y = x.cuda()
    assert y.is_sparse and y.is_cuda and same(x, y)
    assert same(OPS[name](x), OPS[name](y))
    assert same(x, y), "an argument has changed"


CSR_OPS: dict[str, Callable[[Tensor], Any]] = {
    "to_dense": lambda x: x.to_dense(),
    "to coo": lambda x: x.to_sparse(),
    "clone": lambda x: x.clone(),
    "times a number": lambda x: x * 2.5,
    "sin": lambda x: x.sin(),
    "mm": lambda x: x @ dense(6, 3, seed=2).to(x.device),
    "transpose": lambda x: x.transpose(0, 1),
    "sum": lambda x: x.sum(),
    "numbers": lambda x: (x._nnz(), x.sparse_dim(), x.dense_dim()),
    "double": lambda x: x.double(),
    "multiplied in place": lambda x: x.clone().mul_(3),
}


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("name", CSR_OPS)
def test_compressed_equals_the_cpu(name: str, layout: torch.layout) -> None:
    x = dense(5, 6).to_sparse(layout=layout)
    y = x.cuda()
    assert y.layout == layout and same(x, y)
    try:
        mine = CSR_OPS[name](x)
    except (RuntimeError, NotImplementedError):
        with pytest.raises((RuntimeError, NotImplementedError)):
            CSR_OPS[name](y)
    else:
        assert same(mine, CSR_OPS[name](y))
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_made_from_a_dense_tensor_and_back() -> None:
    x = dense(4, 6)
    for layout in LAYOUTS:
        y = x.cuda().to_sparse(layout=layout)
        assert same(x.to_sparse(layout=layout), y)
        assert torch.equal(y.to_dense().cpu(), x)
        assert torch.equal(y.cpu().to_dense(), x)
    blocks = x.cuda().to_sparse_bsr((2, 3))
    assert same(x.to_sparse_bsr((2, 3)), blocks) and torch.equal(blocks.to_dense().cpu(), x)
    assert "device='cuda:0'" in repr(x.cuda().to_sparse())
    assert "layout=torch.sparse_csr" in repr(x.cuda().to_sparse_csr())


def test_save_and_load() -> None:
    for layout in LAYOUTS:
        file = io.BytesIO()
        torch.save(dense(4, 6).cuda().to_sparse(layout=layout), file)
        file.seek(0)
        assert same(dense(4, 6).to_sparse(layout=layout), torch.load(file))


def test_legacy_class() -> None:
    x = torch.cuda.sparse.FloatTensor(torch.tensor([[0, 1], [2, 0]]), torch.ones(2), (2, 3))
    assert isinstance(x, torch.cuda.sparse.FloatTensor) and x.is_sparse
    assert x.type() == "torch.cuda.sparse.FloatTensor"
    assert not isinstance(x, torch.cuda.FloatTensor)
    assert x.to_dense().tolist() == [[0, 0, 1], [1, 0, 0]]


def test_gradients() -> None:
    for function in (
        lambda a, b: torch.sparse.mm(a, b).sin().sum(),
        lambda a, b: (a.to_dense() @ b).sin().sum(),
        lambda a, b: (torch.sparse.sum(a, 1).to_dense()).sin().sum() + b.sum(),
        lambda a, b: (torch.sparse.softmax(a, 1).to_dense() @ b).sum(),
    ):
        found = []
        for device in ("cpu", "cuda"):
            a = coo().to(device).requires_grad_()
            b = dense(6, 3, seed=4).to(device).requires_grad_()
            function(a, b).backward()
            found.append((a.grad.coalesce(), b.grad))
        assert same(*found)


class Gcn(nn.Module):
    """Two layers over a sparse adjacency, as in the public gcn."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(dense(8, 16, seed=5))
        self.two = nn.Parameter(dense(16, 3, seed=6))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        hidden = torch.spmm(adjacency, torch.mm(x, self.one)).relu()
        return F.log_softmax(torch.spmm(adjacency, torch.mm(hidden, self.two)), dim=1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_gcn_trains_as_on_the_cpu(layout: torch.layout) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = Gcn().to(device)
        adjacency = (
            (dense(20, 20, seed=7).abs() + torch.eye(20)).to_sparse(layout=layout).to(device)
        )
        x = dense(20, 8, seed=8).to(device)
        labels = (torch.arange(20) % 3).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        for _ in range(5):
            optimizer.zero_grad()
            F.nll_loss(model(x, adjacency), labels).backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert same(*found)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_embedding_trains_as_on_the_cpu(name: str, bag: bool) -> None:
    found = []
    kind = nn.EmbeddingBag if bag else nn.Embedding
    torch.manual_seed(0)
    made = kind(30, 4, sparse=True)
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(made).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(4):
            optimizer.zero_grad(set_to_none=step != 2)
            tokens = (torch.arange(12).reshape(3, 4) * (step + 1) % 9).to(device)
            loss = model(tokens).sin().sum() + model(tokens.flip(0) + 3).sum()
            loss.backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
        found.append(model.weight.detach())
    assert same(*found)


def test_what_is_missing_is_refused_by_name() -> None:
    x = coo().cuda()
    with pytest.raises(NotImplementedError, match=r"aten::sort.* is not supported for sparse"):
        x.sort()
    with pytest.raises(NotImplementedError, match=r"aten::_sparse_mm_reduce_impl is not supported"):
        torch.sparse.mm(dense(5, 6).to_sparse_csr().cuda(), dense(6, 2).cuda(), "sum")
    b = torch.ones(6, 2, device="cuda")
    for captured in (lambda: x @ b, lambda: b.to_sparse()):
        with pytest.raises(RuntimeError, match="sparse tensors are not supported in a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                captured()
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert same(coo() @ b.cpu(), x @ b)


def test_wrong_indices_are_exceptions() -> None:
    """The server believes no index: it would write outside its tensors. The first call of a kind says so; a later one is a
    device-side assertion, as a wrong index is on CUDA."""
    wrong = torch.tensor([[0, 7], [1, 2]], device="cuda")
    values = torch.ones(2, device="cuda")
    with torch.sparse.check_sparse_tensor_invariants():
        with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
            torch.sparse_coo_tensor(wrong, values, (5, 9))
    unchecked = torch.sparse_coo_tensor(wrong, values, (5, 9))
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        unchecked.to_dense()
    assert same(coo().to_dense(), coo().cuda().to_dense())
