# SPDX-License-Identifier: Apache-2.0
"""A word that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Empty where nothing is near."""
    import difflib  # for this alone

    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {found[0]}? " if found else ""
