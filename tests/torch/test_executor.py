# SPDX-License-Identifier: Apache-2.0
"""What PyTorch keeps as state of the process and the executor must have too: settings, and generators that live there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F


def both(f: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert callable(f)
    return f("cpu"), f("cuda").cpu()


def test_settings_that_choose_a_kernel_are_in_force_where_the_op_runs() -> None:
    """With oneDNN switched off the CPU takes another convolution, of other bits."""
    x, w = torch.randn(2, 16, 32, 32), torch.randn(24, 16, 3, 3)

    def convolution(device: str) -> torch.Tensor:
        return F.conv2d(x.to(device), w.to(device), padding=1)

    with_it, device_with = both(convolution)
    with torch.backends.mkldnn.flags(enabled=False):
        without, device_without = both(convolution)
    assert torch.equal(with_it, device_with)
    assert torch.equal(without, device_without)
    assert not torch.equal(with_it, without), "this CPU's kernels agree: the test shows nothing"
    assert torch.equal(convolution("cuda").cpu(), with_it)  # and back


def test_settings_travel_in_order_on_several_streams() -> None:
    x, w = torch.randn(2, 16, 32, 32), torch.randn(24, 16, 3, 3)
    wanted = {}
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled):
            wanted[enabled] = F.conv2d(x, w)
    dx, dw = x.cuda(), w.cuda()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for i in range(12):
        enabled = i % 3 != 0
        with torch.backends.mkldnn.flags(enabled=enabled), torch.cuda.stream(streams[i % 3]):
            found = F.conv2d(dx, dw)
        torch.cuda.synchronize()
        assert torch.equal(found.cpu(), wanted[enabled])


def test_settings_of_many_kinds_are_taken() -> None:
    """Each of them is sent when it changes, and an op afterwards runs; the value stays what was set."""
    before = torch.backends.cuda.preferred_linalg_library()
    x = torch.randn(4, 4, device="cuda")
    saved = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert (x @ x).isfinite().all()
            assert torch.get_float32_matmul_precision() == precision
        for flag in (True, False):
            # torch.testing, which other tests here import, takes cuDNN's flags by this way alone.
            with torch.backends.cudnn.flags(True, benchmark=flag, deterministic=flag):
                torch.backends.cuda.enable_flash_sdp(flag)
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = flag
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = flag
                assert (x + 1).isfinite().all()
    finally:
        torch.set_float32_matmul_precision(saved)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    assert torch.backends.cuda.preferred_linalg_library() == before


def test_settings_are_the_processs_for_all_its_threads() -> None:
    x, w = torch.randn(2, 16, 32, 32), torch.randn(24, 16, 3, 3)
    dx, dw = x.cuda(), w.cuda()
    F.conv2d(dx, dw)
    with torch.backends.mkldnn.flags(enabled=False):
        wanted = F.conv2d(x, w)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(F.conv2d(dx, dw).cpu()))
        thread.start()
        thread.join()
    assert torch.equal(found[0], wanted)


# In a process of its own: whether generators live in the executor is decided once. They are CPU generators there, which
# go on from draw to draw as natively, so a plain CPU run is the reference.
KEPT = """
import torch
import torch.nn.functional as F

def draws(device, generator, clone):
    out = []
    ones = torch.ones(50, device=device)
    for i in range(3):
        out.append(torch.rand(7, device=device))
        out.append(torch.randn(9, device=device, generator=generator))
        out.append(F.dropout(ones, 0.5) if device == "cpu" else F.dropout(ones, 0.5))
        out.append(torch.randperm(11, device=device, generator=generator))
        out.append(torch.empty(5, device=device).uniform_(generator=clone))
        out.append(torch.multinomial(ones.softmax(0), 4))
    return [t.cpu() for t in out]

def run(device):
    torch.manual_seed(5)
    own = torch.Generator(device).manual_seed(6)
    torch.rand(3, generator=own, device=device)
    clone = own.clone_state() if hasattr(own, "clone_state") else own
    first = draws(device, own, clone)
    torch.manual_seed(5)
    own.manual_seed(6)
    torch.rand(3, generator=own, device=device)
    clone = own.clone_state() if hasattr(own, "clone_state") else own
    again = draws(device, own, clone)
    assert all(torch.equal(a, b) for a, b in zip(first, again)), device
    return first

wanted, found = run("cpu"), run("cuda")
for i, (a, b) in enumerate(zip(wanted, found)):
    assert torch.equal(a, b), (i, a, b)

# The first call of an op with new shapes is tried before it runs, and that draws nothing.
torch.manual_seed(1)
a = torch.rand(13, 3, device="cuda"), torch.rand(13, 3, device="cuda")
torch.manual_seed(1)
b = torch.rand(13, 3, device="cuda"), torch.rand(13, 3, device="cuda")
assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and not torch.equal(a[0], a[1])

assert torch.cuda.initial_seed() == 1 and torch.Generator("cuda").manual_seed(77).initial_seed() == 77

# In a graph: each replay goes on where the generator is, as eager ops do.
g = torch.cuda.CUDAGraph()
x = torch.zeros(6, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    x.uniform_()
torch.cuda.synchronize()
with torch.cuda.graph(g):
    x.uniform_()
torch.manual_seed(9)
replayed = []
for _ in range(3):
    g.replay()
    replayed.append(x.cpu().clone())
torch.manual_seed(9)
eager = [torch.empty(6, device="cuda").uniform_().cpu() for _ in range(3)]
assert all(torch.equal(a, b) for a, b in zip(replayed, eager)), (replayed, eager)

other = torch.Generator("cuda")
g = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(g):
        x.uniform_(generator=other)
    raise SystemExit("an unregistered generator was taken into a graph")
except RuntimeError as error:
    assert "not registered" in str(error), error
print("all as on the CPU")
"""


def test_generators_that_live_in_the_executor_draw_as_native_ones() -> None:
    env = os.environ | {"DEVPROXY_TORCH_GENERATORS": "kept", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KEPT], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all as on the CPU" in done.stdout


@pytest.mark.parametrize(
    "text", ["devproxy executor 1\nbuild wrong\nhost torch/none.so\n", "devproxy executor 9\n"]
)
def test_a_description_that_fits_nothing_is_an_error(text: str) -> None:
    import ctypes

    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    module = ctypes.c_void_p()
    assert cuda.cuModuleLoadData(ctypes.byref(module), text.encode()) == 200  # INVALID_IMAGE
    assert torch.ones(3, device="cuda").sum().item() == 3  # and nothing else suffers
