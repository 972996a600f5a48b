# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md says what a server takes and answers."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from devproxy.proxy import stats
from tests.integration.test_cut import OneServer, folder, job, servers, until_ready
from tests.integration.test_programs import LIB, ROOT

__all__ = ["folder", "servers"]  # fixtures

PAGE = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")


def fields(value: Any) -> Any:
    """Names alone, also of what a list has."""
    if isinstance(value, dict):
        return {name: fields(item) for name, item in value.items()}
    return [fields(item) for item in value[:1]] if isinstance(value, list) else None


def test_the_statistics_have_the_fields_of_the_page(servers: list[OneServer]) -> None:
    text = re.search(r"^With `kind = kStats`.*?^```json\n(.*?)^```", PAGE, re.M | re.S)
    assert text
    process = job(servers[0].folder, "cut", "state")
    until_ready(process)
    answer = stats.query(str(servers[0].folder), 0)
    assert fields(answer) == fields(json.loads(text[1]))
    process.kill()
    process.communicate()


def test_the_options_are_those_of_the_page() -> None:
    text = re.search(r"^## Start of a server\n+```\n(.*?)^```", PAGE, re.M | re.S)
    assert text
    usage = subprocess.run([LIB / "devproxy-server"], capture_output=True, text=True).stderr
    options = re.compile(r"--[a-z-]+")
    assert set(options.findall(text[1])) == set(options.findall(usage.partition("usage: ")[2]))
