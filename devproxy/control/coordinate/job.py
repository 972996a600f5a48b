# SPDX-License-Identifier: Apache-2.0
"""What every verb works on, and what is in the way of verbs and images of this job for as long as it lives."""

from __future__ import annotations

import os
from dataclasses import dataclass

from devproxy.control.coordinate.images import Images
from devproxy.control.coordinate.standing import Standing
from devproxy.control.coordinate.trees import Trees
from devproxy.node.spec import JobSpec

NOT_ROOT = (
    "an image needs root: CRIU could not restore one of another user, whatever its capabilities"
)


def is_root() -> bool:
    return os.geteuid() == 0


@dataclass(frozen=True)
class Job:
    """lib: its build's folder."""

    spec: JobSpec
    lib: str
    trees: Trees
    images: Images
    standing: Standing

    def why_no_verb(self) -> str:
        if self.spec.plain:
            return "the job runs without namespaces (--plain, or no privilege for them)"
        return ""

    def why_no_image(self) -> str:
        """CRIU 4.2.1 dumps a job for a user with capabilities, and fails to restore it: an image that is none."""
        if self.spec.files_dir:
            return f"its files lie in {self.spec.files_dir} (restore --files), of which an image knows nothing"
        return self.why_no_verb() or ("" if is_root() else NOT_ROOT)
