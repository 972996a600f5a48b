# SPDX-License-Identifier: Apache-2.0
"""Programs of the driver API and of the CUDA runtime, natively and through the proxy."""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from gpucheck.ends import Failed, Refused
from gpucheck.report import Report
from gpucheck.running import Done, Way, refusal_in
from gpucheck.setup import Setup, cannot_register
from gpucheck.stage import stage

FIRST = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1")
assert cu.cuInit(0) == 0
d, c, m = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
name = ctypes.create_string_buffer(200)
assert cu.cuDeviceGet(ctypes.byref(d), 0) == 0
assert cu.cuDeviceGetName(name, 200, d) == 0
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(c), d) == 0
assert cu.cuCtxSetCurrent(c) == 0
r = cu.cuMemAlloc_v2(ctypes.byref(m), ctypes.c_size_t(1 << 20))
assert r == 0, r
r = cu.cuMemsetD32_v2(m, ctypes.c_uint32(0xABCD), ctypes.c_size_t(1 << 18))
assert r == 0, r
back = (ctypes.c_uint32 * 4)()
r = cu.cuMemcpyDtoH_v2(back, ctypes.c_uint64(m.value + (1 << 20) - 16), ctypes.c_size_t(16))
assert r == 0, r
assert list(back) == [0xABCD] * 4, list(back)
print("FIRST", name.value.decode(), hex(m.value), getattr(cu, "devproxy_abi_id", None) is not None)
"""


@stage(60, 5)
def c_first(setup: Setup, report: Report) -> None:
    """The first words through the proxy: a context, a buffer, a fill, a copy back. Natively, plain, in namespaces."""
    ways = {
        "native": setup.native(),
        "plain": setup.proxied("--plain"),
        "namespaces": setup.proxied(),
    }
    for name, way in ways.items():
        done = way.run([sys.executable, "-c", FIRST], 25)
        report.put(name, {"code": done.code, "seconds": done.seconds, "said": done.out.strip()[-300:] or done.brief()})  # fmt: skip
        if done.code:
            report.say(f"{name}: {done.err.strip()[-1500:]}")
    bad = [name for name in ways if report.figures[name]["code"]]
    if bad:
        raise Failed(f"did not work: {', '.join(bad)}")


# What devproxy's NVML must say as NVIDIA's does. The rest it says otherwise on purpose, or by another count: it is shown.
NVML_SAME = ("count", "index", "name", "uuid", "bus", "capability", "by_uuid", "by_bus")


@stage(40, 6, call=2)
def c_nvml(setup: Setup, report: Report) -> None:
    """What devproxy's NVML answers in a job, against NVIDIA's."""
    line = [sys.executable, str(setup.bundle / "programs" / "nvml_program.py")]
    said = {}
    for name, way in (("native", setup.native()), ("proxied", setup.proxied("--plain"))):
        done = way.run(line, 20)
        if name == "native" and done.code == 3:
            raise Refused(f"NVIDIA's NVML is not here: {done.brief()}")
        if done.code:
            raise Failed(f"{name}: {done.code}: {done.brief()}")
        said[name] = json.loads(done.out.splitlines()[-1])
    differ = {
        key: {name: answers.get(key) for name, answers in said.items()}
        for key in sorted({*said["native"], *said["proxied"]})
        if said["native"].get(key) != said["proxied"].get(key)
    }
    report.put("native", said["native"])
    report.put("differ", differ)
    if wrong := [key for key in NVML_SAME if key in differ]:
        raise Failed(f"not as NVIDIA's NVML says it: {', '.join(wrong)}")


# Programs of the suite whose kernels see host memory.
MAPS = ("managed", "mapped", "pinned")


@stage(150, 40, call=3, needs=("e_host_memory",))
def c_programs(setup: Setup, report: Report) -> None:
    """The driver-API suite: whatever passes natively must pass through the proxy, plain and in namespaces."""
    programs = [[*p, "cubin"] for p in setup.manifest["programs"] if "third_party" not in p[0]]
    # Images come in other forms too: the same programs, where there are such.
    for form in ("ptx", "fatbin"):
        if setup.kernels(form).exists():
            several = [
                p for p in setup.manifest["programs"] if p[0] in ("module", "ctypes_driver.py")
            ]
            programs += [[*p, form] for p in several]
    differ: list[str] = []
    unregistered = cannot_register(setup)

    def command(name: str, arguments: list[str]) -> list[str]:
        path = str(setup.bundle / "programs" / name)
        return [*([sys.executable] if name.endswith(".py") else []), path, *arguments]

    def one(program: list[Any]) -> None:
        name, arguments, options, form = program
        line = command(name, arguments)
        passed = {}
        needs_proxy = name == "lost"  # it kills its server
        ways = {} if needs_proxy else {"native": setup.native()}
        maps, others = (
            name in MAPS and "refused" not in arguments,
            [o for o in options if o != "--plain"],
        )
        ways["plain"] = setup.proxied("--plain", *others, registered=maps)
        if "--plain" not in options:
            ways["namespaces"] = setup.proxied(*options, registered=maps)
        codes: dict[str, Any] = {}
        for title, way in ways.items():
            done = way.run(line, 20, TEST_KERNELS=str(setup.kernels(form)))
            good = 3 if needs_proxy else 0
            passed[title] = done.code == good and "PASS " in done.out
            codes[title] = "pass" if passed[title] else f"{done.code}: {done.brief()}"
        title = " ".join([name, *arguments, *([form] if form != "cubin" else [])])
        report.put(title, codes)
        if not passed.pop("native", True) or all(passed.values()):
            return
        if maps and unregistered:
            report.put(title, codes | {"refused": unregistered})
        else:
            differ.append(title)

    alone = [
        p for p in programs if p[0] == "out_of_memory"
    ]  # it counts the bytes of the whole device
    with concurrent.futures.ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, [p for p in programs if p not in alone]))
    for program in alone:
        one(program)
    counts = {
        way: sum(1 for codes in report.figures.values() if codes.get(way) == "pass")
        for way in ("native", "plain", "namespaces")
    }
    lone = [t for t, codes in report.figures.items() if codes.get("native", "pass") != "pass"]
    report.put("passed", counts | {"of": len(programs)})
    report.put("not compared, since they do not pass natively", lone)
    if differ:
        raise Failed("must pass through the proxy, and do not: " + ", ".join(differ))
    if not counts["native"]:
        raise Failed("no program passes natively: nothing was compared")


# What a program finds under these names: a file of ours through the proxy, NVIDIA's natively.
WHICH = """
import ctypes
for name in ("libcuda.so.1", "libcudart.so.13"):
    ctypes.CDLL(name)
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line}))
"""


@stage(110, 25, call=2)
def c_cudart(setup: Setup, report: Report) -> None:
    """Programs of the CUDA runtime: whatever passes natively passes through the proxy, or is refused by name."""
    ways = {"native": setup.native(), "proxied": setup.proxied("--plain")}
    for name, way in ways.items():
        done = way.run([sys.executable, "-c", WHICH], 30)
        report.put(f"libraries, {name}", done.out.split() if done.code == 0 else done.brief())
    # These have stages of their own: d_cost, c_training.
    compare_cudart(setup, report, ways["proxied"], lambda name: name not in ("cost", "mlp"))


# What kernels see of the host's memory, and what copies it, in streams and in graphs.
REGISTERED = (
    "mapped",
    "managed",
    "copies",
    "copies_2d",
    "streams",
    "callbacks",
    "graphs",
    "capture",
)


@stage(60, 12, call=2, needs=("e_host_memory",))
def c_registered(setup: Setup, report: Report) -> None:
    """Programs of the CUDA runtime whose pinned memory is registered with the driver: mapped, managed, copies, streams, graphs."""
    if why := cannot_register(setup):
        raise Refused(why)
    compare_cudart(setup, report, setup.proxied("--plain", registered=True), lambda name: name in REGISTERED)  # fmt: skip


def compare_cudart(
    setup: Setup, report: Report, proxied: Way, wanted: Callable[[str], bool]
) -> None:
    folder = setup.bundle / "programs" / "cudart"
    if not folder.exists():
        raise Refused("the programs are not in the bundle (made without nvcc)")
    ways = {"native": setup.native(), "proxied": proxied}
    runs = [r for r in setup.manifest["cudart"] if wanted(r[0])]
    differ, counts = [], {"pass": 0, "refused": 0, "not here": 0}
    # What a program's last line is when it is right; the second where the device executes no kernel.
    good = ("ok {}", "ok {} (without kernels)") if setup.rehearse else ("ok {}",)

    def verdict(name: str, done: Done) -> str:
        if done.code == 0 and done.out.splitlines()[-1:] in [[line.format(name)] for line in good]:
            return "pass"
        if done.code == 3 and "not here: " in done.out:
            return done.out.strip().splitlines()[-1]
        return f"{done.code}: {done.brief()}"

    def one(program: list[Any]) -> None:
        name, arguments = program
        line, said = [str(folder / name), *arguments], {}
        for title, way in ways.items():
            done = way.run(line, 25)
            said[title] = verdict(name, done)
            if title == "proxied" and said[title] != "pass" and (refused := refusal_in(done.err)):
                said[title] = f"refused: {refused}"
        report.put(" ".join([name, *arguments]), said)
        with report.lock:
            for word in counts:
                counts[word] += said["proxied"].startswith(word)
            if said["native"] == "pass" and not said["proxied"].startswith(("pass", "refused")):
                differ.append(" ".join([name, *arguments]))

    with concurrent.futures.ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, runs))
    native = sum(1 for v in report.figures.values() if isinstance(v, dict) and v.get("native") == "pass")  # fmt: skip
    report.put("counted", {"of": len(runs), "native": native, "proxied": counts})
    if differ:
        raise Failed("pass natively, and neither pass nor are refused by name: " + ", ".join(differ))  # fmt: skip
    if not native:
        raise Failed("no program passes natively: nothing was compared")
