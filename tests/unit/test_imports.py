# SPDX-License-Identifier: Apache-2.0
"""No module of our Python imports itself by way of others, and what is imported late says why.

import-linter knows the layers (pyproject.toml); it does not look for circles below one layer. Here every import counts: at
the top, inside a function, for type checkers alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "devproxy": ROOT,
    "codegen": ROOT,
    "gpucheck": ROOT / "scripts",
    "devproxy_torch": ROOT / "devproxy/torch/pylib",
}
GENERATED = "devproxy.control._pb"


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not name.startswith(GENERATED):
                found[name] = path
    return found


def imported(module: str, tree: ast.AST, known: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """(the statement, a module of ours that it imports)"""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: imports are absolute here"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in names]
        for name in names:
            if name in known:
                assert isinstance(node, ast.stmt)
                yield node, name


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that all reach each other (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1 or node in graph[node]:
                found.append(sorted(group))

    for node in graph:
        if node not in number:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": set()}) == [["b", "c"], ["d"]]  # fmt: skip


def test_every_kind_of_import_counts() -> None:
    text = "import a.b\nfrom a import c, name\ndef f():\n    from a.d import thing\nif TYPE_CHECKING:\n    import a.e\n"
    known = {"a", "a.b", "a.c", "a.d", "a.e"}
    assert {name for _, name in imported("m", ast.parse(text), known)} == known


def test_there_is_no_circle() -> None:
    known = modules()
    assert len(known) > 80
    graph = {
        name: {other for _, other in imported(name, ast.parse(path.read_text()), set(known))}
        for name, path in known.items()
    }
    assert circles(graph) == []


def late_imports(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Imports inside of functions, those that follow each other together."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[ast.stmt] = set()
    for node in (inner for function in functions for inner in ast.walk(function)):
        for field in ("body", "orelse", "finalbody"):
            block, group = getattr(node, field, None), list[ast.stmt]()
            for one in [*block, None] if isinstance(block, list) else []:
                if isinstance(one, ast.Import | ast.ImportFrom) and one not in seen:
                    seen.add(one)
                    group.append(one)
                elif group:
                    yield group
                    group = []


def without_reason(text: str) -> list[int]:
    """Lines of late imports that no comment explains: above them, beside them, or once for the whole file."""
    lines = text.splitlines()
    if any(line.startswith("# Late imports: ") for line in lines):
        return []
    return [
        group[0].lineno
        for group in late_imports(ast.parse(text))
        if not any("#" in line for line in lines[group[0].lineno - 2 : group[-1].end_lineno])
    ]


def test_a_late_import_without_a_reason_is_found() -> None:
    text = "def f():\n    import a\n    import b\n    if x:\n        import c  # slow\n    # why\n    from d import e\n"
    assert without_reason(text) == [2]
    assert without_reason(f"{text}# Late imports: all of them\n") == []


def test_late_imports_say_why() -> None:
    unsaid = {name: without_reason(path.read_text()) for name, path in modules().items()}
    assert {n: lines for n, lines in unsaid.items() if lines} == {}
