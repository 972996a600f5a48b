# SPDX-License-Identifier: Apache-2.0
"""A sample of the campaign `image-damage` of scripts/soak.py."""

from __future__ import annotations

from tests.fault import image_damage


def test_damaged_at_random() -> None:
    """Each time another object; the fourth time beside the living job."""
    figures: dict[str, int] = {}
    for seed in range(1, 5):
        for name, value in image_damage.run(seed).items():
            figures[name] = figures.get(name, 0) + value
    assert figures["next_image_right"] == 1, figures
    assert figures["refused"], figures
