# SPDX-License-Identifier: Apache-2.0
"""torch's own op_db on 'cuda', every data type that the device has: digests of each op's results and gradients.

    python torch_ops.py --json ops.jsonl [--times 2]      natively, and under devproxy-run

A case is TYPE/OP. The inputs are made on the CPU with fixed seeds, and their digest is in the line: where it differs,
nothing was compared. With --times 2 a sample that differs from itself says so ("unsteady"). --spoil OP gives that op other
numbers: a test of whoever compares.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

import torch

import torch_cases  # isort: skip
from torch.testing._internal.common_methods_invocations import op_db

from opdb import HOST_ARGUMENTS, NOT_COMPARED, gradients, tensors, to_device

# In this order: what models are made of first.
FIRST = ("float32", "bfloat16", "float16", "int64", "float64", "complex64", "bool")
NONE_OF_DEVPROXY = ("jiterator",)  # made of CUDA source text at run time: refused by name


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(values: list[torch.Tensor]) -> list[list[Any]]:
    """Of each tensor: digest, and what tells in words how another one differs."""
    found = []
    for t in values:
        plain = t.detach()
        total = ""
        if plain.layout == torch.strided and plain.numel() and not plain.is_quantized:
            on_host = plain.cpu().resolve_conj().resolve_neg()
            wide = torch.complex128 if plain.dtype.is_complex else torch.float64
            total = f"{on_host.to(wide).sum().item():.9g}"
        strides = list(plain.stride()) if plain.layout == torch.strided else []
        form = f"{type_name(t.dtype)}{list(t.shape)} {t.device.type}"
        found.append([torch_cases.digest(plain), form, strides, total])
    return found


def one_sample(op: Any, sample: Any, options: argparse.Namespace) -> dict[str, Any]:
    arguments = (sample.input, sample.args, sample.kwargs)
    given = to_device(arguments, "cuda")
    if op.name in HOST_ARGUMENTS:
        given = (given[0], *arguments[1:])
    if options.spoil == op.name:
        given = ((given[0] + 1).detach().requires_grad_(given[0].requires_grad), *given[1:])
    torch_cases.seed(options.seed)
    facts: dict[str, Any] = {}
    try:
        results = list(tensors(op(given[0], *given[1], **given[2])))
        facts["out"] = described(results)
    except Exception as error:
        return {"error": torch_cases.words(error)}
    try:
        facts["grad"] = described(gradients(results, list(tensors(given))))
    except Exception as error:
        facts["grad_error"] = torch_cases.words(error)
    return facts


def one_op(op: Any, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch_cases.seed(torch_cases.SEED)
    samples: list[dict[str, Any]] = []
    try:
        # On the CPU, whose generator is the same on both sides.
        made = op.sample_inputs("cpu", dtype, requires_grad=grad)
        given = list(itertools.islice(made, options.samples))
    except Exception as error:  # scipy, which some ask for, need not be here
        return {"no_samples": torch_cases.words(error)}
    for sample in given:
        arguments = (sample.input, sample.args, sample.kwargs)
        facts = one_sample(op, sample, options)
        for _ in range(options.times - 1):
            again = one_sample(op, sample, options)
            if again != facts:
                facts["unsteady"] = True
                break
        facts["in"] = torch_cases.digest(list(tensors(arguments)))
        samples.append(facts)
    return {"samples": samples}


def cases(options: argparse.Namespace) -> dict[str, torch_cases.Case]:
    found: dict[str, dict[str, torch_cases.Case]] = {}
    for op in op_db:
        if op.name in NOT_COMPARED or op.name.startswith(NONE_OF_DEVPROXY):
            continue
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        for dtype in op.supported_dtypes("cuda"):
            of_type = found.setdefault(type_name(dtype), {})
            of_type[name] = lambda op=op, dtype=dtype: one_op(op, dtype, options)
    types = [t for t in options.types.split(",") if t] or [
        *(t for t in FIRST if t in found),
        *sorted(set(found) - set(FIRST)),
    ]
    return {f"{t}/{name}": case for t in types for name, case in found.get(t, {}).items()}


def main() -> None:
    options = torch_cases.parse(__doc__ or "", samples=3, types="", spoil="")
    if "PYTHONHASHSEED" not in os.environ:
        raise SystemExit("set PYTHONHASHSEED: the order of some samples comes from a set")
    torch_cases.run(options, cases(options))


if __name__ == "__main__":
    main()
