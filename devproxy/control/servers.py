# SPDX-License-Identifier: Apache-2.0
"""What a job's servers count, for those who show it."""

from __future__ import annotations

import os
from typing import Any

from devproxy import config, layout
from devproxy.control import coordinator_api as api
from devproxy.errors import Refused, ServerStopped, ServerUnreachable
from devproxy.proxy import stats


def client_abi() -> bytes:
    """The ABI id to say hello with; zeros where nothing is built (then the server says so)."""
    from devproxy.proxy import preflight, server_set  # not for the verbs that ask no server

    try:
        return bytes.fromhex(
            server_set.client_abi(os.path.join(config.lib_dir(), preflight.DRIVER_SHIM))
        )
    except Refused:
        return bytes(layout.ABI_BYTES)


# Phases in which a job has no servers to ask.
WITHOUT_SERVERS = (api.STARTING, api.SUSPENDED, api.RESTORING, api.GONE)


def ask(facts: dict[str, Any], path: str, abi: bytes) -> list[dict[str, Any]]:
    """Statistics of each GPU's server, or {"gpu", "lost"} where it does not answer, {"gpu", "stopped"} where it cannot."""
    answers: list[dict[str, Any]] = []
    if facts["phase"] in WITHOUT_SERVERS:
        return answers
    for gpu in range(len(facts["here"] or facts["gpus"])):
        try:
            answers.append(stats.query(path, gpu, abi))
        except ServerStopped as error:
            answers.append({"gpu": gpu, "stopped": str(error)})
        except ServerUnreachable as error:
            answers.append({"gpu": gpu, "lost": str(error)})
    return answers
