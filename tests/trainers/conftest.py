# SPDX-License-Identifier: Apache-2.0
"""Training stacks that nobody here wrote, in an environment of their own: `make test-trainers`; not a part of make test.

DEVPROXY_TRAINERS_PYTHON names that environment's Python; without it nothing here is collected.
"""

from __future__ import annotations

import os

if not os.environ.get("DEVPROXY_TRAINERS_PYTHON"):
    collect_ignore_glob = ["test_*.py"]
