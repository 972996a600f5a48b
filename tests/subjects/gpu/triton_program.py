# SPDX-License-Identifier: Apache-2.0
"""Triton kernels through Triton's own launcher: compiled here, launched, compared. Prints a digest and PASS."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from common import Digest


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, inside, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, powers / tl.sum(powers, 0), inside)


@triton.jit
def product(a, b, c, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """c = a b for n x n, by the tensor cores: no library is asked."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, BLOCK):
        inner = k + tl.arange(0, BLOCK)
        total += tl.dot(
            tl.load(a + rows[:, None] * n + inner[None, :]),
            tl.load(b + inner[:, None] * n + columns[None, :]),
        )
    tl.store(c + rows[:, None] * n + columns[None, :], total)


EXECUTED = "DEVPROXY_TEST_NO_KERNELS" not in os.environ  # set where no kernel is executed


def main() -> None:
    generator, digest = torch.Generator().manual_seed(3), Digest()
    x, y = (torch.randn(100_003, generator=generator).cuda() for _ in range(2))
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    assert not EXECUTED or torch.equal(out, x + y)
    digest.add("sum", out)
    rows = torch.randn(77, 781, generator=generator).cuda()
    soft = torch.empty_like(rows)
    softmax[(77,)](rows, soft, 781, BLOCK=1024, num_warps=8)
    if EXECUTED:
        torch.testing.assert_close(soft, rows.softmax(1))
    digest.add("softmax", soft)
    a, b = (torch.randn(256, 256, generator=generator).half() for _ in range(2))
    c = torch.empty(256, 256, device="cuda")
    product[(4, 4)](a.cuda(), b.cuda(), c, 256, BLOCK=64)
    if EXECUTED:
        torch.testing.assert_close(c.cpu(), a.float() @ b.float(), atol=1e-2, rtol=1e-2)
    digest.add("product", c)
    with open("/proc/self/maps") as maps:
        print("mapped:", *sorted({line.split()[-1] for line in maps if "libcuda" in line}))
    digest.finish()
    print("PASS triton_program" + ("" if EXECUTED else " (without kernels)"))


if __name__ == "__main__":
    main()
