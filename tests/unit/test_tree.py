# SPDX-License-Identifier: Apache-2.0
"""Whose end is the job's: that of a tree which may yet have to go is not (devproxy/node/tree.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from devproxy.node.tree import Tree
from devproxy.proxy.server_set import ServerSet


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    nothing = cast(Any, SimpleNamespace(path=str(tmp_path), watch=lambda pid: None))
    yield Tree(nothing, [0], nothing, ServerSet(), nothing, nothing, "", "")


@pytest.fixture
def root() -> Iterator[int]:
    """A child of ours that is asleep."""
    child = subprocess.Popen(["sleep", "1000"])
    yield child.pid
    child.kill()
    child.wait()


def end(tree: Tree, root: int) -> None:
    os.kill(root, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{root}"):
        tree._reap()
        assert time.monotonic() < deadline


@pytest.mark.parametrize("when", ["before it has a name", "while it runs"])
def test_it_ends_before_all_trees_run(tree: Tree, root: int, when: str) -> None:
    tree.await_root()
    if when == "before it has a name":
        end(tree, root)
    tree.restored(root)
    if when == "while it runs":
        assert tree.root == root
        end(tree, root)
    assert (tree.root, tree.code) == (None, None)
    assert tree.hold_root(root) is None  # its number may be another's by now
    tree.no_root()  # undone: the job is suspended as before
    assert tree.code is None


@pytest.mark.parametrize("when", ["before it has a name", "while it runs", "when all do"])
def test_it_ends_and_all_trees_run(tree: Tree, root: int, when: str) -> None:
    tree.await_root()
    if when == "before it has a name":
        end(tree, root)
    tree.restored(root)
    if when == "while it runs":
        end(tree, root)
    tree.expect_no_end()
    if when == "when all do":
        assert tree.code is None
        end(tree, root)
    assert (tree.root, tree.code) == (None, 137)


def test_a_tree_that_goes(tree: Tree, root: int) -> None:
    """Held by a pidfd, named already or not."""
    tree.await_root()
    for name_it in (False, True):
        if name_it:
            tree.restored(root)
        held = tree.hold_root(root)
        assert held is not None
        os.close(held)
    assert tree.hold_root(os.getpid()) is None  # a stranger
