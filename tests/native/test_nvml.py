# SPDX-License-Identifier: Apache-2.0
"""Health and topology: the judgement over facts, and the reading of them over a library that tests/native/nvml makes up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from devproxy.hal import nvml

ROOT = Path(__file__).resolve().parents[2]


def test_a_healthy_gpu_has_no_problem_and_neither_has_one_that_tells_nothing() -> None:
    assert nvml.problems(nvml.Gpu(0)) == []
    well = nvml.Gpu(
        0, temperature_c=60, slowdown_at_c=89, slowed=0x1 | 0x4, ecc_uncorrected=0, mig=False,
        compute_mode="default", fabric_state=nvml.FABRIC_COMPLETED, fabric_error=0, links_up=18, links_down=0,
    )  # fmt: skip
    assert nvml.problems(well) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"lost": "GPU is lost"}, "does not answer (GPU is lost)"),
        ({"mig": True}, "partitioned (MIG)"),
        ({"compute_mode": "exclusive process"}, "compute mode is exclusive process"),
        ({"compute_mode": "prohibited"}, "nvidia-smi -c 0"),
        ({"fabric_state": nvml.FABRIC_IN_PROGRESS}, "fabric is not ready"),
        ({"fabric_state": nvml.FABRIC_COMPLETED, "fabric_error": 1}, "fabric failed (status 1)"),
        ({"remap_failed": True}, "replace it"),
        ({"remap_pending": True}, "--gpu-reset"),
        ({"retire_pending": True}, "--gpu-reset"),
        ({"ecc_uncorrected": 2}, "2 uncorrected memory errors"),
        ({"temperature_c": 90, "slowdown_at_c": 89}, "it is at 90 C"),
        ({"slowed": 0x88}, "hardware slowdown, power brake"),
        ({"links_up": 16, "links_down": 2}, "2 of 18 NVLinks are down"),
    ],
)
def test_each_problem_says_what_and_what_to_do(facts: dict[str, object], words: str) -> None:
    found = nvml.problems(nvml.Gpu(3, **facts))  # type: ignore[arg-type]
    assert len(found) == 1
    assert words in found[0]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the made-up libnvidia-ml.so.1."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler on this machine", pytrace=False)
    folder = tmp_path_factory.mktemp("nvml")
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{nvml.SONAME}"]
    source = str(ROOT / "tests/native/nvml/fake_nvml.c")
    subprocess.run([compiler, *options, source, "-o", str(folder / nvml.SONAME)], check=True)
    return folder


def read(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [sys.executable, "-c", "import json\nfrom devproxy.hal import nvml\n" + code],
        env=clean | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("by", ["name", "driver"])
def test_everything_is_read_and_the_session_ends(fake: Path, by: str) -> None:
    """The library is found by its name, or beside the driver that the user named."""
    argument = repr(str(fake / "libcuda.so.1")) if by == "driver" else ""
    code = f"""
m = nvml.read({argument})
import ctypes
print(json.dumps(m.as_json()), ctypes.CDLL(nvml.SONAME).fake_users())
"""
    done = read(code, **({"LD_LIBRARY_PATH": str(fake)} if by == "name" else {}))
    assert done.stderr == ""
    text, _, users = done.stdout.strip().rpartition(" ")
    assert users == "0"
    found = json.loads(text)
    assert (found["driver"], found["cuda"]) == ("580.65.06", "13.2")
    well, ill, gone = found["gpus"]
    assert well["problems"] == []
    assert (well["name"], well["bus"], well["memory_used_bytes"]) == (
        "NVIDIA H100 80GB HBM3",
        "00000000:10:00.0",
        1 << 30,
    )
    assert (well["processes"], well["retire_pending"], well["numa_node"]) == (0, None, None)
    assert (well["links_up"], well["links_down"], ill["links_down"]) == (4, 0, 1)
    said = "\n".join(ill["problems"])
    for words in ("MIG", "exclusive process", "fabric failed", "replace it", "--gpu-reset", "7 uncorrected",
                  "95 C", "hardware slowdown, thermal slowdown", "1 of 4 NVLinks"):  # fmt: skip
        assert words in said
    assert gone["lost"] and "GPU is lost" in gone["problems"][0]
    assert found["topology"] == {"0-1": "numa"}
    assert found["nvlink"] == {"0-1": 2}


def test_without_the_library_or_the_package_it_is_refused_by_name(tmp_path: Path) -> None:
    code = "from devproxy.errors import Refused\ntry:\n    nvml.read()\nexcept Refused as e:\n    print(e)"
    assert "libnvidia-ml.so.1 cannot be used" in read(code).stdout
    (tmp_path / "pynvml.py").write_text("raise ImportError\n")
    assert "no package nvidia-ml-py" in read(code, PYTHONPATH=f"{tmp_path}:{ROOT}").stdout


def test_doctor_has_a_line_for_each_gpu(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    code = "from devproxy.cli import doctor\nfor f in doctor._nvidia(): print(f.mark(), f.what, f.found, f.remedy, sep='|')"
    done = read(code, LD_LIBRARY_PATH=str(fake), DEVPROXY_SYSROOT=str(tmp_path))
    assert done.stderr == ""
    _, well, ill, gone, paths = done.stdout.splitlines()
    assert (
        well == "ok|GPU 0|NVIDIA H100 80GB HBM3, 00000000:10:00.0, 40 C, 1.0 GiB of 80.0 GiB used|"
    )
    assert ill.startswith("later|GPU 1|") and "MIG" in ill
    assert gone.startswith("later|GPU 2|GPU|it does not answer")
    assert paths == "ok|paths between the GPUs|0-1 numa, 0-1 2 NVLinks|"


def test_whose_numbers_cuda_has() -> None:
    gpus = [nvml.Gpu(n, name="H100", uuid=f"GPU-{n}{n}-x") for n in range(3)]
    assert nvml.seen_by_cuda(gpus, {}) == gpus
    assert nvml.seen_by_cuda(gpus, {"CUDA_VISIBLE_DEVICES": "2, GPU-00"}) == [gpus[2], gpus[0]]
    assert nvml.seen_by_cuda(gpus, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == [gpus[1]]
    assert nvml.seen_by_cuda(gpus, {"CUDA_VISIBLE_DEVICES": ""}) == []
    mixed = [*gpus, nvml.Gpu(3, name="A10")]
    assert nvml.seen_by_cuda(mixed, {}) is None  # the fastest first: which that is, only CUDA knows
    assert nvml.seen_by_cuda(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == mixed


@pytest.mark.parametrize(
    ("gpus", "env", "words"),
    [
        ("0", {}, ""),
        ("1", {}, "GPU 1 (NVIDIA H100 80GB HBM3, 00000000:11:00.0) cannot be used: it is partitioned (MIG)"),
        ("0,1", {}, "nvidia-smi -mig 0, or choose another GPU: --gpu"),
        ("2", {}, "does not answer (GPU is lost)"),
        ("0", {"FAKE_NVML_MODE": "2"}, "its compute mode is prohibited: nvidia-smi -c 0, or choose"),
        ("0", {"FAKE_NVML_MODE": "3"}, ""),  # one process may use it, and a server is one
        ("0", {"CUDA_VISIBLE_DEVICES": "1"}, "GPU 0 (NVIDIA H100 80GB HBM3, 00000000:11:00.0)"),
    ],
)  # fmt: skip
def test_devproxy_run_refuses_a_gpu_that_nobody_can_use(
    fake: Path, tmp_path: Path, gpus: str, env: dict[str, str], words: str
) -> None:
    """Before anything is started; what is no reason to refuse goes on to the driver, which here is none."""
    driver = tmp_path / "libcuda.so.1"
    for path in (tmp_path / "dev/nvidia0", tmp_path / str(driver).lstrip("/"), driver):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    where = {
        "DEVPROXY_SYSROOT": str(tmp_path),
        "DEVPROXY_CUDA_DRIVER": str(driver),
        "LD_LIBRARY_PATH": str(fake),
    }
    code = f"""
from devproxy.errors import Refused
from devproxy.proxy import preflight
try:
    print(preflight.choose_device("cuda", [{gpus}]))
except Refused as e:
    print("refused", e)
"""
    done = read(code, **where, **env)
    assert done.stderr == ""
    assert done.stdout.startswith("refused" if words else "('cuda'"), done.stdout
    assert words in done.stdout
    if words:
        run = "from devproxy.cli import run; run.main()"
        line = [sys.executable, "-c", run, "--device", "cuda", "--gpu", gpus, "--", "true"]
        whole = subprocess.run(
            line, env=os.environ | where | env, cwd=ROOT, capture_output=True, text=True
        )
        assert whole.returncode == 2
        assert words in whole.stderr
