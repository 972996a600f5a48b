# SPDX-License-Identifier: Apache-2.0
"""One rank of test_gloo.py: each collective of backend 'gloo' on a GPU's tensors against the same on the CPU's."""

import sys

import torch
import torch.distributed as dist
from torch import nn


def collectives(rank: int, world: int, device: str) -> dict[str, object]:
    """What each leaves, on the CPU."""

    def mine(n: int = 4, of: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * rank + of)
        return torch.randn(n, generator=generator).to(device)

    def empty(n: int = 4) -> torch.Tensor:
        return torch.full((n,), -1.0, device=device)

    found: dict[str, object] = {}
    found["all_reduce"] = mine()
    dist.all_reduce(found["all_reduce"])
    found["max"] = mine()
    dist.all_reduce(found["max"], op=dist.ReduceOp.MAX)
    found["half"] = mine().half()
    dist.all_reduce(found["half"])
    found["broadcast"] = mine()
    dist.broadcast(found["broadcast"], 1)
    reduced = mine()
    dist.reduce(reduced, 0)
    found["reduce"] = reduced if rank == 0 else None
    found["all_gather"] = [empty() for _ in range(world)]
    dist.all_gather(found["all_gather"], mine())
    found["all_gather_into"] = empty(4 * world)
    dist.all_gather_into_tensor(found["all_gather_into"], mine())
    found["gather"] = [empty() for _ in range(world)] if rank == 0 else None
    dist.gather(mine(), found["gather"], 0)
    found["scatter"] = empty()
    dist.scatter(found["scatter"], [mine(of=n) for n in range(world)] if rank == 1 else None, 1)
    found["reduce_scatter"] = empty()
    dist.reduce_scatter_tensor(found["reduce_scatter"], mine(4 * world))
    found["all_to_all"] = empty(2 * world)
    dist.all_to_all_single(found["all_to_all"], mine(2 * world))
    found["send"] = mine()
    if rank == 0:
        dist.send(found["send"], 1)
    else:
        dist.recv(found["send"], 0)
    found["async"] = [mine(of=n) for n in range(9)]
    works = [dist.all_reduce(one, async_op=True) for one in found["async"]]
    for work in reversed(works):
        work.wait()
    found["future"] = mine()
    (of_future,) = dist.all_reduce(found["future"], async_op=True).get_future().wait()
    assert of_future.device.type == device and torch.equal(of_future, found["future"])
    dist.barrier()
    return found


def train(rank: int, device: str, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 2))
    wrapped = nn.parallel.DistributedDataParallel(model.to(device), **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        data = torch.randn(4, 8, generator=generator).to(device)
        optimizer.zero_grad()
        wrapped(data).square().mean().backward()
        optimizer.step()
    return list(model.state_dict().values())


def equal(a: object, b: object) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is None:
        return b is None
    return a.device.type == "cuda" and torch.equal(a.cpu(), b)


def main() -> None:
    rank, world, store = int(sys.argv[1]), 2, dist.FileStore(sys.argv[2], 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    on_gpu, on_cpu = collectives(rank, world, "cuda"), collectives(rank, world, "cpu")
    different = [name for name, value in on_gpu.items() if not equal(value, on_cpu[name])]
    assert not different, (different, on_gpu, on_cpu)
    for options in ({}, {"bucket_cap_mb": 0.0001}, {"static_graph": True}):
        assert equal(train(rank, "cuda", **options), train(rank, "cpu", **options)), options
    group = dist.new_group([0, 1])
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    try:
        dist.all_reduce(torch.ones(3, device="cuda")[None].expand(3, 3))
    except RuntimeError as error:
        assert "single memory location" in str(error), error
    else:
        raise AssertionError("the result has no place")
    if rank == 1:
        dist.barrier()
        dist.destroy_process_group()
        print("PASS gloo")
        return
    dist.barrier()
    dist.destroy_process_group()
    only = dist.FileStore(sys.argv[2] + ".only", 1)
    dist.init_process_group("cuda:gloo", rank=0, world_size=1, store=only)
    alone = torch.ones(3, device="cuda")
    dist.all_reduce(alone)
    dist.barrier()
    assert alone.tolist() == [1.0] * 3
    print("PASS gloo")


if __name__ == "__main__":
    main()
