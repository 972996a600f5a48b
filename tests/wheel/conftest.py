# SPDX-License-Identifier: Apache-2.0
"""Tests of an unmodified CUDA wheel, in an environment of its own: `make test-cuda-wheel-record`; not a part of make test.

DEVPROXY_WHEEL_PYTHON names that environment's Python; without it nothing here is collected.
"""

from __future__ import annotations

import os

if not os.environ.get("DEVPROXY_WHEEL_PYTHON"):
    collect_ignore_glob = ["test_*.py"]
