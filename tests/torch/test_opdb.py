# SPDX-License-Identifier: Apache-2.0
"""torch's own op_db against device='cpu', bit for bit, in every data type; the exceptions are listed with reasons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("scipy", reason="op_db needs scipy")
pytest.importorskip("expecttest", reason="op_db needs expecttest")

from torch.testing._internal import common_methods_invocations

import opdb

HERE = os.path.dirname(os.path.abspath(__file__))
SAMPLES = int(os.environ.get("DEVPROXY_OPDB_SAMPLES", "4"))
CUDA_WHEEL = os.path.exists(os.path.join(torch.__path__[0], "lib", "libtorch_cuda.so"))
LEAST_BITWISE = 0.97  # of the float32 ops that can be compared


def known(part: str) -> dict[str, Any]:
    with open(os.path.join(HERE, "opdb_known.json"), encoding="utf-8") as file:
        listed: dict[str, Any] = json.load(file)[part]
    return listed


def check_guards(outcomes: list[opdb.Outcome]) -> None:
    """What each op did while it ran on 'cuda' is what the rules allow (guards.py) or what the list says."""
    listed = known("guards")
    new = {
        f"{o.name}, {rule}": what
        for o in outcomes
        for rule, what in o.broken.items()
        if o.name not in listed[rule]
    }
    assert not new, f"not in opdb_known.json, 'guards': {json.dumps(new, indent=1)}"
    if SAMPLES >= 4:
        seen = {(o.name, rule) for o in outcomes for rule in o.broken}
        gone = [
            (name, rule) for rule in listed for name in listed[rule] if (name, rule) not in seen
        ]
        assert not gone, f"in opdb_known.json, 'guards', and no longer so; take them out: {gone}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", list(opdb.DTYPES))
def test_ops_equal_the_cpu_bit_for_bit(dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = opdb.sweep(dtype, SAMPLES, guarded=dtype == "float32")
    differ = {o.name: f"{o.kind}: {o.detail}" for o in outcomes if o.kind in ("different", "error")}
    equal = [o.name for o in outcomes if o.kind == "bitwise"]
    listed = known(dtype)
    if CUDA_WHEEL:
        listed |= known("cuda wheel")
    new = {name: why for name, why in differ.items() if name not in listed}
    gone = [
        n
        for n, why in listed.items()
        if n in equal and not why.startswith("sometimes") and SAMPLES >= 4 and not CUDA_WHEEL
    ]
    assert not new, f"ops that differ and are not in opdb_known.json: {json.dumps(new, indent=1)}"
    assert not gone, f"ops in opdb_known.json that have become equal; take them out: {gone}"
    assert len(equal) > 300
    if dtype == "float32":
        assert len(equal) >= LEAST_BITWISE * (len(equal) + len(differ))
        check_guards(outcomes)


def test_ops_that_are_taken_apart_as_for_cuda(tmp_path: Path) -> None:
    """The client as it is where a real GPU is behind the server (DEVPROXY_TORCH_OPS=cuda), over the executor for the host: it
    takes composite ops apart CUDA's way, asks the executor what it chooses, and leaves generators there. What it sends
    must be ops that run; most give the CPU's bits all the same."""
    out = tmp_path / "outcomes.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        os.path.join(HERE, "opdb.py"),
        "--samples",
        "2",
        "--json",
        str(out),
    ]
    env = os.environ | {"DEVPROXY_TORCH_OPS": "cuda", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes: dict[str, list[str]] = json.loads(out.read_text())
    differ = {n: f"{k}: {w}" for n, (k, w) in outcomes.items() if k in ("different", "error")}
    listed = known("cuda client") | (known("cuda wheel") if CUDA_WHEEL else {})
    new = {n: w for n, w in differ.items() if n not in listed}
    assert not new, f"not in opdb_known.json, 'cuda client': {json.dumps(new, indent=1)}"
    assert sum(k == "bitwise" for k, _ in outcomes.values()) > 600


def test_captured_ops_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op captured without a warm-up and replayed: what it does eagerly, or refused as it is on CUDA."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", opdb.without_seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = opdb.sweep("float32", SAMPLES, captured=True)
    equal = {o.name for o in outcomes if o.kind == "bitwise"}
    others = {o.name: f"{o.kind}: {o.detail}" for o in outcomes if o.kind != "bitwise"}
    ignored = ("no cpu result", "not compared")
    listed = known("captured")
    new = {n: w for n, w in others.items() if n not in listed and not w.startswith(ignored)}
    assert not new, f"not in opdb_known.json, 'captured': {json.dumps(new, indent=1)}"
    assert not {n: w for n, w in others.items() if n in listed and not w.startswith("refused")}
    # An earlier test of this process may have run it once.
    always = {n for n, why in listed.items() if "run it once before" not in why}
    gone = sorted(equal & always)
    assert not gone or SAMPLES < 4 or CUDA_WHEEL, f"in 'captured', and equal; take them out: {gone}"
    assert len(equal) > 600 or SAMPLES < 4


def test_an_op_computes_on_the_device_only() -> None:
    """At least one launch for each op of a small program, no copy to the host, no CPU compute kernel in the client."""
    import _devproxy_torch as plugin
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    (x @ x).softmax(1).sum().backward()
    before = sum(launches for launches, _ in plugin.op_counts().values())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        y = (x @ x).softmax(1)
        y.sum().backward()
    torch.cuda.synchronize()
    assert sum(launches for launches, _ in plugin.op_counts().values()) - before >= 5
    names = {e.key for e in seen.key_averages()}
    assert "aten::_local_scalar_dense" not in names
    assert not {"aten::item", "aten::cpu"} & names
    assert y.is_cuda and x.grad is not None and x.grad.is_cuda
