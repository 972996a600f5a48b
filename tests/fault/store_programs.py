# SPDX-License-Identifier: Apache-2.0
"""What campaigns of random store operations share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from devproxy.checkpoint.store import Store


def load(store: Store, image: str) -> bytes:
    """The data of an image, every chunk checked."""
    return store.fetch_bytes(store.read_manifest(image)["data"]["chunks"], name="the data")


def side_by_side(
    works: list[Callable[[], Any]], hang_s: float
) -> list[tuple[Any, BaseException | None]]:
    """What each of them has returned or raised, in threads of their own. Raises AssertionError where one takes longer."""
    results: list[tuple[Any, BaseException | None]] = [(None, None)] * len(works)

    def one(number: int) -> None:
        try:
            results[number] = works[number](), None
        except BaseException as error:
            results[number] = None, error

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(len(works))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + hang_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "it hangs"
    return results
