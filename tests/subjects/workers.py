# SPDX-License-Identifier: Apache-2.0
"""A training loop that is fed by processes of each start method: a DataLoader, and helpers behind multiprocessing's locks,
queues, events and shared tensors."""

import queue

import torch
import torch.multiprocessing as mp
from common import Digest, Steps, check, device, options, seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

HELPERS = 2


class Numbers(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int):
        return torch.full((16,), i / 64), torch.rand(())  # of the worker's own generator


def help_with(number, lock, asked, answers, stop, counted, shared) -> None:
    """Squares what it is asked; counts it under a lock, in shared memory."""
    while not stop.is_set():
        value = asked.get()
        if value is None:
            break
        with lock:
            counted.value += 1
            shared[number] += value
        answers.put((number, value * value))


def start(method: str, arguments: list) -> list:
    if method == "torch":
        context = mp.spawn(run, (arguments,), nprocs=HELPERS, join=False)
        return context.processes
    context = mp.get_context(method)
    processes = [context.Process(target=run, args=(n, arguments)) for n in range(HELPERS)]
    for process in processes:
        process.start()
    return processes


def run(number: int, arguments: list) -> None:
    help_with(number, *arguments[number])


def main() -> None:
    o = options(__doc__, method="spawn")
    seed(1)
    where = device()
    context = mp.get_context("spawn" if o.method == "torch" else o.method)
    lock, stop, counted = context.Lock(), context.Event(), context.Value("q", 0)
    shared = torch.zeros(HELPERS, dtype=torch.int64).share_memory_()
    asked = [context.Queue() for _ in range(HELPERS)]
    answers = context.Queue()
    given = [(lock, asked[n], answers, stop, counted, shared) for n in range(HELPERS)]
    helpers = start(o.method, given)
    model = nn.Linear(16, 4).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        Numbers(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    losses, batches = [], iter(loader)
    steps = Steps(o)
    for step in steps:
        try:
            data, noise = next(batches)
        except StopIteration:
            batches = iter(loader)
            data, noise = next(batches)
        for n in range(HELPERS):
            asked[n].put(step + n)
        try:
            back = dict(answers.get(timeout=30) for _ in range(HELPERS))
        except queue.Empty:
            check(False, f"no answer; exit codes of the helpers: {[h.exitcode for h in helpers]}")
        check(back == {n: (step + n) ** 2 for n in range(HELPERS)}, f"the helpers said {back}")
        loss = (model(data.to(where)) - noise.to(where)[:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps.say(f"loss {losses[-1]:.8f}")
    for one in asked:
        one.put(None)
    for helper in helpers:
        helper.join(60)
        check(helper.exitcode == 0, f"a helper ended with {helper.exitcode}")
    check(counted.value == HELPERS * o.steps, "the lock did not hold")
    digest = Digest()
    digest.add("model", model.state_dict())
    digest.add("losses", losses)
    digest.add("shared", shared)
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
