# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that does the same on 'nccl' with CUDA tensors and on 'gloo' with CPU tensors, and compares.

python process_group.py SUBJECT..., started by torchrun. Prints "ok SUBJECT rank R" when all was equal. "all" is every
subject that takes a group as init_process_group("nccl") makes it.
"""

from __future__ import annotations

import copy
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL = int(os.environ["LOCAL_RANK"])
SUBJECTS: dict[str, Callable[[], None]] = {}
INTEGRAL = (torch.int8, torch.uint8, torch.int32, torch.int64)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def subject(f: Callable[[], None]) -> Callable[[], None]:
    SUBJECTS[f.__name__] = f
    return f


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int = RANK) -> Tensor:
    """Small whole numbers: their sums and products over eight ranks are exact in every type, in any order."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randint(0, 3, shape, generator=generator)
    return values.bool() if dtype == torch.bool else values.to(dtype)


def same(cuda: Tensor, cpu: Tensor, what: str) -> None:
    got = cuda.cpu()
    assert got.dtype == cpu.dtype and torch.equal(got, cpu), f"{what}: {got} is not {cpu}"


def raises(error: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as e:
        assert text in str(e), f"{text!r} is not in {e}"
        return
    raise AssertionError(f"no {error.__name__} with {text!r}")


def gloo() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


@subject
def reductions() -> None:
    cpu = gloo()
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    for dtype in (*INTEGRAL, *FLOATING):
        for op in ops:
            a = numbers((3, 5), dtype)
            b = a.cuda()
            dist.all_reduce(a, op, group=cpu)
            dist.all_reduce(b, op)
            same(b, a, f"all_reduce {op} {dtype}")
            for root in range(WORLD):
                a = numbers((7,), dtype)
                b = a.cuda()
                dist.reduce(a, root, op, group=cpu)
                dist.reduce(b, root, op)
                if root == RANK:
                    same(b, a, f"reduce {op} {dtype} to {root}")
    everyone = [numbers((4,), torch.float32, r) for r in range(WORLD)]
    mean = everyone[RANK].cuda()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same(mean, torch.stack(everyone).sum(0) / WORLD, "all_reduce AVG")
    scaled = everyone[RANK].cuda()
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    same(scaled, torch.stack(everyone).sum(0) / 2, "all_reduce PREMUL_SUM")
    scaled = everyone[RANK].cuda()
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor([0.25], device="cuda")))
    same(scaled, torch.stack(everyone).sum(0) / 4, "all_reduce PREMUL_SUM of a tensor")
    truth = torch.tensor([True, RANK == 0, False]).cuda()
    dist.all_reduce(truth)
    same(truth, torch.tensor([True, True, False]), "all_reduce bool")
    z = torch.tensor([1 + 2j * RANK, 3j]).cuda()
    dist.all_reduce(z)
    same(z, torch.tensor([WORLD + 1j * WORLD * (WORLD - 1), 3j * WORLD]), "all_reduce complex")
    for name in ("BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)
        raises(
            ValueError, f"Cannot use ReduceOp.{name} with NCCL", lambda: dist.all_reduce(truth, op)
        )
    raises(
        TypeError, "ReduceOp.AVG with Boolean", lambda: dist.all_reduce(truth, dist.ReduceOp.AVG)
    )
    raises(TypeError, "not supported for NCCL", lambda: dist.all_reduce(truth.to(torch.int16)))


@subject
def gathering() -> None:
    cpu = gloo()
    for dtype in (*INTEGRAL, *FLOATING, torch.bool, torch.complex64):
        a = numbers((2, 3), dtype)
        b = a.cuda()
        for root in range(WORLD):
            x, y = a.clone(), b.clone()
            dist.broadcast(x, root, group=cpu)
            dist.broadcast(y, root)
            same(y, x, f"broadcast {dtype}")
        every = [numbers((2, 3), dtype, r) for r in range(WORLD)]
        out = [torch.empty_like(b) for _ in range(WORLD)]
        dist.all_gather(out, b)
        for got, wanted in zip(out, every):
            same(got, wanted, f"all_gather {dtype}")
        flat = torch.empty((2 * WORLD, 3), dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(flat, b)
        same(flat, torch.cat(every), f"all_gather_into_tensor {dtype}")
        for root in range(WORLD):
            out = [torch.empty_like(b) for _ in range(WORLD)]
            dist.gather(b, out if RANK == root else None, root)
            for got, wanted in zip(out, every if RANK == root else []):
                same(got, wanted, f"gather {dtype}")
            one = torch.empty_like(b)
            dist.scatter(one, [e.cuda() for e in every] if RANK == root else None, root)
            same(one, every[RANK], f"scatter {dtype}")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        eight = torch.tensor([0.5, RANK], dtype=torch.float32).to(dtype).cuda()
        out8 = torch.empty(2 * WORLD, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out8, eight)
        wanted = torch.tensor([[0.5, r] for r in range(WORLD)]).flatten()
        same(out8.float(), wanted, f"all_gather {dtype}")
    # Parts of different sizes.
    mine = torch.full((RANK + 1,), float(RANK), device="cuda")
    parts = [torch.empty(r + 1, device="cuda") for r in range(WORLD)]
    dist.all_gather(parts, mine)
    for r, part in enumerate(parts):
        same(part, torch.full((r + 1,), float(r)), "all_gather of different sizes")
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": RANK, "text": "x" * RANK})
    assert [o["rank"] for o in objects] == list(range(WORLD)), objects
    held: list[Any] = [f"from {RANK}", RANK]
    dist.broadcast_object_list(held, 0)
    assert held == ["from 0", 0], held


@subject
def scattering() -> None:
    for dtype in (*INTEGRAL, *FLOATING):
        every = [numbers((WORLD, 3), dtype, r) for r in range(WORLD)]
        total = torch.stack([e.to(torch.float64) for e in every]).sum(0).to(dtype)
        out = torch.empty(1, 3, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(out, every[RANK].cuda())
        same(out[0], total[RANK], f"reduce_scatter_tensor {dtype}")
        out = torch.empty(3, dtype=dtype, device="cuda")
        dist.reduce_scatter(out, list(every[RANK].cuda()))
        same(out, total[RANK], f"reduce_scatter {dtype}")
        out = torch.empty(WORLD, 3, dtype=dtype, device="cuda")
        dist.all_to_all_single(out, every[RANK].cuda())
        same(out, torch.stack([e[RANK] for e in every]), f"all_to_all_single {dtype}")
    # Rank r sends s + 1 rows to rank s; each row says who sent it.
    sizes = [s + 1 for s in range(WORLD)]
    rows = torch.full((sum(sizes), 2), RANK).cuda()
    out = torch.empty(WORLD * (RANK + 1), 2, dtype=torch.int64, device="cuda")
    dist.all_to_all_single(out, rows, [RANK + 1] * WORLD, sizes)
    same(out[:, 0], torch.arange(WORLD).repeat_interleave(RANK + 1), "all_to_all_single with sizes")
    send = [torch.full((s + 1,), 10 * RANK + s).cuda() for s in range(WORLD)]
    got = [torch.empty(RANK + 1, dtype=torch.int64, device="cuda") for _ in range(WORLD)]
    dist.all_to_all(got, send)
    for s, g in enumerate(got):
        same(g, torch.full((RANK + 1,), 10 * s + RANK), "all_to_all")
    different = [torch.full((r + 1,), 1.0, device="cuda") for r in range(WORLD)]
    part = torch.empty(RANK + 1, device="cuda")
    dist.reduce_scatter(part, different)
    same(part, torch.full((RANK + 1,), float(WORLD)), "reduce_scatter of different sizes")


@subject
def point_to_point() -> None:
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    mine = torch.full((4,), float(RANK), device="cuda")
    got = torch.empty(4, device="cuda")
    if WORLD > 1:
        for sender in range(WORLD):
            receiver = (sender + 1) % WORLD
            if sender == RANK:
                dist.send(mine, receiver)
            if receiver == RANK:
                dist.recv(got, sender)
        same(got, torch.full((4,), float(left)), "send and recv")
        if RANK == 0:
            dist.isend(mine + 5, 1).wait()
        if RANK == 1:
            work = dist.irecv(got, 0)
            assert work is not None
            work.wait()
            same(got, torch.full((4,), 5.0), "isend and irecv")
    got.zero_()
    ops = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, torch.full((4,), float(left)), "batch_isend_irecv")


@subject
def coalescing() -> None:
    tensors = [torch.full((n,), float(RANK), device="cuda") for n in (1, 5, 3)]
    total = float(sum(range(WORLD)))
    with dist._coalescing_manager():
        for t in tensors:
            dist.all_reduce(t)
    for t in tensors:
        same(t, torch.full(t.shape, total), "coalesced all_reduce")
    outs = [torch.empty(WORLD * 2, device="cuda") for _ in range(3)]
    ins = [torch.full((2,), float(10 * i + RANK), device="cuda") for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for o, i in zip(outs, ins):
            dist.all_gather_into_tensor(o, i)
    manager.wait()
    for i, o in enumerate(outs):
        wanted = torch.arange(WORLD).repeat_interleave(2) + 10.0 * i
        same(o, wanted, "coalesced all_gather_into_tensor")
    ins = [torch.arange(WORLD * 2, device="cuda") + i for i in range(3)]
    outs = [torch.empty(2, dtype=torch.int64, device="cuda") for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for o, i in zip(outs, ins):
            dist.reduce_scatter_tensor(o, i)
    manager.wait()
    for i, o in enumerate(outs):
        same(
            o,
            WORLD * (torch.tensor([2 * RANK, 2 * RANK + 1]) + i),
            "coalesced reduce_scatter_tensor",
        )
    # Different operations in one NCCL group, as torch puts them there itself.
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    a, b = torch.ones(2, device="cuda"), torch.full((2,), float(RANK), device="cuda")
    backend._start_coalescing()
    inner = backend.allreduce([a])
    backend.broadcast([b])
    raises(RuntimeError, "not sent yet", inner.wait)
    backend._end_coalescing().wait()
    same(a, torch.full((2,), float(WORLD)), "all_reduce in a group")
    same(b, torch.zeros(2), "broadcast in a group")


@subject
def works() -> None:
    """What a Work promises: the stream waits and the host does not, memory stays, futures hold the results."""
    t = torch.full((1 << 16,), float(RANK), device="cuda")
    expected = float(sum(range(WORLD)))
    works = []
    for i in range(20):
        temporary = t + i
        works.append((dist.all_reduce(temporary, async_op=True), i))
        del temporary
    for work, i in works:
        assert work is not None and work.wait()
        same(work.result()[0][:4], torch.full((4,), expected + i * WORLD), "all_reduce in flight")
    for _ in range(20):  # nobody waits for these
        dist.all_reduce(torch.ones(1 << 12, device="cuda"), async_op=True)
    work = dist.all_reduce(t.clone(), async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda f: f.value()[0] * 2).wait()
    same(doubled[:2], torch.full((2,), 2 * expected), "then")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        u = torch.ones(8, device="cuda")
        dist.all_reduce(u)
        v = u * 2
    torch.cuda.current_stream().wait_stream(side)
    same(v, torch.full((8,), 2.0 * WORLD), "all_reduce on another stream")
    work.wait(datetime.timedelta(seconds=60))
    assert work.is_completed()
    dist.barrier()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    assert backend._get_sequence_number_for_group() > 40
    raises(ValueError, "contiguous", lambda: dist.all_reduce(torch.ones(4, 4, device="cuda").t()))
    raises(ValueError, "only implemented for GLOO", lambda: dist.monitored_barrier())


@subject
def groups() -> None:
    """Subgroups, also by splitting, and a group of both backends."""
    evens = list(range(0, WORLD, 2))
    sub = dist.new_group(evens)
    if RANK in evens:
        t = torch.full((3,), float(RANK), device="cuda")
        dist.all_reduce(t, group=sub)
        same(t, torch.full((3,), float(sum(evens))), "all_reduce of a subgroup")
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    a = torch.ones(2)
    dist.all_reduce(a, group=both)
    b = torch.ones(2, device="cuda")
    dist.all_reduce(b, group=both)
    same(b, a, "a group of both backends")
    if WORLD > 1:
        dist.destroy_process_group(both)
        raises(Exception, "", lambda: dist.all_reduce(b, group=both))


@subject
def splitting() -> None:
    """Started with device_id=: connected eagerly, and subgroups come from ncclCommSplit."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    assert backend._is_initialized() and backend.supports_splitting
    half = max(WORLD // 2, 1)
    parts = [list(range(i, min(i + half, WORLD))) for i in range(0, WORLD, half)]
    sub = dist.split_group(split_ranks=parts)
    mine = next(p for p in parts if RANK in p)
    t = torch.full((3,), float(RANK), device="cuda")
    dist.all_reduce(t, group=sub)
    same(t, torch.full((3,), float(sum(mine))), "all_reduce of a split group")
    assert backend.comm_split_count() >= 1
    first = dist.new_group([0])
    if RANK == 0:
        dist.all_reduce(t, group=first)
        same(t, torch.full((3,), float(sum(mine))), "all_reduce of one rank")
    last = dist.new_group(list(range(WORLD)))
    dist.all_reduce(t, group=last)
    if WORLD > 1:
        if RANK == 0:
            dist.send(t, 1)
        if RANK == 1:
            dist.recv(t, 0)


def without_the_last(flags: int) -> None:
    """The default group becomes that of all other ranks."""
    fewer = dist.shrink_group([WORLD - 1], shrink_flags=flags)
    assert fewer is dist.distributed_c10d._get_default_group()
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD - 1)
    t = torch.full((3,), RANK + 1.0, device="cuda")
    dist.all_reduce(t)
    same(t, torch.full((3,), WORLD * (WORLD - 1) / 2), "all_reduce of a shrunk group")
    sub = dist.new_group([0])
    if RANK == 0:
        dist.all_reduce(t, group=sub)
    dist.barrier()


@subject
def shrinking() -> None:
    """The last rank leaves, and the others make a smaller group of theirs; then one that the next to last leaves."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cuda"))
    assert backend.supports_shrinking
    for wrong in ([RANK], [WORLD], [WORLD - 1] * 2, []):
        raises(ValueError, "each once", lambda wrong=wrong: backend.shrink(wrong))  # type: ignore[misc]
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    first = None if RANK == 0 else backend.shrink([0], 0, options)
    if first is not None:
        assert (first.rank(), first.size()) == (RANK - 1, WORLD - 1)
        t = torch.ones(3, device="cuda")
        first.allreduce([t]).wait()
        same(t, torch.full((3,), WORLD - 1.0), "all_reduce without rank 0")
        first.shutdown()
    if RANK != WORLD - 1:
        without_the_last(dist.distributed_c10d.SHRINK_DEFAULT)


@subject
def shrinking_over_a_death() -> None:
    """The last rank was killed in an all_reduce: the others give that up, and go on without it."""
    if RANK == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(3, device="cuda"), async_op=True)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    until = time.monotonic() + 30
    while backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS:
        assert time.monotonic() < until
        time.sleep(0.01)
    raises(dist.DistBackendError, f"rank {WORLD - 1}", lambda: work.wait())
    without_the_last(dist.distributed_c10d.SHRINK_ABORT)


@subject
def suspending() -> None:
    """As engines do that sleep: ncclCommSuspend of the group's communicators, and back."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    t = torch.ones(3, device="cuda")
    dist.all_reduce(t)
    stats = backend.memory_stats()
    assert stats["suspended"] == 0 and stats["suspend"] + stats["persist"] == stats["total"], stats
    backend.suspend()
    assert backend.memory_stats()["suspended"] == 1
    raises(dist.DistBackendError, "is suspended", lambda: dist.all_reduce(t))
    raises(dist.DistBackendError, "suspended already", backend.suspend)
    backend.resume()
    assert backend.memory_stats()["suspended"] == 0
    raises(dist.DistBackendError, "not suspended", backend.resume)
    dist.all_reduce(t)
    same(t, torch.full((3,), float(WORLD * WORLD)), "all_reduce after a resume")


@subject
def pools() -> None:
    """Memory that is meant for NCCL: of a pool that the group knows, and of the group itself."""
    device = torch.device("cuda", LOCAL)
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        t = torch.full((1000,), RANK + 1.0, device="cuda")
    backend.register_mem_pool(pool)
    assert backend.supports_tensor_alloc(device)
    u = backend.allocate_tensor(1000 * WORLD, dtype=torch.float32, device=device)
    dist.all_gather_into_tensor(u, t)
    same(u, torch.arange(1.0, WORLD + 1).repeat_interleave(1000), "all_gather_into_tensor")
    backend.deregister_mem_pool(pool)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(x))
        return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 4) -> None:
    for step in range(steps):
        x = torch.rand(6, 8, generator=torch.Generator().manual_seed(step * 100 + RANK)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def close(cuda: nn.Module, cpu: nn.Module, what: str) -> None:
    for (name, a), b in zip(cuda.named_parameters(), cpu.parameters()):
        got = whole(a.detach()).cpu()
        torch.testing.assert_close(got, b.detach(), msg=lambda m: f"{what}, {name}: {m}")
        peers = [torch.empty_like(got) for _ in range(WORLD)]
        dist.all_gather(peers, got, group=HOST)
        assert all(torch.equal(p, got) for p in peers), f"{what}, {name}: ranks differ"


HOST: Any = None


@subject
def data_parallel() -> None:
    global HOST
    HOST = gloo()
    torch.manual_seed(0)
    plain = Net()
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), process_group=HOST)
    ddp = nn.parallel.DistributedDataParallel(
        copy.deepcopy(plain).cuda(), device_ids=[LOCAL], bucket_cap_mb=1
    )
    train(reference, torch.optim.AdamW(reference.parameters(), 0.01), "cpu")
    train(ddp, torch.optim.AdamW(ddp.parameters(), 0.01), "cuda")
    close(ddp.module, reference.module, "DDP")
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooked = nn.parallel.DistributedDataParallel(copy.deepcopy(plain).cuda())
    hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(hooked, torch.optim.SGD(hooked.parameters(), 0.01), "cuda")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = nn.parallel.DistributedDataParallel(copy.deepcopy(plain).cuda())
    train(zero, ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW, lr=0.01), "cuda")
    close(zero.module, reference.module, "ZeroRedundancyOptimizer")


@subject
def batch_norm() -> None:
    """SyncBatchNorm over the parts of a batch does what BatchNorm does over the whole."""
    torch.manual_seed(0)
    whole_batch = torch.rand(3 * WORLD, 4, 5)
    plain = nn.BatchNorm1d(4)
    nn.init.uniform_(plain.weight)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).cuda()
    expected_in = whole_batch.clone().requires_grad_()
    expected = plain(expected_in)
    expected.square().mul(torch.arange(5.0)).sum().backward()
    part = whole_batch[3 * RANK : 3 * RANK + 3].cuda().requires_grad_()
    got = synced(part)
    got.square().mul(torch.arange(5.0).cuda()).sum().backward()
    for grad in (synced.weight.grad, synced.bias.grad):
        dist.all_reduce(grad)
    mine = slice(3 * RANK, 3 * RANK + 3)
    assert expected_in.grad is not None and part.grad is not None
    pairs = {
        "output": (got, expected[mine]),
        "gradient": (part.grad, expected_in.grad[mine]),
        "weight": (synced.weight.grad, plain.weight.grad),
        "bias": (synced.bias.grad, plain.bias.grad),
        "running_mean": (synced.running_mean, plain.running_mean),
        "running_var": (synced.running_var, plain.running_var),
    }
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(
            a.cpu(), b, rtol=1e-4, atol=1e-4, msg=lambda m: f"SyncBatchNorm, {name}: {m}"
        )


@subject
def sharded() -> None:
    global HOST
    HOST = gloo()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = Net()
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), process_group=HOST)
    train(reference, torch.optim.AdamW(reference.parameters(), 0.01), "cpu")
    model = copy.deepcopy(plain).cuda()
    fully_shard(model.inner)
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), "cuda")
    close(model, reference.module, "fully_shard")
    if WORLD >= 4:
        mesh = init_device_mesh("cuda", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
        hybrid = copy.deepcopy(plain).cuda()
        fully_shard(hybrid, mesh=mesh)
        train(hybrid, torch.optim.AdamW(hybrid.parameters(), 0.01), "cuda")
        close(hybrid, reference.module, "fully_shard on a mesh")


@subject
def functional() -> None:
    import torch.distributed._functional_collectives as funcol

    world = dist.distributed_c10d._get_default_group()
    t = torch.full((WORLD, 2), float(RANK), device="cuda")
    total = float(sum(range(WORLD)))
    same(funcol.all_reduce(t, "sum", world) + 0, torch.full((WORLD, 2), total), "funcol all_reduce")
    same(
        funcol.all_reduce(t, "avg", world) + 0, torch.full((WORLD, 2), total / WORLD), "funcol avg"
    )
    gathered = funcol.all_gather_tensor(t, 0, world) + 0
    same(gathered[:, 0], torch.arange(WORLD).repeat_interleave(WORLD).float(), "funcol all_gather")
    same(
        funcol.reduce_scatter_tensor(t, "sum", 0, world) + 0,
        torch.full((1, 2), total),
        "funcol reduce_scatter",
    )
    swapped = funcol.all_to_all_single(t, None, None, world) + 0
    same(swapped[:, 0], torch.arange(WORLD).float(), "funcol all_to_all")
    coalesced = funcol.all_reduce_coalesced([t, t + 1], "sum", world)
    same(coalesced[1] + 0, torch.full((WORLD, 2), total + WORLD), "funcol all_reduce_coalesced")
    same(funcol.broadcast(t, 0, world) + 0, torch.zeros(WORLD, 2), "funcol broadcast")


@subject
def blocking_wait() -> None:
    """Started with TORCH_NCCL_BLOCKING_WAIT=1: the last rank does not come, and the others hear of it."""
    if RANK != WORLD - 1:
        t = torch.ones(3, device="cuda")
        work = (
            dist.distributed_c10d._get_default_group()
            ._get_backend(torch.device("cuda"))
            .allreduce([t])
        )
        raises(dist.DistBackendError, "ALLREDUCE", lambda: work.wait(datetime.timedelta(seconds=1)))
        raises(dist.DistBackendError, "aborted", lambda: dist.all_reduce(t))
    else:
        time.sleep(4)


@subject
def future_result() -> None:
    """Started with TORCH_NCCL_ASYNC_ERROR_HANDLING=2. How an operation has ended, to whoever asks before or after it: well; by
    its time-out, which the callback hears too; or with the one that it was behind."""
    results = torch._C._distributed_c10d.WorkResult
    t = torch.ones(3, device="cuda")
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    future = work.get_future_result()
    assert future.wait() == results.SUCCESS.value
    assert future.done()
    assert work.get_future_result().wait() == results.SUCCESS.value
    same(t, torch.full((3,), float(WORLD)), "all_reduce with a result")
    if RANK == WORLD - 1:
        time.sleep(8)
        return
    late, behind = (dist.all_reduce(t, async_op=True) for _ in range(2))
    assert late is not None
    assert behind is not None
    heard: list[int] = []
    late.get_future_result().add_done_callback(lambda f: heard.append(f.value()))
    assert not late.get_future_result().done()
    assert late.get_future_result().wait() == results.TIMEOUT.value
    assert behind.get_future_result().wait() in (results.TIMEOUT.value, results.COMM_ERROR.value)
    assert heard == [results.TIMEOUT.value]
    raises(dist.DistBackendError, "ALLREDUCE", late.wait)


@subject
def hang() -> None:
    """The last rank does not come: the watchdog ends the others."""
    if RANK != WORLD - 1:
        dist.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()
    time.sleep(60)


@subject
def hang_in_a_receive() -> None:
    """The last rank sends nothing more: the watchdog ends the one that waits for it."""
    one = torch.ones(1, device="cuda")
    dist.send(one, dst=0) if RANK == WORLD - 1 else dist.recv(one, src=WORLD - 1)
    torch.cuda.synchronize()
    if RANK != WORLD - 1:
        dist.recv(torch.ones(5, device="cuda"), src=WORLD - 1)
        torch.cuda.synchronize()
    time.sleep(60)


@subject
def hang_in_a_new_group() -> None:
    """The last rank has no operation in a group, and ends: the others wait for it, as they make the communicator."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if RANK != WORLD - 1:
        dist.all_reduce(torch.ones(3, device="cuda"), group=group)
        torch.cuda.synchronize()
    else:
        time.sleep(20)
        sys.exit(1)


@subject
def gone() -> None:
    """The last rank is killed, and torchrun, which watches its parent, does not notice: the watchdog ends the others."""
    if RANK == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3, device="cuda"))
    time.sleep(60)


# Each needs a job of its own.
APART = (
    "splitting",
    "shrinking",
    "shrinking_over_a_death",
    "blocking_wait",
    "future_result",
    "hang",
    "hang_in_a_receive",
    "hang_in_a_new_group",
    "gone",
)
DEATHS = {"gone", "shrinking_over_a_death"}


def main() -> None:
    names = sys.argv[1:]
    if names == ["all"]:
        names = [name for name in SUBJECTS if name not in APART]
    torch.set_num_threads(1)
    if DEATHS & set(names) and RANK == WORLD - 1 and os.fork():
        time.sleep(60 if "gone" in names else 5)
        return
    torch.cuda.set_device(LOCAL)
    options: dict[str, Any] = {}
    if {"splitting", "shrinking", "shrinking_over_a_death"} & set(names):
        options["device_id"] = torch.device("cuda", LOCAL)
    dist.init_process_group("nccl", **options)
    if DEATHS & set(names):
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    if {"blocking_wait", "future_result"} & set(names) or any(
        name.startswith("hang") for name in names
    ):
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
    for name in names:
        SUBJECTS[name]()
        sys.stdout.write(f"ok {name} rank {RANK}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
