# SPDX-License-Identifier: Apache-2.0
"""Two ranks over gloo in one tree (torch.multiprocessing, TCPStore): averaged gradients; rank 0 prints. --on cuda: of a
GPU's tensors."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import NONCE, Digest, Steps, check, options, seed


def rank_main(rank: int, world: int, port: int, parsed, nonce: str) -> None:
    import common

    common.NONCE = nonce  # a spawned process draws its own
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    seed(10 + rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(parsed.on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + rank)
    losses = []
    steps = Steps(parsed)
    for step in steps:
        loss = (model(torch.randn(8, 64).to(parsed.on)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
        if step % 5 == 0:
            dist.barrier()
        if rank == 0:
            steps.say(f"loss {losses[-1]:.8f}")
    states = [None] * world
    dist.all_gather_object(states, [p.detach().cpu() for p in model.parameters()])
    if rank == 0:
        for other in states[1:]:
            check(all(torch.equal(a, b) for a, b in zip(states[0], other)), "the ranks differ")
        digest = Digest()
        digest.add("model", model.state_dict())
        digest.add("losses", losses)
        digest.add_random_states()
        digest.finish()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    o = options(__doc__, ranks=2, on="cpu")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_main, (o.ranks, port, o, NONCE), nprocs=o.ranks)


if __name__ == "__main__":
    main()
