# SPDX-License-Identifier: Apache-2.0
"""Threads in every situation: inside a long synchronize, without any call, in a pool, waiting for a lock or a queue."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from common import Digest, Steps, check, device, options, seed


def main() -> None:
    o = options(__doc__, size=192)
    seed(5)
    where = device()
    ends = threading.Event()
    counts = {"synchronize": 0, "no call": 0}
    failures: list[BaseException] = []

    def synchronizes() -> None:
        """Nearly always inside of a synchronize that has work to wait for."""
        try:
            a = torch.full((o.size, o.size), 0.001, device=where)
            while not ends.is_set():
                b = a
                for _ in range(10):
                    b = b @ a
                if where.type == "cuda":
                    torch.cuda.synchronize()
                counts["synchronize"] += 1
                del b
        except BaseException as error:
            failures.append(error)

    def calls_nothing() -> None:
        number = 1
        while not ends.is_set():
            number = number * 6364136223846793005 % (1 << 64)
            counts["no call"] += 1
            time.sleep(0.001)

    answers: queue.Queue[int] = queue.Queue()
    questions: queue.Queue[int | None] = queue.Queue()

    def waits_in_a_queue() -> None:
        while (number := questions.get()) is not None:
            answers.put(number * number)

    threads = [threading.Thread(target=t) for t in (synchronizes, calls_nothing, waits_in_a_queue)]
    for thread in threads:
        thread.start()
    total = torch.zeros(64, device=where)
    sums = []
    steps = Steps(o)
    with ThreadPoolExecutor(3) as pool:
        for step in steps:
            parts = pool.map(
                lambda i, s=step: (torch.full((64,), float(s * i), device=where) * 2).cpu(),
                range(4),
            )
            for part in parts:  # in order, so the sum has one result
                total += part.to(where)
            questions.put(step)
            check(answers.get(timeout=600) == step * step, "the answer of a thread")
            sums.append(float(total.sum()))
            check(not failures, f"a thread has failed: {failures}")
            steps.say(f"sum {sums[-1]}")
        ends.set()
        questions.put(None)
    for thread in threads:
        thread.join()
    check(not failures, f"a thread has failed: {failures}")
    check(min(counts.values()) > 0, f"a thread has done nothing: {counts}")
    digest = Digest()
    digest.add("sums", sums)
    digest.add("total", total)
    digest.finish()


if __name__ == "__main__":
    main()
