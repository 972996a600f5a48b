# SPDX-License-Identifier: Apache-2.0
"""Run by test_extension.py, in a job whose Python has a CUDA wheel and pytest: a user's C++ extension and the plugin."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from devproxy.torch import build  # noqa: E402


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiled as torch.utils.cpp_extension does, without its need of a whole toolkit."""
    product: Path = tmp_path_factory.mktemp("extension") / "extension.so"
    about = build.ask_torch(sys.executable)
    cuda_include = build.find_cuda_include("", about)
    packages = os.path.dirname(about.folder)
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", f"{HERE}/extension.cc"]
    command += build.include_flags(about, cuda_include) + build.vendor_flags(about, cuda_include)
    command += ["-L", about.lib, "-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda"]
    command += glob.glob(os.path.join(packages, "nvidia", "*", "lib", "libcudart.so.*"))
    command += ["-o", str(product)]
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=env)
    torch.ops.load_library(str(product))
    return torch.ops.extension_test


def test_extension_sees_the_stream_of_python(ops: Any) -> None:
    x = torch.ones(8, device="cuda")
    assert ops.current_stream(x) == 0
    streams = [torch.cuda.Stream() for _ in range(5)] + [torch.cuda.Stream(priority=-1)]
    for s in streams:
        with torch.cuda.stream(s):
            assert ops.current_stream(x) == s.cuda_stream == torch.cuda.current_stream().cuda_stream
    assert ops.current_stream(x) == 0
    outside = torch.cuda.ExternalStream(streams[3].cuda_stream)
    with torch.cuda.stream(outside):
        assert ops.current_stream(x) == streams[3].cuda_stream
        seen = []
        thread = threading.Thread(target=lambda: seen.append(ops.current_stream(x)))
        thread.start()
        thread.join()
        assert seen == [0]  # each thread has its own


def test_ops_follow_a_guard_of_the_extension(ops: Any) -> None:
    x = torch.arange(1 << 16, device="cuda", dtype=torch.float32)
    doubled, stream = ops.doubled_aside(x)
    assert stream not in (0, torch.cuda.current_stream().cuda_stream)
    assert torch.equal(doubled.cpu(), torch.arange(1 << 16) * 2.0)
    assert ops.guards_agree(x)
    assert ops.current_stream(x) == 0


def test_backward_runs_on_the_stream_of_its_forward(ops: Any) -> None:
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            seen.append(ops.current_stream(g))
            return g

    x = torch.ones(8, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = Ask.apply(x).sum()
    y.backward()
    assert seen == [side.cuda_stream]


def test_extension_sees_the_device_of_python(ops: Any) -> None:
    here = [torch.ones(8, device=f"cuda:{i}") for i in range(2)]
    try:
        for i in (1, 0, 1):
            torch.cuda.set_device(i)
            assert ops.unguarded() == [i, i, i]
            with torch.cuda.device(1 - i):
                assert ops.unguarded() == [1 - i] * 3
            assert ops.current_stream(here[1 - i]) == 0
            assert ops.unguarded() == [i, i, i]
    finally:
        torch.cuda.set_device(0)


def test_ops_find_their_device_behind_an_extension(ops: Any) -> None:
    """It left another device current than the plugin had made so: an op still goes where its tensor is."""
    x = torch.ones(8, device="cuda:0")
    y = torch.ones(8, device="cuda:1")
    ops.select_device(1)
    try:
        assert (x + 1).sum().item() == 16
        fresh = torch.full((8,), 3.0, device="cuda:0")
        assert (fresh * x).tolist() == [3.0] * 8
        ops.select_device(0)
        assert (y + 1).tolist() == [2.0] * 8
    finally:
        torch.cuda.set_device(1)
        torch.cuda.set_device(0)
