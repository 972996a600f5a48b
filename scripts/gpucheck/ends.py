# SPDX-License-Identifier: Apache-2.0
"""How a stage ends."""

from __future__ import annotations

OK, FAILED, REFUSED, NOT_RUN = "ok", "failed", "refused", "not_run"
EXIT_OF = {OK: 0, FAILED: 1, REFUSED: 3}


class Refused(Exception):
    """Something that the stage needs is not here; the text names it."""


class Failed(Exception):
    """Something is not as it must be."""


# Figures of a stage that has not done all: where the next call begins; what it runs again for.
GO_ON, NOT_REACHED = "go on with", "not reached"
