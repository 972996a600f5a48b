#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Formats the C++ sources, or with --check only says which are not formatted.
set -eu
cd "$(dirname "$0")/.."
mode=-i
[ "${1:-}" != --check ] || mode="--dry-run -Werror"
find devproxy tests -name '*.gen.*' -prune -o \( -name '*.cc' -o -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -r -P 2 -n 8 .venv/bin/clang-format $mode
