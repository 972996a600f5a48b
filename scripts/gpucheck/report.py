# SPDX-License-Identifier: Apache-2.0
"""The figures of one stage."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any


class Report:
    """The figures of one stage, on disk after each: what is known survives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures: dict[str, Any] = {}
        self.text: list[str] = []
        self.status = ""
        self.lock = threading.Lock()

    def put(self, name: str, value: Any) -> None:
        with self.lock:
            self.figures[name] = value
            self.save()
        print(f"   {name}: {json.dumps(value)[:1500]}", flush=True)

    def say(self, text: str) -> None:
        with self.lock:
            self.text.append(text)
            self.save()
        print(f"   {text}", flush=True)

    def end(self, status: str, text: str = "") -> None:
        if text:
            self.say(text)
        self.status = status
        self.save()

    def save(self) -> None:
        facts = {"status": self.status, "figures": self.figures, "text": "\n".join(self.text)}
        write_whole(self.path, json.dumps(facts))


def write_whole(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.rename(path)
