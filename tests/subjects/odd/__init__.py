# SPDX-License-Identifier: Apache-2.0
"""What an odd job (odd_job.py) is put together from: many small traits.

A trait is a generator. It sets something up, and then looks at it once in every step: what the kernel shows must be what
it was, however often the job was dumped and restored in between. What it yields goes into the digest.

A trait with `must` is an obstacle: as long as it is there, every image is refused with words that match. It goes away
when the file let-go is there. One with `may` is such an obstacle at times. One with `apart` is not drawn: it says what
happens instead of what should.
"""

from tests.subjects.odd import (
    events,
    files,
    gpu,
    memory,
    obstacles,
    pipes,
    processes,
    rights,
    signals,
    sockets,
    terminals,
    threads,
)
from tests.subjects.odd.shared import TRAITS as TRAITS

__all__ = [
    "TRAITS",
    "events",
    "files",
    "gpu",
    "memory",
    "obstacles",
    "pipes",
    "processes",
    "rights",
    "signals",
    "sockets",
    "terminals",
    "threads",
]
