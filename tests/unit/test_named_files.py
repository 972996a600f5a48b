# SPDX-License-Identifier: Apache-2.0
"""A comment that names a file of this tree names one that is there: a stranger looks it up."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout.splitlines()
# By as much of its path as a reader needs.
NAMES = {"/".join(parts[i:]) for parts in (f.split("/") for f in FILES) for i in range(len(parts))}
NAMED = re.compile(
    r"(?<![\w./<>*{}$-])((?:[\w.-]+/)*[\w-][\w.-]*\.(?:h|cc|cu|py|pyi|sh|md))(?![\w*])"
)
# Of others, by their own names: the vendor's and the kernel's headers, CRIU, torch, ipykernel.
OTHERS = re.compile(
    r"cuda\w*\.h|cudnn\w*\.h|nccl\.h|nvml\.h|nvToolsExt\.h|driver_types\.h|fatbinary_section\.h|elf\.h"
    r"|linux/.*|include/net/.*|criu/.*|c10/.*|torch/(_C/.*|version\.py)|(ipykernel/)?(parentpoller|kernelapp)\.py"
)
MADE = re.compile(r".*\.gen\.(h|cc)")  # by the generator, into build/gen
EXAMPLE = re.compile(r"FILE\.cu|x\.py")


def comments(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Each with its line; docstrings too."""
    if not path.endswith(".py"):
        for number, line in enumerate(text.split("\n"), 1):
            if found := re.search(r"//(.*)", line):
                yield number, found[1]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if words := ast.get_docstring(node, clean=False):
                yield node.body[0].lineno, words


def absent(path: str, text: str) -> list[str]:
    """What its comments name and nobody has."""
    return [
        f"{path}:{number}: {name}"
        for number, words in comments(path, text)
        for name in NAMED.findall(words)
        if name not in NAMES and not any(p.fullmatch(name) for p in (OTHERS, MADE, EXAMPLE))
    ]


def test_comments_name_files_that_are_there() -> None:
    sources = [f for f in FILES if f.endswith((".h", ".cc", ".cu", ".py")) and (ROOT / f).exists()]
    assert len(sources) > 500
    found = [line for f in sources for line in absent(f, (ROOT / f).read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("a.h", "// see gone.h, csrc/wire/segment.h and client/gone.h", ["gone.h", "client/gone.h"]),
        ("a.cc", "int x;  // facts/gone.md", ["facts/gone.md"]),
        ("a.py", '"""See node/gone.py and node/tree.py."""\nx = "other/gone.py"  # gone.sh', ["gone.sh", "node/gone.py"]),
        ("a.h", "// cuda.h, linux/sched.h, wire.gen.h, <gone.h>, *.py, $OUT/gone.py", []),
    ],
)  # fmt: skip
def test_what_is_found(path: str, text: str, named: list[str]) -> None:
    assert [line.rpartition(" ")[2] for line in absent(path, text)] == named
