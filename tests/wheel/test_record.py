# SPDX-License-Identifier: Apache-2.0
"""The unmodified CUDA wheel over the recording device: every call is accepted, and a math library is refused by name.

No kernel is executed, so nothing here says that a result is right; see tests/wheel/torch_parts.py --values for a real device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.needs import require_criu

ROOT = Path(__file__).resolve().parents[2]
TORCH_PARTS = ROOT / "tests/wheel/torch_parts.py"
PYTHON = os.environ["DEVPROXY_WHEEL_PYTHON"]
# What the parts of torch_parts.py call of each library first; whatever else is said to be refused is a fault.
REFUSED = {
    "libcublas.so.13: cublasCreate_v2",
    "libcublasLt.so.13: cublasLtMatmulPreferenceCreate",
    "libcudnn.so.9: cudnnCreate",
    "libcufft.so.12: cufftCreate",
    "libcusolver.so.12: cusolverDnCreate",
    "libcusparse.so.12: cusparseCreateCsr",
}


def run(
    env: dict[str, str], *command: str, options: tuple[str, ...] = ("--plain",)
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "devproxy.cli.run", "--device", "record", *options, "--"]
    return subprocess.run(
        [*line, PYTHON, *command], env=env, capture_output=True, text=True, timeout=280, check=False
    )


def parts(done: subprocess.CompletedProcess[str]) -> dict[str, bool]:
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["part"]: row["ok"] for row in rows}


def all_parts() -> set[str]:
    return set(re.findall(r"^@part\ndef (\w+)", TORCH_PARTS.read_text(), re.MULTILINE))


@pytest.fixture(params=["caching", "without the caching allocator"])
def flavour(request: pytest.FixtureRequest) -> dict[str, str]:
    return {} if request.param == "caching" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_every_part_is_accepted(
    job_env: dict[str, str], flavour: dict[str, str], tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    wanted = all_parts()
    if flavour:
        # The one is about the cache, and without it the other allocates while it captures, which CUDA forbids.
        wanted -= {"allocator", "graphs"}
    done = run(
        job_env | flavour | {"DEVPROXY_RECORD": str(record)},
        str(TORCH_PARTS),
        "--only",
        ",".join(sorted(wanted)),
    )
    assert parts(done) == dict.fromkeys(sorted(wanted), True), done.stderr[-6000:]
    assert done.returncode == 0
    assert len(wanted) >= 20
    said = re.findall(r"^devproxy: (\S+: \w+) is refused", done.stderr, re.MULTILINE)
    assert set(said) == REFUSED
    assert len(said) == len(REFUSED)  # once each
    assert not re.search(r"libcuda\S*: \w+ is refused|refused by the device", done.stderr)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    launched = {row["function"] for row in rows if row["op"] == "launch"}
    assert len([row for row in rows if row["op"] == "launch"]) > 500
    assert len(launched) > 90
    assert launched <= {row["function"] for row in rows if row["op"] == "get_function"}


def test_what_inductors_code_does_reaches_the_driver(
    job_env: dict[str, str], tmp_path: Path
) -> None:
    """Its buffer, torch's own static launcher, a kernel of Triton's; with the plugin, as jobs on a GPU have it."""
    record = tmp_path / "record.jsonl"
    done = run(
        job_env | {"DEVPROXY_RECORD": str(record)}, str(ROOT / "tests/wheel/static_launcher.py")
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"loaded": True, "registers": True, "device": "cuda:0"}
    launches = [row for row in map(json.loads, record.read_text().splitlines()) if row["op"] == "launch"]  # fmt: skip
    assert [row["function"] for row in launches].count("fill") == 1, launches


def test_of_nvidias_libraries_only_the_compiler_is_mapped(job_env: dict[str, str]) -> None:
    code = """
import re, torch
torch.zeros(3, device="cuda") + 1
text = open("/proc/self/maps").read()
print(sorted(set(re.findall(r"/nvidia/\\S*/(\\S+)", text))))
print(sorted(set(re.findall(r"/builds/\\w+/(\\S+)", text))))
"""
    done = run(job_env, "-c", code)
    genuine, ours = map(eval, done.stdout.splitlines())
    assert genuine == ["libnvrtc.so.13"], done.stderr
    assert {"libcuda.so.1", "libcudart-13.so", "refused/libcublas.so.13"} <= set(ours)


def test_two_devices_in_namespaces(job_env: dict[str, str]) -> None:
    code = """
import torch
assert torch.cuda.device_count() == 2
x = torch.arange(1000.0)
with torch.cuda.device(1):
    y = x.cuda()
assert y.device.index == 1
z = y.to("cuda:0")
assert torch.equal(z.cpu(), x) and torch.equal(y.cpu(), x)
print(torch.cuda.can_device_access_peer(0, 1))
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
print("end")
"""
    done = run(job_env, "-c", code, options=("--gpus", "2"))
    assert done.stdout.endswith("end\n"), done.stderr


def test_workers_and_children(job_env: dict[str, str], tmp_path: Path) -> None:
    """DataLoader workers are forked before and after the device is in use; a spawned child has one of its own."""
    code = """
import torch, torch.multiprocessing as mp
def child(n):
    assert torch.equal(torch.full((5,), float(n)).cuda().cpu(), torch.full((5,), float(n)))
if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    for _ in range(2):
        seen = [b.cuda().cpu() for (b,) in torch.utils.data.DataLoader(data, 8, num_workers=2, pin_memory=True)]
        assert torch.equal(torch.cat(seen), torch.arange(64.0))
    context = mp.get_context("spawn")
    ps = [context.Process(target=child, args=(n,)) for n in range(2)]
    [p.start() for p in ps]
    [p.join() for p in ps]
    print([p.exitcode for p in ps])
"""
    script = Path(job_env["DEVPROXY_SHM_DIR"]).parent / f"workers-{os.getpid()}.py"
    script.write_text(code.replace("    mp.spawn(child, nprocs=2) if False else None\n", ""))
    try:
        done = run(job_env, str(script))
    finally:
        script.unlink()
    assert done.stdout == "[0, 0]\n", done.stderr


LOOP = """
import os, time, torch
from torch import nn
x, p = torch.arange(100000.0), torch.arange(1000.0).pin_memory()
d, s = x.cuda(), torch.cuda.Stream()
w = nn.Embedding(64, 128).cuda()
o = torch.optim.AdamW(w.parameters())
for n in range(150):
    o.zero_grad()
    w(torch.randint(0, 64, (8,), device="cuda")).sum().backward()
    o.step()
    assert torch.equal(d.cpu(), x)
    with torch.cuda.stream(s):
        q = p.cuda(non_blocking=True)
    s.synchronize()
    assert torch.equal(q.cpu(), p)
    print("step", n, flush=True)
    time.sleep(0.05)
print("done", flush=True)
"""


def test_a_job_is_suspended_and_resumed(job_env: dict[str, str], tmp_path: Path) -> None:
    """Everything ends and comes back: the process by CRIU, the device's memory, streams, modules and pinned window by us."""
    require_criu()
    env = job_env | {
        "DEVPROXY_STATE_DIR": str(tmp_path / "state"),
        "DEVPROXY_KEY_FILE": str(tmp_path / "key"),
    }
    log = tmp_path / "job.log"

    def control(*words: str) -> None:
        line = [sys.executable, "-m", "devproxy.cli.ctl", *words]
        done = subprocess.run(
            line, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr

    def wait_for_step(step: int) -> None:
        deadline = time.monotonic() + 120
        while f"step {step}\n" not in log.read_text():
            assert time.monotonic() < deadline and job.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)

    options = ["--device", "record", "--name", "wheel", "--store", str(tmp_path / "store")]
    with open(log, "wb") as out:
        line = [sys.executable, "-m", "devproxy.cli.run", *options, "--", PYTHON, "-c", LOOP]
        job = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait_for_step(10)
        control("suspend", "wheel")
        at = log.read_text().count("step ")
        time.sleep(1)
        assert log.read_text().count("step ") == at < 150
        control("resume", "wheel")
        assert job.wait(120) == 0, log.read_text()[-3000:]
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(30)
    steps = re.findall(r"^step (\d+)$", log.read_text(), re.MULTILINE)
    assert steps == [str(n) for n in range(150)]
    assert "done\n" in log.read_text()
