# SPDX-License-Identifier: Apache-2.0
"""cuda_number.gen.h: numbers of cuda.h, under its own names, for code that includes no vendor header."""

from __future__ import annotations

from codegen.tables import facts


def emit() -> str:
    out = ["#pragma once", "#include <cstdint>", "", "namespace devproxy::cuda_number {"]
    for tag, rows in facts("cuda").enums.items():
        out += [f"// {tag}", *(f"inline constexpr int32_t {name} = {n};" for name, n in rows)]
    return "\n".join([*out, "}  // namespace devproxy::cuda_number"]) + "\n"
