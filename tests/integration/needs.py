# SPDX-License-Identifier: Apache-2.0
"""What a test may need of the machine. A missing feature fails the test, unless the environment says that it is known."""

from __future__ import annotations

import os

import pytest

from devproxy.checkpoint import criu
from devproxy.cli import doctor
from devproxy.errors import Refused
from tests.cudart.build import find_nvcc, find_nvrtc

MAY_BE_MISSING = "DEVPROXY_TEST_WITHOUT"  # names of features, separated by commas


def missing(feature: str, why: str) -> None:
    if feature in os.environ.get(MAY_BE_MISSING, "").split(","):
        pytest.skip(f"{feature}: {why}")
    pytest.fail(f"{feature}: {why} (or set {MAY_BE_MISSING}={feature})", pytrace=False)


def require_namespaces() -> None:
    finding = doctor.namespaces()
    if not finding.ok:
        missing("namespaces", f"{finding.found}; {finding.remedy}")


def require_criu() -> criu.Criu:
    require_namespaces()
    try:
        return criu.find()
    except Refused as error:
        missing("criu", str(error))
        raise


def require_nvcc() -> str:
    """nvcc of CUDA 13: on PATH, where its installer puts it, or where scripts/install_test_tools.sh does."""
    found = find_nvcc()
    if not found:
        missing("nvcc", "no nvcc here; run: scripts/install_test_tools.sh")
        raise AssertionError
    return found


def require_nvrtc() -> str:
    """The folder of libnvrtc.so.13."""
    found = find_nvrtc()
    if not found:
        missing("nvrtc", "no libnvrtc.so.13 here; run: scripts/install_test_tools.sh")
        raise AssertionError
    return found
