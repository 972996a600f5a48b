# SPDX-License-Identifier: Apache-2.0
"""Which headers of the CUDA toolkit the plugin is built with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from devproxy.torch import build


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Torch:
    """A torch of which nothing but its folder is there, on a machine without a toolkit."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(build.glob, "glob", lambda pattern: here(tmp_path, pattern))
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    return build.Torch(
        version="2.14.1", folder=str(folder), include="/python", cuda="13.0", abi=True
    )


def here(tmp_path: Path, pattern: str) -> list[str]:
    if not pattern.startswith(str(tmp_path)):
        return []
    return sorted(map(str, tmp_path.glob(pattern.removeprefix(f"{tmp_path}/"))))


def put(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "site" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_each_header_is_found_in_its_package(tmp_path: Path, torch: build.Torch) -> None:
    put(tmp_path, "nvidia/cu13/include/cuda.h")
    put(tmp_path, "nvidia/cu13/include/nv/target")
    put(tmp_path, "triton/backends/nvidia/include/crt/host_config.h")
    cuda = build.find_cuda_include("", torch)
    assert cuda == str(tmp_path / "site/nvidia/cu13/include")
    flags = build.vendor_flags(torch, cuda)
    assert flags == [
        *("-isystem", cuda),
        *("-isystem", str(tmp_path / "site/triton/backends/nvidia/include")),
    ]


@pytest.mark.parametrize("missing", build.VENDOR_HEADERS)
def test_a_missing_header_is_named_with_its_package(
    tmp_path: Path, torch: build.Torch, missing: str
) -> None:
    for name in {"cuda.h", *build.VENDOR_HEADERS} - {missing}:
        put(tmp_path, f"nvidia/cu13/include/{name}")
    with pytest.raises(build.BuildError, match=f"{missing} is missing") as caught:
        build.vendor_flags(torch, build.find_cuda_include("", torch))
    assert build.VENDOR_HEADERS[missing] in str(caught.value)
