# SPDX-License-Identifier: Apache-2.0
"""The libraries and the server in build/lib, as the generator and the start of a job know them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from codegen import tables
from devproxy import config
from devproxy.proxy import preflight
from tests.unit.test_codegen import requests

LIB = Path(__file__).resolve().parents[2] / "build/lib/libcuda.so.1"


def test_the_library_resolves_as_the_model_does() -> None:
    lib = ctypes.CDLL(str(LIB))
    pfn, status = ctypes.c_void_p(), ctypes.c_int(-1)
    for symbol, version, per_thread in requests():
        flags = ctypes.c_uint64(2 if per_thread else 0)
        args = (symbol.encode(), ctypes.byref(pfn), version, flags, ctypes.byref(status))
        assert lib.cuGetProcAddress_v2(*args) == 0, symbol
        wanted = ctypes.cast(lib[tables.resolve(symbol, version, per_thread)], ctypes.c_void_p)
        assert (pfn.value, status.value) == (wanted.value, 0), symbol
    pfn.value = 1
    assert (
        lib.cuGetProcAddress_v2(
            b"cuNope", ctypes.byref(pfn), 13000, ctypes.c_uint64(0), ctypes.byref(status)
        )
        == 500
    )
    assert (pfn.value, status.value) == (None, 1)
    assert lib.cuGetProcAddress(b"cuNope", ctypes.byref(pfn), 13000, ctypes.c_uint64(0)) == 500
    assert lib.cuGetProcAddress(b"cuInit", ctypes.byref(pfn), 13000, ctypes.c_uint64(3)) == 1
    assert lib.cuGetProcAddress(None, ctypes.byref(pfn), 13000, ctypes.c_uint64(0)) == 1


def test_the_server_never_takes_our_shim_for_the_driver(tmp_path: Path) -> None:
    lib = config.lib_dir()
    server = [config.server_path(), "--job", "j", "--job-dir", str(tmp_path), "--gpu", "0"]
    server += ["--device", "cuda", "--gpu-memory", "0", "--ledger", str(tmp_path / "ledger")]
    named = {config.CUDA_DRIVER: os.path.join(lib, preflight.DRIVER_SHIM)}
    done = subprocess.run(server, env=os.environ | named, capture_output=True, text=True)
    assert done.returncode == 2
    assert "devproxy's own libcuda.so.1, not the NVIDIA driver" in done.stderr
