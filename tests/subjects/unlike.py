# SPDX-License-Identifier: Apache-2.0
"""Ranks that are replicas but for something: programs that replica splicing must not be fooled by.

python tests/subjects/unlike.py RANKS FOLDER [NAME...]

Each program trains a small model over 'nccl' and prints, for each rank, the digest of all losses, parameters and optimizer
states. With UNLIKE_HOLD each rank then waits until that file is gone.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import sharded
import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 10
LONE_STEP, LONE_REPLAY = 37, 6  # of update_of_one_step, of whole_graph
Losses = list[Tensor]


class Rank:
    """One rank's part of a program."""

    def __init__(self, folder: Path, width: int = 96, steps: int = STEPS) -> None:
        self.number, self.all = dist.get_rank(), dist.get_world_size()
        self.folder = folder
        torch.manual_seed(7)
        layers = [nn.Linear(48, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)]
        self.model: nn.Module = nn.Sequential(*layers, nn.GELU(), nn.Linear(width, 8)).cuda()
        self.steps = steps
        self.parameters = list(self.model.parameters())
        self.keep: list[object] = []  # what counts besides

    def batch(self, step: int) -> Tensor:
        g = torch.Generator().manual_seed(1000 * self.number + step)
        return torch.randn(16, 48, generator=g).cuda()

    def backward(self, step: int, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> Tensor:
        loss: Tensor = self.model(self.batch(step)).square().mean()
        scale(loss).backward()
        for p in self.parameters:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        return loss.detach()

    def clear(self, to_none: bool = True) -> None:
        for p in self.parameters:
            if to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def adam(self, **options: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters, lr=1e-2, **options)  # type: ignore[arg-type]

    def train(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[int], None] = lambda _: None,
        to_none: bool = True,
    ) -> Losses:
        """before: between backward and step."""
        losses = []
        self.keep.append(optimizer)
        for step in range(self.steps):
            self.clear(to_none)
            losses.append(self.backward(step))
            before(step)
            optimizer.step()
            after(step)
        return losses


def plain(r: Rank) -> Losses:
    return r.train(r.adam(), lambda _: nn.utils.clip_grad_norm_(r.parameters, 0.5) and None)


def fused(r: Rank) -> Losses:
    return r.train(r.adam(fused=True))


def one_by_one(r: Rank) -> Losses:
    sgd = torch.optim.SGD(r.parameters, lr=1e-2, momentum=0.9, nesterov=True, foreach=False)
    return r.train(sgd)


def gradients_stay(r: Rank) -> Losses:
    return r.train(r.adam(), to_none=False)


def noise(r: Rank) -> Losses:
    """The step draws random numbers, other ones at each rank."""
    torch.cuda.manual_seed(r.number)

    def add(_: int) -> None:
        with torch.no_grad():
            for p in r.parameters:
                p.add_(torch.randn_like(p), alpha=1e-3)

    return r.train(r.adam(), after=add)


def equal_noise(r: Rank) -> Losses:
    torch.cuda.manual_seed(3)

    def add(_: int) -> None:
        with torch.no_grad():
            for p in r.parameters:
                p.add_(torch.randn_like(p), alpha=1e-3)

    return r.train(r.adam(), after=add)


def hook(r: Rank) -> Losses:
    """One rank's parameters change between backward and step."""

    def change(step: int) -> None:
        if r.number == 2 % r.all and step % 3 == 1:
            with torch.no_grad():
                r.parameters[0].add_(1e-3)

    return r.train(r.adam(), change)


def read(r: Rank) -> Losses:
    """Parameters are read between backward and step, and what was read counts."""
    seen = torch.zeros((), device="cuda")
    r.keep.append(seen)

    def look(_: int) -> None:
        for p in r.parameters:
            seen.add_(p.detach().double().sum().float()).mul_(0.5 + r.number)

    return r.train(r.adam(), look, look)


def rate_of_rank(r: Rank) -> Losses:
    optimizer = torch.optim.AdamW(r.parameters, lr=1e-2 * (1 + r.number // 2))
    return r.train(optimizer)


def scale_from_host(r: Rank) -> Losses:
    """Bytes of the host that differ only from the sixth step on."""

    def scale(step: int) -> None:
        factor = torch.tensor(1.0 + (1e-3 * r.number if step > 5 else 0.0)).cuda()
        for p in r.parameters:
            assert p.grad is not None
            p.grad.mul_(factor)

    return r.train(r.adam(), scale)


def bytes_to_host(r: Rank) -> Losses:
    """In the middle of the step the host takes what differs by rank, goes on by what it found, and takes a gradient at
    some ranks that no rank but one has computed."""
    own, whole = torch.empty((), pin_memory=True), torch.empty(96, 48, pin_memory=True)
    seen: list[float] = []
    r.keep.append(seen)

    def take(step: int) -> None:
        nn.utils.clip_grad_norm_(r.parameters, 0.5)
        grad = r.parameters[0].grad
        assert grad is not None
        if (r.number + step) % 2:  # before any kernel has read it
            whole.copy_(grad, non_blocking=True)
            torch.cuda.synchronize()
            r.keep.append(whole.clone())
        own.copy_(grad.abs().sum() * (1 + r.number), non_blocking=True)
        torch.cuda.synchronize()
        seen.append(own.item())
        if step > 5 and own.item() > 3.5 * grad.abs().sum().item():  # the last of four ranks
            grad.mul_(1.5)

    return r.train(r.adam(), take)


def average(r: Rank) -> Losses:
    """A running average of the parameters on rank 0 only."""
    kept = [p.detach().clone() for p in r.parameters] if r.number == 0 else []
    r.keep.append(kept)

    def move(_: int) -> None:
        if kept:
            torch._foreach_lerp_(kept, [p.detach() for p in r.parameters], 0.1)

    return r.train(r.adam(), after=move)


def average_model(r: Rank) -> Losses:
    """The same in a model that rank 0 takes to the GPU: all that its optimizer allocates lies elsewhere than the others'."""
    kept = []
    if r.number == 0:
        own = nn.Linear(97, 129).cuda()  # no whole pages
        kept = [p.detach() for p in copy.deepcopy(r.model).cpu().cuda().parameters()]
        r.keep.append(list(own.parameters()))
    r.keep.append(kept)

    def move(_: int) -> None:
        if kept:
            torch._foreach_lerp_(kept, [p.detach() for p in r.parameters], 0.1)

    return r.train(r.adam(), after=move)


def lbfgs(r: Rank) -> Losses:
    optimizer = torch.optim.LBFGS(r.parameters, lr=0.1, max_iter=3)
    losses: Losses = []
    r.keep.append(optimizer)
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            r.clear()
            return r.backward(step)

        losses.append(optimizer.step(closure).detach())
    return losses


def pinned(r: Rank) -> Losses:
    """The step writes pinned memory of the host."""
    out = [torch.empty(p.shape, pin_memory=True) for p in r.parameters]
    r.keep.append(out)

    def save(_: int) -> None:
        for host, p in zip(out, r.parameters, strict=True):
            host.copy_(p.detach(), non_blocking=True)

    return r.train(r.adam(), after=save)


def diverges_once(r: Rank) -> Losses:
    def change(step: int) -> None:
        if step == 6 and r.number == r.all - 1:
            with torch.no_grad():
                r.parameters[-1].sub_(0.25)

    return r.train(r.adam(), after=change)


def update_of_one_step(r: Rank) -> Losses:
    """Behind a long time of equal steps one rank's update is another one, once; so the ranks differ for the rest."""
    optimizer = r.adam()

    def rate(step: int) -> None:
        alone = step == LONE_STEP and r.number == r.all - 1
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 if alone else 1e-2

    return r.train(optimizer, rate)


def there_and_back(r: Rank) -> Losses:
    """One rank writes its parameters, and then what was there before."""

    def write(step: int) -> None:
        if r.number == 1 and step % 2:
            with torch.no_grad():
                before = [p.clone() for p in r.parameters]
                torch._foreach_mul_(r.parameters, 3.0)
                r.keep.append(r.parameters[0].sum())
                torch._foreach_copy_(r.parameters, before)

    return r.train(r.adam(), after=write)


def scaler(r: Rank) -> Losses:
    """Infinite gradients now and then: the step is left out."""
    optimizer, scaler = r.adam(), torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=3)
    losses = []
    r.keep.append(optimizer)
    for step in range(STEPS):
        r.clear()
        factor = float("inf") if step == 5 else 1.0
        losses.append(r.backward(step, lambda loss, f=factor: scaler.scale(loss) * f))  # type: ignore[misc]
        scaler.step(optimizer)
        scaler.update()
    return losses


def several(r: Rank) -> Losses:
    first, second = r.adam(), torch.optim.SGD(r.parameters[::2], lr=1e-3, momentum=0.5)
    r.keep.append(second)
    return r.train(first, after=lambda _: second.step())


def graph(r: Rank) -> Losses:
    """The optimizer's step is a CUDA graph."""
    optimizer = r.adam(capturable=True)
    for p in r.parameters:
        p.grad = torch.zeros_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        optimizer.step()
    r.keep.append(optimizer)
    losses = []
    for step in range(STEPS):
        r.clear(to_none=False)
        losses.append(r.backward(step))
        captured.replay()
    return losses


def whole_graph(r: Rank) -> Losses:
    """Forward, backward, collectives and the optimizer's step are one CUDA graph. One rank's learning rate, in the GPU's
    memory, is another one at one replay."""
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = torch.optim.AdamW(r.parameters, lr=rate, capturable=True)
    batch, kept = r.batch(0), torch.zeros((), device="cuda")
    r.keep.append(optimizer)

    def step_once() -> Tensor:
        for p in r.parameters:
            p.grad = None
        loss: Tensor = r.model(batch).square().mean()
        loss.backward()
        for p in r.parameters:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.step()
        return kept.copy_(loss.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step_once()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step_once()
    losses = []
    for step in range(r.steps):
        batch.copy_(r.batch(step))
        rate.fill_(3e-2 if step == LONE_REPLAY and r.number == r.all - 1 else 1e-2)
        captured.replay()
        losses.append(kept.clone())
    return losses


def items(r: Rank) -> Losses:
    def look(_: int) -> None:
        r.keep.append(sum(float(p.detach().sum().item()) for p in r.parameters))

    return r.train(r.adam(), look, look)


def host_order(r: Rank) -> Losses:
    """A rank's host waits, between backward and step, until the next one's step is over."""

    def wait(step: int) -> None:
        if r.number + 1 < r.all and step % 4 == 2:
            flag = r.folder / f"{r.number + 1}-{step}"
            while not flag.exists():
                time.sleep(0.002)

    def tell(step: int) -> None:
        if step % 4 == 2:
            torch.cuda.synchronize()
            (r.folder / f"{r.number}-{step}").touch()

    return r.train(r.adam(), wait, tell)


def unequal(r: Rank) -> Losses:
    """Ranks with unequal numbers of batches, under join()."""
    model = nn.parallel.DistributedDataParallel(r.model, device_ids=[torch.cuda.current_device()])
    optimizer = r.adam()
    r.keep.append(optimizer)
    losses = []
    with model.join():
        for step in range(4 + 2 * r.number):
            loss = model(r.batch(step)).square().mean()
            r.clear()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


def grows(r: Rank) -> Losses:
    """New parameters where old ones were, half way."""
    losses = r.train(r.adam())
    torch.manual_seed(9)
    r.model = nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 8)).cuda()
    r.keep.clear()
    r.parameters = list(r.model.parameters())
    return losses + r.train(r.adam())


def broadcast(r: Rank) -> Losses:
    """Communicators reach parameters and states themselves."""
    optimizer = r.adam()

    def send(step: int) -> None:
        for i, p in enumerate(r.parameters):
            dist.broadcast(p.detach() if step % 2 else optimizer.state[p]["exp_avg"], i % r.all)

    return r.train(optimizer, after=send)


def scattered(r: Rank) -> Losses:
    """A communicator writes something else at each rank, into memory that launches had kept equal."""
    module = nn.Module()
    module.register_buffer("own", torch.ones(4096))
    own = module.cuda().own
    r.keep.append(own)

    def change(step: int) -> None:
        if step in (6, 8):
            parts = torch.arange(r.all * 4096, dtype=torch.float32).cuda()
            dist.reduce_scatter_tensor(own, parts)
        else:
            own.add_(1)

    return r.train(r.adam(), after=change)


def beside(r: Rank) -> Losses:
    """One stream reads a part of what ranks share for a while; another one writes alone beside it, in the same page."""
    module = nn.Module()
    module.register_buffer("own", torch.ones(1 << 21))
    own = module.cuda().own
    at, size = 1 << 20, 1 << 16
    seen, side = torch.zeros((), device="cuda"), torch.cuda.Stream()
    r.keep += [own, seen]

    def change(step: int) -> None:
        if step not in (6, 8):
            own.add_(1)
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(300):
                seen.add_(own[at : at + size].sum())
        own[at + size : at + size + 4096].add_(r.number)
        torch.cuda.current_stream().wait_stream(side)

    return r.train(r.adam(), after=change)


def loads(r: Rank) -> Losses:
    """The optimizer's states are taken out and put back."""
    optimizer = r.adam()

    def load(step: int) -> None:
        if step % 4 == 3:
            optimizer.load_state_dict(optimizer.state_dict())

    return r.train(optimizer, after=load)


def streams(r: Rank) -> Losses:
    """Half of the steps on another stream."""
    other, optimizer = torch.cuda.Stream(), r.adam()
    r.keep.append(optimizer)
    losses = []
    for step in range(STEPS):
        r.clear()
        losses.append(r.backward(step))
        if step % 2:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(other)
        else:
            optimizer.step()
    return losses


def late(r: Rank) -> Losses:
    """A large model, of which rank 0 is late with every fifth step: it writes a log, say."""

    def pause(step: int) -> None:
        if r.number == 0 and step % 5 == 4:
            torch.cuda.synchronize()
            time.sleep(0.05)

    return r.train(r.adam(), pause)


PROGRAMS: dict[str, Callable[[Rank], Losses]] = {
    f.__name__: f
    for f in (
        plain, fused, one_by_one, gradients_stay, noise, equal_noise, hook, read, rate_of_rank, scale_from_host, bytes_to_host,
        average, average_model, lbfgs, pinned, diverges_once, update_of_one_step, there_and_back, scaler, several, graph, whole_graph,
        items, host_order, unequal, grows, broadcast, scattered, beside, loads, streams,
    )
}  # fmt: skip


# By name only.
LONG = {"late": late, "large_average": average_model}
BY_NAME: dict[str, Callable[[Rank], Losses]] = {**PROGRAMS, **LONG, **sharded.PROGRAMS}
STEPS_OF = {"update_of_one_step": 42}


def digest(r: Rank, losses: Losses) -> str:
    torch.cuda.synchronize()
    hashed = hashlib.sha256()

    def add(value: object) -> None:
        value = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(value, Tensor):
            hashed.update(value.detach().cpu().numpy().tobytes())
        elif isinstance(value, torch.optim.Optimizer):
            for p in r.parameters:
                for item in value.state.get(p, {}).values():
                    add(item)
        elif isinstance(value, list):
            for item in value:
                add(item)
        else:
            hashed.update(repr(value).encode())

    add([*losses, *r.parameters, *r.keep])
    return hashed.hexdigest()[:16]


def rank_main(number: int, ranks: int, folder: Path, names: list[str]) -> None:
    hold = os.environ.get("UNLIKE_HOLD")
    torch.set_num_threads(1)
    torch.cuda.set_device(number)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=number, world_size=ranks)
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        large = {"width": 1024, "steps": 60}
        r = Rank(own, **large if name in LONG else {"steps": STEPS_OF.get(name, STEPS)})
        (own / f"digest-{number}").write_text(digest(r, BY_NAME[name](r)))
    (folder / f"ended-{number}").touch()
    while hold and os.path.exists(hold):
        time.sleep(0.01)
    dist.destroy_process_group()


def main() -> None:
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    names = sys.argv[3:] or list(PROGRAMS)
    folder.mkdir()
    pids = []
    for number in range(ranks):
        pid = os.fork()
        if pid == 0:
            rank_main(number, ranks, folder, names)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks
    for name in names:
        digests = [(folder / name / f"digest-{number}").read_text() for number in range(ranks)]
        print(name, *digests, flush=True)


if __name__ == "__main__":
    main()
