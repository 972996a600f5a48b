# SPDX-License-Identifier: Apache-2.0
"""What code that Inductor made does on a GPU, without Inductor: its buffer, its launcher, a kernel of Triton's.

All three go past torch's dispatcher: the first to libtorch_cuda's allocator, the others to a table of the driver's functions
that torch itself loads. Behind devproxy they reach the plugin and the shim. Run by test_record.py.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def fill(to, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, 7, mask=at < n)


def main() -> None:
    source = ASTSource(fn=fill, signature={"to": "*i32", "n": "i32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 128})  # fmt: skip
    made: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    buffer = torch._C._dynamo.guards._empty_strided_cuda((300,), (1,), torch.int32)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        launcher = torch._C._StaticCudaLauncher  # type: ignore[attr-defined]
        function, registers, spills = launcher._load_kernel(
            file.name, made.metadata.name, made.metadata.shared, 0
        )
    stream = torch._C._cuda_getCurrentRawStream(0)
    more = made.metadata
    # Triton adds a pointer for its own scratch memory, and one for a profile's; there is none of either.
    arguments = (buffer, 300, None, None)
    launcher._launch_kernel(function, 3, 1, 1, more.num_warps, more.shared, "OiOO", arguments, stream)  # fmt: skip
    torch.cuda.synchronize()
    print(json.dumps({"loaded": function != 0, "registers": registers > 0, "device": str(buffer.device)}))  # fmt: skip


if __name__ == "__main__":
    main()
