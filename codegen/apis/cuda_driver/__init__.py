# SPDX-License-Identifier: Apache-2.0
"""The driver API, by chapter of cuda.h; the name of an entry is the vendor's symbol, with its version."""

from codegen.apis.cuda_driver import (
    context,
    device,
    entrypoint,
    event,
    graph,
    hostmem,
    init,
    launch,
    link,
    logs,
    managed,
    memory,
    module,
    stream,
    texture,
    vmm,
)
from codegen.apis.cuda_driver.refused import FAMILIES

CHAPTERS = (
    init,
    device,
    context,
    module,
    memory,
    hostmem,
    managed,
    stream,
    event,
    launch,
    graph,
    logs,
    entrypoint,
    vmm,
    link,
    texture,
)

__all__ = ["CHAPTERS", "FAMILIES"]
