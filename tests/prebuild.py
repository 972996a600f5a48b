# SPDX-License-Identifier: Apache-2.0
"""Compiles what the tests run, before any test's clock begins: python -m tests.prebuild

Each test builds what it needs when it is not there, so one test alone works without this. Under load such a build ran
into the test's own time limit; and a core idles where one worker compiles for minutes while the others wait for it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests import sweeps
from tests.cudart import build as cudart
from tests.integration import (
    needs,
    test_cudart_programs,
    test_fuzz,
    test_model,
    test_programs,
    test_record,
    test_server_raw,
    test_support,
)
from tests.native import build as native
from tests.native import test_hal_cuda, test_image

AT_ONCE = 2


@functools.cache
def taken() -> str:
    """The names of the tests that this run takes of the files that need the dearest parts (tests/sweeps.py)."""
    files = [str(one.__file__) for one in (test_fuzz, test_cudart_programs)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not soak and not gpu", *files]
    env = os.environ | {sweeps.VARIABLE: sweeps.seed()}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


# Parts that are made only for these tests.
ONLY_FOR = {
    "server with AddressSanitizer": "test_server_survives_hostile_messages",
    "server with ThreadSanitizer": "test_server_has_no_data_race",
    "fuzzer of frames": "test_receivers_survive_hostile_frames",
}


def programs() -> None:
    test_programs.build_kernels(test_programs.BUILD / "kernels.so")
    for name, *_ in test_programs.PROGRAMS:
        test_programs.build_program(name)


def fuzzers() -> None:
    test_fuzz.build_fuzzer("server_fuzz")
    test_fuzz.build_fuzzer("server_fuzz_tsan", "-DDEVPROXY_TSAN")


def models() -> None:
    test_model.build("model/ring_model.cc", "ring_model", "-O2", "-DMUTANT=0")
    test_model.build("model/ring_model.cc", "ring_model_mutants", "-O2")
    test_model.gate_model()
    test_model.comm_model()
    test_model.comm_model("-fsanitize=address")


def hal_cuda() -> None:
    test_hal_cuda.interface_program()
    test_hal_cuda.fake_library()
    test_hal_cuda.fake_nccl_library()
    test_hal_cuda.comm_program()


def runtime_programs() -> None:
    which = [
        one for one in cudart.programs() if f"test_program_without_kernels[{one.name}" in taken()
    ]
    cudart.build_all(needs.require_nvcc(), which, test_cudart_programs.BUILD, 1)


def images() -> None:
    for form in test_record.FORMS:
        test_record.image(form)
    test_image.program()


# The longest first.
PARTS: dict[str, Callable[[], object]] = {
    "programs of the CUDA runtime": runtime_programs,
    "server with AddressSanitizer": lambda: test_fuzz.build_server("address"),
    "server with ThreadSanitizer": lambda: test_fuzz.build_server("thread"),
    "cores and the software GPU's space": native.cmake,
    "a libcuda.so.1 that notes what it sends": test_support.library,
    "hal/cuda over the fake driver": hal_cuda,
    "a client that knows only the wire": test_server_raw.built,
    "fuzzers": fuzzers,
    "fuzzer of frames": test_fuzz.build_frame_fuzzer,
    "models": models,
    "module images": images,
    "programs of the driver API": programs,
}


def timed(name: str) -> str:
    begin = time.monotonic()
    PARTS[name]()
    return f"{time.monotonic() - begin:6.1f} s  {name}"


def main() -> int:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        wanted = [name for name in PARTS if ONLY_FOR.get(name, "") in taken()]
        for name in set(PARTS) - set(wanted):
            print(f"left out: {name}: this run has no test that needs it", flush=True)
        made = {name: pool.submit(timed, name) for name in wanted}
        failed = 0
        for name, future in made.items():
            try:
                print(future.result(), flush=True)
            except (
                pytest.skip.Exception
            ) as why:  # of a feature that this machine may lack (tests/integration/needs.py)
                print(f"left out: {name}: {why}", flush=True)
            except BaseException as why:  # what pytest.fail raises is no Exception
                failed = 1
                print(f"prebuild: {name}: {why}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
