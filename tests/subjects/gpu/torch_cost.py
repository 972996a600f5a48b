# SPDX-License-Identifier: Apache-2.0
"""What a training step costs: told by lines on stdin what to do, it answers each with a line of JSON.

    warm CASE N     makes the model, N steps         time CASE N     N steps as they come, and N with a wait in each
    drop CASE       gives its memory back            quit

gpu_check.py runs one natively and one through the proxy, and lets them work in turn, so that both meet the same clock
rates and neighbours. Every model is trained as is usual: bfloat16 autocast, fused AdamW; the launch-bound one is twenty
small ops at batch 1, where nothing but the way of a launch counts.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable

import torch
import torch_cases
from torch import Tensor
from torch_models import ResNet, Subject, Training, images, settings, texts, transformer

full = functools.partial(transformer, layers=12, width=768, heads=12)
CASES = {
    "resnet50": (
        Subject(lambda small: ResNet((1, 1), 8, 10) if small else ResNet(), images(64, 224, 10)),
        {"sgd_foreach", "bf16", "channels_last", "benchmark"},
    ),
    "bert_base": (
        Subject(lambda small: full(False, 0.1, small, vocabulary=30522, length=512), texts(16, 512, 30522)),
        {"adamw_fused", "bf16"},
    ),
    "gpt2_small": (
        Subject(lambda small: full(True, 0.1, small, vocabulary=50257, length=1024), texts(8, 1024, 50257)),
        {"adamw_fused", "bf16"},
    ),
}  # fmt: skip
LAUNCH_BOUND = "launch_bound"


def launch_bound() -> Callable[[], Tensor]:
    """Twenty small ops at batch 1."""
    torch_cases.seed(0)
    weights = [torch.randn(64, 64, device="cuda") / 8 for _ in range(10)]
    x = torch.randn(1, 64, device="cuda")

    def step() -> Tensor:
        y = x
        for w in weights:
            y = torch.relu(torch.mm(y, w))
        return y

    return step


def timed(step: Callable[[], Tensor], steps: int) -> dict[str, float]:
    """Milliseconds of a step: of many, one behind the other; and of each with its result read."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    free = (time.perf_counter() - begin) / steps
    begin = time.perf_counter()
    for _ in range(steps):
        step().flatten()[0].item()
    waiting = (time.perf_counter() - begin) / steps
    return {"ms": free * 1e3, "waiting_ms": waiting * 1e3}


def main() -> None:
    options = torch_cases.parse(__doc__ or "")
    made: dict[str, Callable[[], Tensor]] = {}
    with settings({"benchmark", "tf32"}):
        print(json.dumps({"ready": torch.cuda.get_device_name(), "cases": [*CASES, LAUNCH_BOUND]}), flush=True)  # fmt: skip
        for line in sys.stdin:
            verb, _, rest = line.strip().partition(" ")
            case, _, count = rest.partition(" ")
            if verb == "quit":
                break
            try:
                if verb == "warm":
                    if case == LAUNCH_BOUND:
                        made[case] = launch_bound()
                    else:
                        subject, way = CASES[case]
                        made[case] = Training(subject, way, options.small, options.seed, 1).step
                    for _ in range(int(count)):
                        last = made[case]()
                    answer: dict[str, object] = {"loss": float(last.flatten()[0])}
                elif verb == "time":
                    answer = dict(timed(made[case], int(count)))
                else:
                    made.pop(case, None)
                    torch.cuda.empty_cache()
                    answer = {}
            except Exception as error:
                answer = {"error": torch_cases.words(error)}
            print(json.dumps({"did": verb, "case": case} | answer), flush=True)


if __name__ == "__main__":
    main()
