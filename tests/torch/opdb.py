# SPDX-License-Identifier: Apache-2.0
"""torch's own op_db, each op forward and backward on 'cuda' against 'cpu', bit for bit.

    python tests/torch/opdb.py --dtype float32 --json out.json      under devproxy-run

NaN equals only NaN, and zeros compare with their sign. A random op's CPU reference draws the numbers that the software
GPU draws (mix.py). Ops whose result has no defined contents, or that have no CPU result, are not compared. A guarded
sweep also watches each forward run on 'cuda' (guards.py).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

from mix import CudaRandomNumbers

SECONDS_PER_OP = 60
SEED = 0
# Results without defined contents, and ops that exist only as CUDA source text.
NOT_COMPARED = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
# Ops that take their index tensors from the host, on CUDA too.
HOST_ARGUMENTS = {"tensor_split"}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "complex64": torch.complex64,
}


@dataclass
class Outcome:
    """What became of one op: 'bitwise', 'different', 'refused' in a capture, 'error', 'no cpu result', and why; the
    guards it broke."""

    name: str
    kind: str
    detail: str = ""
    samples: int = 0
    broken: dict[str, str] = field(default_factory=dict)


class TooSlow(Exception):
    pass


def to_device(x: Any, device: str) -> Any:
    if isinstance(x, torch.Tensor):
        if x.layout == torch.strided and x.untyped_storage().nbytes() > x.nbytes:
            # A view of something larger keeps what it does not show.
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
            moved = whole.as_strided(x.shape, x.stride(), x.storage_offset())
            return moved.detach().requires_grad_(x.requires_grad)
        return x.detach().to(device).requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)):
        items = [to_device(i, device) for i in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        return {k: to_device(v, device) for k, v in x.items()}
    if isinstance(x, torch.device) or x == "cpu":
        return device
    return x


def tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for i in x:
            yield from tensors(i)
    elif isinstance(x, dict):
        for i in x.values():
            yield from tensors(i)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN of any payload; everything else must have the same bits."""
    a, b = (
        a.detach().resolve_conj().resolve_neg().contiguous(),
        b.detach().resolve_conj().resolve_neg().contiguous(),
    )
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_complex:
        return same_bits(torch.view_as_real(a), torch.view_as_real(b))
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return False
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.masked_fill(nan, 0).view(integer), b.masked_fill(nan, 0).view(integer))


def difference(cpu: list[torch.Tensor], cuda: list[torch.Tensor], what: str) -> str:
    """The first difference in words, or nothing."""
    if len(cpu) != len(cuda):
        return f"{what}: {len(cuda)} tensors, {len(cpu)} on the CPU"
    for i, (a, b) in enumerate(zip(cpu, cuda, strict=True)):
        if not b.is_cuda and a.numel():
            return f"{what} {i}: on {b.device}"
        if a.layout != b.layout:
            return f"{what} {i}: {b.layout}, {a.layout} on the CPU"
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{what} {i}: {b.dtype}{list(b.shape)}, {a.dtype}{list(a.shape)} on the CPU"
        if not same_bits(a, b.cpu()):
            apart = (
                (a.to(torch.complex128) - b.cpu().to(torch.complex128))
                .abs()
                .nan_to_num()
                .max()
                .item()
            )
            return f"{what} {i}: up to {apart:.1e} apart"
    return ""


def gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    wanted = [t for t in outputs if t.requires_grad and t.layout == torch.strided]
    given = [t for t in inputs if t.requires_grad]
    if not wanted or not given:
        return []
    weights = [
        torch.linspace(0.5, 1.5, max(t.numel(), 1))[: t.numel()].reshape(t.shape).to(t.dtype)
        for t in wanted
    ]
    weights = [w.to(t.device) for w, t in zip(weights, wanted, strict=True)]
    found = torch.autograd.grad(wanted, given, weights, allow_unused=True)
    return [t for t in found if t is not None]


def compare(op: Any, sample: Any, broken: dict[str, str] | None = None) -> tuple[str, str]:
    """The kind of outcome and why. Where `broken` is given, the run on 'cuda' is watched and adds what it broke."""
    arguments = (sample.input, sample.args, sample.kwargs)
    mine = to_device(arguments, "cpu")
    theirs = to_device(arguments, "cuda")
    if op.name in HOST_ARGUMENTS:
        theirs = (theirs[0], *mine[1:])
    try:
        torch.manual_seed(SEED)
        with CudaRandomNumbers(SEED) as numbers:
            cpu = list(tensors(op(mine[0], *mine[1], **mine[2])))
        if numbers.offset == 0:
            # A dispatch mode changes what composite ops do with lazily conjugated tensors: only random ops need it.
            mine = to_device(arguments, "cpu")
            torch.manual_seed(SEED)
            cpu = list(tensors(op(mine[0], *mine[1], **mine[2])))
    except TooSlow:
        raise
    except Exception as error:
        return "no cpu result", str(error).split("\n")[0][:120]
    torch.manual_seed(SEED)

    def on_cuda() -> list[torch.Tensor]:
        return list(tensors(op(theirs[0], *theirs[1], **theirs[2])))

    if broken is None:
        cuda = on_cuda()
    else:
        import guards  # asks the server, which only a job has

        cuda, seen = guards.watch(on_cuda, tensors(theirs))
        broken |= guards.broken(seen)
    found = difference(cpu, cuda, "result")
    if found:
        return "different", found
    try:
        cpu_grads = gradients(cpu, list(tensors(mine)))
    except TooSlow:
        raise
    except Exception:
        return "bitwise", ""  # not differentiable here
    found = difference(cpu_grads, gradients(cuda, list(tensors(theirs))), "gradient")
    return ("different", found) if found else ("bitwise", "")


def run_op(
    op: Any, dtype: torch.dtype, samples: int, guarded: bool = False, captured: bool = False
) -> Outcome:
    name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
    if op.name in NOT_COMPARED or op.name.startswith("jiterator"):
        return Outcome(name, "not compared")
    grad = not captured and op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    outcome = Outcome(name, "no cpu result")
    rank = ["no cpu result", "bitwise", "refused", "different", "error"]
    try:
        signal.alarm(SECONDS_PER_OP)
        torch.manual_seed(SEED)
        for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            if i >= samples:
                break
            outcome.samples += 1
            try:
                if captured:
                    kind, detail = capture(op, sample)
                else:
                    kind, detail = compare(op, sample, outcome.broken if guarded else None)
            except TooSlow:
                raise
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                kind, detail = "error", f"{type(error).__name__}: {first[:160]}"
            if rank.index(kind) > rank.index(outcome.kind):
                outcome.kind, outcome.detail = kind, detail
    except TooSlow:
        outcome.kind, outcome.detail = "error", f"more than {SECONDS_PER_OP} s"
    except Exception as error:
        outcome.kind, outcome.detail = (
            "error",
            f"samples: {type(error).__name__}: {str(error)[:100]}",
        )
    finally:
        signal.alarm(0)
    return outcome


def sweep(
    dtype_name: str,
    samples: int = 4,
    only: str = "",
    guarded: bool = False,
    captured: bool = False,
) -> list[Outcome]:
    """All ops that are defined for that type (for float32 also those that have only integers)."""

    def too_slow(*_: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, too_slow)
    outcomes = []
    try:
        for op in op_db:
            dtype = DTYPES[dtype_name]
            if dtype not in op.dtypes and dtype_name == "float32" and torch.int64 in op.dtypes:
                dtype = torch.int64
            if dtype not in op.dtypes or only not in op.name:
                continue
            outcomes.append(run_op(op, dtype, samples, guarded, captured))
    finally:
        signal.signal(signal.SIGALRM, previous)
    return outcomes


def capture(op: Any, sample: Any) -> tuple[str, str]:
    """One op in a graph, of signatures that the device has not seen, replayed; against the same op run eagerly."""
    arguments = (sample.input, sample.args, sample.kwargs)
    mine = to_device(arguments, "cpu")
    try:
        op(mine[0], *mine[1], **mine[2])
    except TooSlow:
        raise
    except Exception as error:
        return "no cpu result", str(error).split("\n")[0][:120]
    first, second = to_device(arguments, "cuda"), to_device(arguments, "cuda")
    if op.name in HOST_ARGUMENTS:
        first, second = (first[0], *mine[1:]), (second[0], *mine[1:])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            static = list(tensors(op(first[0], *first[1], **first[2])))
    except RuntimeError as error:
        # Of an invalidated capture the end says only that; the cause is what was raised inside.
        return "refused", str(error.__context__ or error).split("\n")[0][:120]
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    torch.manual_seed(SEED)
    graph.replay()
    replayed = [t.cpu() for t in static]
    torch.manual_seed(SEED)
    eager = list(tensors(op(second[0], *second[1], **second[2])))
    found = difference(replayed, eager, "result")
    return ("different", found) if found else ("bitwise", "")


def without_seed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of op_db's wrapper, which seeds a random op, and that a capture refuses: it draws on from the replay's."""
    return op(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--only", default="", help="ops with this in their name")
    parser.add_argument("--json", default="")
    parser.add_argument("--guarded", action="store_true", help="watch each forward run (guards.py)")
    parser.add_argument("--captured", action="store_true", help="replayed from graphs")
    options = parser.parse_args()
    if options.captured:
        common_methods_invocations.wrapper_set_seed = without_seed
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    outcomes = sweep(
        options.dtype, options.samples, options.only, options.guarded, options.captured
    )
    counts: dict[str, int] = {}
    for o in outcomes:
        counts[o.kind] = counts.get(o.kind, 0) + 1
        if o.kind in ("different", "error", "refused"):
            print(f"{o.name}: {o.kind}: {o.detail}")
        for guard, what in o.broken.items():
            print(f"{o.name}: {guard}: {what}")
    print(options.dtype, counts)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({o.name: [o.kind, o.detail] for o in outcomes}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
