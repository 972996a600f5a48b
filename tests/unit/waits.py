# SPDX-License-Identifier: Apache-2.0
"""Finds the calls that can wait without an end, in our Python by its syntax and in our C and C++ by the names of the calls."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Without arguments they wait until something happens.
_BARE = ("wait", "join", "result", "communicate", "acquire")
# A bound of theirs is a property of the socket.
_SOCKET = ("recv", "recvmsg", "recv_into", "recvfrom", "recv_bytes", "accept", "sendall", "sendmsg", "connect")  # fmt: skip
_SIGNALS = ("sigwait", "sigwaitinfo")
_NATIVE = re.compile(
    r"(?<![\w.>])(?:::)?(poll|ppoll|select|epoll_wait|recv|recvmsg|recvfrom|accept4?|connect|send|sendmsg|waitpid|waitid|"
    r"flock|sigwaitinfo|sigtimedwait|sigwait)\(|(?<=[.>])(wait|wait_for|wait_until|join)\(|(SYS_futex|F_SETLKW|F_OFD_SETLKW)"
)


def python_waits(root: Path) -> Counter[tuple[str, str]]:
    """(file, "function: call") of each call that has no bound in itself, and how often."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(root.rglob("*.py")):
        if "_pb" in path.parts:
            continue
        for function, call in _calls(ast.parse(path.read_text()), ""):
            if is_unbounded(call):
                found[str(path.relative_to(ROOT)), f"{function}: {ast.unparse(call.func)}"] += 1
    return found


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            inside = f"{function}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            yield inside or "module", child
        yield from _calls(child, inside)


def is_unbounded(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name, of = call.func.attr, ast.unparse(call.func.value)
    said = {word.arg for word in call.keywords}
    text = ast.unparse(call)
    if name in _BARE:
        bounds = said & {"timeout", "blocking", "timeout_s"}
        if call.args:
            return isinstance(call.args[0], ast.Constant) and call.args[0].value is None
        return not bounds
    if name == "poll":
        return of.endswith("poll") and (not call.args or "None" in text)
    if name == "select":
        return of == "select" and len(call.args) < 4
    if name in ("flock", "lockf"):
        return "LOCK_NB" not in text and "LOCK_UN" not in text
    if name in ("waitpid", "waitid", "wait4"):
        return "WNOHANG" not in text
    if name in ("run", "call", "check_call", "check_output"):
        return of == "subprocess" and "timeout" not in said
    if name == "urlopen":
        return "timeout" not in said
    if name in ("stop",) and "server" in of:
        return False
    if re.fullmatch(r"(self\.)?_?stub", of):
        return "timeout" not in said
    return name in _SIGNALS or name in _SOCKET


def native_waits(*roots: Path) -> Counter[tuple[str, str]]:
    """(file, call) and how often, whatever its bound is. Comments do not count."""
    found: Counter[tuple[str, str]] = Counter()
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix not in (".cc", ".h", ".c"):
                continue
            text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            for match in _NATIVE.finditer(text):
                found[str(path.relative_to(ROOT)), next(filter(None, match.groups()))] += 1
    return found
