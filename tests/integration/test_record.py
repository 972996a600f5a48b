# SPDX-License-Identifier: Apache-2.0
"""The recording GPU (--device record): genuine images, every call in the record, no kernel executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.needs import require_nvcc
from tests.integration.test_programs import compile_c, cuda_include, newer

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests" / "record"
LIB = ROOT / "build" / "lib"
KERNELS = ROOT / "tests" / "subjects" / "gpu" / "kernels.cu"
# form -> nvcc's options
FORMS = {
    "cubin": ["-cubin", "-arch=sm_90"],
    "ptx": ["-ptx", "-arch=compute_75"],
    "fatbin": [
        "-fatbin",
        "-compress-mode=size",
        *("-gencode", "arch=compute_80,code=[sm_80,compute_80]"),
        *("-gencode", "arch=compute_90a,code=sm_90a"),
        *("-gencode", "arch=compute_90,code=sm_90"),
    ],
}
TAKEN = {"cubin": "sm_90", "ptx": "compute_75", "fatbin": "sm_90a"}
REQUIRED = 'extern "C" __global__ void __block_size__((64, 2, 1)) required() {}\n'


def image(form: str, source: Path = KERNELS) -> Path:
    """The kernels in that form, made anew when their source has changed."""
    nvcc = require_nvcc()
    out = BUILD / f"{source.stem}-{form}"
    if not newer(out, source):
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = out.with_name(f"{out.name}.{os.getpid()}")
        command = [nvcc, "-O2", *FORMS[form], "-o", str(fresh), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        fresh.rename(out)
    return out


def calls() -> Path:
    """tests/record/calls.c, linked to the shim."""
    out, source = BUILD / "calls", ROOT / "tests" / "record" / "calls.c"
    if not newer(out, source, ROOT / "tests" / "subjects" / "driver" / "program.h"):
        compile_c(
            out, "-I", cuda_include(), source, "-L", LIB, "-l:libcuda.so.1", "-pthread",
            "-Wl,--allow-shlib-undefined",
        )  # fmt: skip
    return out


def run(
    env: dict[str, str], *command: str, options: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "devproxy.cli.run", "--device", "record"),
            *("--gpu-memory", "256MiB", *options, "--", *command),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=env | more,
        errors="replace",
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("form", FORMS)
def test_every_launch_is_seen(form: str, job_env: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "record"
    done = run(job_env, str(calls()), TEST_KERNELS=str(image(form)), DEVPROXY_RECORD=str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS calls"
    assert "executes no kernel, so every result is meaningless" in done.stderr
    lines = read(record)
    assert lines[0]["op"] == "start" and lines[0]["arch"] == "sm_90"
    assert lines[-1]["op"] == "stop"
    launches = [line for line in lines if line["op"] == "launch"]
    assert [
        (k["function"], k["stream"], k["grid"], k["block"], k["shared"], k["params"])
        for k in launches
    ] == [
        ("fill", 0, [1, 1, 1], [1, 1, 1], 0, 24),
        ("shape", launches[1]["stream"], [7, 6, 5], [4, 3, 2], 512, 8),
        ("mixed", 0, [1, 1, 1], [1, 1, 1], 0, 40),
        ("sum_struct", launches[1]["stream"], [1, 1, 1], [1, 1, 1], 0, 32764),
        ("shape", launches[1]["stream"], [1, 1, 1], [256, 1, 1], 231424, 8),
    ]
    assert launches[1]["stream"] != 0
    assert not [line for line in launches if "refused" in line]
    (module,) = [line for line in lines if line["op"] == "load_module"]
    assert module["taken"] == TAKEN[form] and module["bytes"] >= image(form).stat().st_size
    assert {"fill", "shape", "train_update"} <= set(module["kernels"])
    assert {(g["name"], g["bytes"], g.get("constant", False)) for g in module["globals"]} >= {
        ("table", 16, False),
        ("zeroes", 4096, False),
        ("settings", 16, True),
    }
    ops = {line["op"] for line in lines}
    assert ops >= {
        *("alloc", "create_queue", "copy", "memset", "host_function", "create_event"),
        *("record", "wait", "get_function", "get_global", "set_attribute"),
    }


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("params", "kernel 'fill': its parameter block has 200 bytes, the image says 24"),
        ("required", "kernel 'required': dimension 0 of its block is 32, the kernel requires 64"),
    ],
)
def test_a_wrong_launch_is_an_execution_fault(
    how: str, why: str, job_env: dict[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text(KERNELS.read_text() + REQUIRED)
    cubin = tmp_path / "kernels.cubin"
    subprocess.run([require_nvcc(), "-cubin", "-arch=sm_90", "-o", cubin, source], check=True)
    record = tmp_path / "record"
    done = run(job_env, str(calls()), how, TEST_KERNELS=str(cubin), DEVPROXY_RECORD=str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS calls"
    lines = read(record)
    (launch,) = [line for line in lines if line["op"] == "launch"]
    assert launch["refused"] in why
    (fault,) = [line for line in lines if line["op"] == "fault"]
    assert fault["result"] == 719 and fault["text"].endswith(why)


def test_wrong_images_are_refused_by_name(job_env: dict[str, str], tmp_path: Path) -> None:
    """And the job goes on: a library tries one image after the other."""
    source = tmp_path / "old.cu"
    source.write_text('extern "C" __global__ void k() {}\n')
    for arch, words in (("sm_80", "-cubin"), ("compute_100", "-ptx")):
        subprocess.run(
            [require_nvcc(), words, f"-arch={arch}", "-o", tmp_path / arch, source], check=True
        )
    (tmp_path / "cut").write_bytes(image("cubin").read_bytes()[:-100])
    script = (
        "import ctypes, sys\n"
        "cu = ctypes.CDLL('libcuda.so.1')\n"
        "ctx, mod = ctypes.c_void_p(), ctypes.c_void_p()\n"
        "cu.cuInit(0); cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0); cu.cuCtxSetCurrent(ctx)\n"
        "print([cu.cuModuleLoad(ctypes.byref(mod), p.encode()) for p in sys.argv[1:]])\n"
    )
    record = tmp_path / "record"
    images = [str(tmp_path / "sm_80"), str(tmp_path / "compute_100"), str(tmp_path / "cut")]
    images += [str(source), str(image("cubin"))]
    done = run(job_env, sys.executable, "-c", script, *images, DEVPROXY_RECORD=str(record))
    assert done.stdout.strip() == "[209, 209, 200, 200, 0]", done.stdout + done.stderr
    loads = [line for line in read(record) if line["op"] == "load_module"]
    assert loads[0]["refused"] == "the cubin is for sm_80; this device is sm_90"
    assert loads[1]["refused"] == "the PTX is for sm_100; this device is sm_90"
    assert "shorter than it says" in loads[2]["refused"]
    assert loads[3]["refused"].startswith("the PTX text is damaged")
    assert "module" in loads[4]


def test_each_gpu_has_its_record(job_env: dict[str, str], tmp_path: Path) -> None:
    done = run(
        job_env,
        str(calls()),
        options=("--gpus", "2"),
        TEST_KERNELS=str(image("cubin")),
        DEVPROXY_RECORD=str(tmp_path / "record"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line["op"] == "launch" for line in read(tmp_path / "record.gpu0"))
    assert [line["op"] for line in read(tmp_path / "record.gpu1")] == ["start"]


def test_a_record_that_cannot_be_written_is_refused(
    job_env: dict[str, str], tmp_path: Path
) -> None:
    done = run(job_env, "true", DEVPROXY_RECORD=str(tmp_path / "no" / "record"))
    assert done.returncode == 2
    assert "DEVPROXY_RECORD: opening" in done.stderr and "No such file" in done.stderr


def test_torch_is_left_alone(job_env: dict[str, str]) -> None:
    """The software GPU's plugin is for the software GPU: here the CUDA wheel shall meet the driver shim itself."""
    script = "import sys; print('devproxy_torch.boot' in sys.modules, [p for p in sys.path if 'pylib' in p])"
    done = run(job_env, sys.executable, "-c", script)
    assert done.stdout.strip() == "False []", done.stdout + done.stderr
