# SPDX-License-Identifier: Apache-2.0
"""hal/cuda against a fake driver (tests/native/hal_cuda). It shows that the rules of cuda.h as written there are kept.

It shows nothing about a real GPU: docs/gpu-results.md says what ran on one.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "tests"
TEMPLATE = ROOT / "devproxy" / "hal" / "template" / "template_device.cc"
TEST = ROOT / "tests" / "native" / "hal_cuda" / "hal_cuda_test.cc"
COMM_TEST = TEST.with_name("comm_test.cc")
FAKE = ROOT / "tests" / "native" / "hal_cuda" / "fake_libcuda.cc"
# The fakes' reductions are the software GPU's, compiled as that one's are.
REDUCE = ROOT / "devproxy" / "hal" / "soft" / "comm" / "reduce.cc"
LOG = ROOT / "devproxy" / "csrc" / "base" / "log.cc"
PACKING = ["-Wl,--as-needed", "-llz4", "-lzstd"]  # of fat binaries (hal/image)
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]


def cuda_include() -> Path:
    """Folder of cuda.h: DEVPROXY_CUDA_INCLUDE, else the PyPI package nvidia-cuda-runtime."""
    named = os.environ.get("DEVPROXY_CUDA_INCLUDE")
    spec = importlib.util.find_spec("nvidia")
    places = [Path(named)] if named else []
    places += (
        [Path(p) / "cu13" / "include" for p in (spec.submodule_search_locations or [])]
        if spec
        else []
    )
    for place in places:
        if (place / "cuda.h").exists():
            return place
    pytest.fail("cuda.h is not installed: pip install nvidia-cuda-runtime==13.0.96", pytrace=False)


def compiled(name: str, sources: Sequence[Path], *options: str) -> Path:
    """One object or program in build/tests, made anew when a source or header of hal changed."""
    headers = [
        p
        for d in ("devproxy/hal", "devproxy/csrc/base", "tests/native/hal_cuda")
        for p in (ROOT / d).rglob("*.h")
    ]
    key = hashlib.blake2b(digest_size=8)
    for path in [*sources, *sorted(headers)]:
        key.update(path.read_bytes())
    key.update(" ".join([*FLAGS, *options]).encode())
    out = OUT / f"{name}-{key.hexdigest()}{'.o' if '-c' in options else ''}"
    if not out.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}.part")
        command = ["g++", *FLAGS, f"-I{ROOT}", "-isystem", str(cuda_include()), *options]
        subprocess.run(
            [*command, "-o", str(part), *map(str, sources), "-pthread", "-ldl", *PACKING],
            check=True,
        )
        part.rename(out)
    return out


LAYERS = ("cuda", "host_module", "image", "links", "splice")


@functools.cache
def archives() -> list[Path]:
    """hal/cuda and what it needs, as the build makes them for the server; made anew when something of them changed."""
    built = ROOT / "build" / "cmake"
    with open(
        built / ".tests.lock", "w"
    ) as lock:  # two test processes, and ninja has no lock of its own
        fcntl.flock(lock, fcntl.LOCK_EX)
        build = ["cmake", "--build", str(built), "--target", *(f"dp_hal_{name}" for name in LAYERS)]
        done = subprocess.run(build, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-4000:]
    hal = built / "devproxy" / "hal"
    return [hal / name / f"libdp_hal_{name}.a" for name in LAYERS]


def fake_library() -> Path:
    return compiled("fake_libcuda.so", [FAKE, REDUCE], "-shared", "-ffp-contract=off")


def fake_nccl_library() -> Path:
    source = FAKE.parent / "fake_libnccl.cc"
    return compiled("fake_libnccl.so", [source, REDUCE], "-shared", "-ffp-contract=off")


def fake_gpus(root: Path, gpus: int = 1) -> dict[str, str]:
    """The environment for `--device cuda` over the fake driver and the fake NCCL. root: an empty folder, in which devproxy
    sees NVIDIA devices, and the fake as their driver."""
    fake = fake_library()
    devices = [root / "dev" / f"nvidia{gpu}" for gpu in range(gpus)]
    for path in (*devices, root / str(fake).lstrip("/")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    env = {"DEVPROXY_SYSROOT": str(root), "DEVPROXY_CUDA_DRIVER": str(fake)}
    if gpus > 1:
        env |= {"FAKE_GPUS": str(gpus), "DEVPROXY_NCCL": str(fake_nccl_library())}
    return env


def interface_program() -> Path:
    return compiled("hal_cuda_test", [TEST, LOG, *archives()])


def comm_program() -> Path:
    return compiled("comm_test", [COMM_TEST, LOG, *archives()])


@pytest.fixture(scope="module")
def fake_driver() -> Path:
    return fake_library()


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libraries' folder with the executor of tests/native/hal_cuda."""
    folder = tmp_path_factory.mktemp("executors")
    (folder / "fake").mkdir()
    made = compiled("fake_executor.so", [FAKE.parent / "fake_executor.cc"], "-shared")
    (folder / "fake" / "executor.so").symlink_to(made)
    return folder


@pytest.fixture(scope="module")
def program() -> Path:
    return interface_program()


def why_not(program: Path, driver: str) -> str:
    """The one-line error for this driver library."""
    run = subprocess.run([program, "--open", driver], capture_output=True, text=True, timeout=60)
    return run.stdout


@pytest.mark.parametrize("mode", ["", "events", "register", "events register chaos"])
def test_whole_interface(program: Path, fake_driver: Path, executors: Path, mode: str) -> None:
    """mode: how completion is seen, whether pinned memory is registered, delays between operations."""
    run = subprocess.run(
        [program, fake_driver, *mode.split()],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "EXECUTORS": str(executors)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    tests = re.findall(r'^    \{"[^"]+", test_', TEST.read_text(), re.M)
    assert len(tests) >= 17
    assert run.stdout.count("PASS ") == len(tests)


@pytest.mark.parametrize("mode", ["", "events", "chaos", "events chaos"])
def test_communicators(fake_driver: Path, executors: Path, mode: str) -> None:
    """What goes on while NCCL is busy with a group, and what does not."""
    run = subprocess.run(
        [comm_program(), fake_driver, fake_nccl_library(), *mode.split()],
        capture_output=True, text=True, timeout=120, env={**os.environ, "EXECUTORS": str(executors)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    tests = re.findall(r'^    \{"[^"]+", test_', COMM_TEST.read_text(), re.M)
    assert len(tests) >= 15
    assert run.stdout.count("PASS ") == len(tests)


def test_our_own_shim_is_refused(program: Path) -> None:
    source = OUT / "mark.cc"
    OUT.mkdir(parents=True, exist_ok=True)
    source.write_text(
        'extern "C" { __attribute__((visibility("default"))) char devproxy_abi_id[32]; }\n'
    )
    shim = compiled("shim.so", [source], "-shared")
    assert "devproxy's own libcuda.so.1" in why_not(program, str(shim))


def test_missing_symbols_are_named(program: Path) -> None:
    source = OUT / "old.cc"
    OUT.mkdir(parents=True, exist_ok=True)
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int cuInit(unsigned) { return 0; }\n'
    )
    text = why_not(program, str(compiled("old.so", [source], "-shared")))
    assert "cuFuncGetParamInfo" in text and "cuMemcpy2DAsync_v2" in text and "too old" in text
    assert "cuInit" not in text


def test_what_a_driver_may_lack_is_no_reason_to_refuse_it(program: Path) -> None:
    """A call that is optional (driver_table.h) is missed when it is used, not at the start."""
    optional = re.search(
        r"#define DP_CUDA_OPTIONAL_CALLS\(X\)((?:.*\\\n)*.*)",
        (ROOT / "devproxy/hal/cuda/driver_table.h").read_text(),
    )
    assert optional
    names = re.findall(r"X\((cu\w+)\)", optional[1])
    assert "cuLaunchKernelEx" in names
    source = OUT / "old.cc"
    text = why_not(program, str(compiled("old.so", [source], "-shared")))
    assert not [name for name in names if re.search(rf"\b{name}\b", text)]


def test_driver_that_is_not_there(program: Path) -> None:
    assert "cannot be opened" in why_not(program, "/nonexistent/libcuda.so.1")
    assert "absolute path" in why_not(program, "libcuda.so.1")


def test_fake_has_exactly_the_table(fake_driver: Path) -> None:
    """A call that is added to driver_table.h has to be added to the fake, and what is unused goes."""
    names = subprocess.run(
        ["nm", "-D", "--defined-only", fake_driver], capture_output=True, text=True, check=True
    )
    exported = {
        line.split()[-1] for line in names.stdout.splitlines() if re.search(r" T cu[A-Z]", line)
    }
    header = (ROOT / "devproxy/hal/cuda/driver_table.h").read_text()
    plain = set(re.findall(r"X\((cu\w+)\)", header)) | set(re.findall(r'X\(\w+, "(cu\w+)"', header))
    assert {re.sub(r"_v\d$", "", n) for n in exported} == {re.sub(r"_v\d$", "", n) for n in plain}


def test_no_driver_call_outside_the_table() -> None:
    """hal/cuda links no libcuda: an undefined cu* symbol would be a call beside the table."""
    archive = archives()[0]
    listed = subprocess.run(["nm", "-u", archive], capture_output=True, text=True, check=True)
    symbols = re.findall(r"^ +U (\w+)$", listed.stdout, re.M)
    assert "dlopen" in symbols  # it is the list
    assert [name for name in symbols if re.match(r"cu[A-Z]", name)] == []


def test_no_function_of_a_device_has_a_body() -> None:
    """A body in hal.h or space.h would be the answer of a device that wraps another and has forgotten the function."""
    hal = ROOT / "devproxy" / "hal"
    parts = re.findall(r'#include "devproxy/hal/(\w+\.h)"', (hal / "space.h").read_text())
    found, at = 0, []
    for header in ("hal.h", "space.h", *parts):
        for text in re.findall(r"\bvirtual ([^;{]*[;{])", (hal / header).read_text()):
            found += 1
            if not re.search(r"= 0;$", text) and not text.startswith("~"):
                at.append(f"{header}: {text}")
    assert found > 60
    assert at == []


def test_template_compiles() -> None:
    compiled("template_device", [TEMPLATE], "-c")
