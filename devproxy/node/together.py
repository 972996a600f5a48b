# SPDX-License-Identifier: Apache-2.0
"""Several blocking actions side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def all_of(actions: list[Callable[[], T]]) -> list[T]:
    """Runs them in threads; raises the first failure after all have ended. A single one runs in this thread."""
    if len(actions) < 2:
        return [action() for action in actions]
    with ThreadPoolExecutor(len(actions), thread_name_prefix="together") as pool:
        futures = [pool.submit(action) for action in actions]
    return [future.result() for future in futures]
