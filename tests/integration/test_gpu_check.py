# SPDX-License-Identifier: Apache-2.0
"""The machinery of scripts/gpu_check.py, over the fake driver of tests/native/hal_cuda: limits, results, order, names; and the
bodies of its stages, from a bundle alone, over the recording device on both sides.

What the fake or that device cannot do is failed or refused by name there, and that is right. Nothing here says anything
about a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from devproxy import layout
from tests.integration.needs import require_criu, require_nvcc
from tests.integration.test_programs import build_program
from tests.living import matching
from tests.native.test_hal_cuda import fake_library

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
sys.path.insert(0, str(SCRIPT.parent))

import gpu_bundle  # noqa: E402
from gpucheck import campaign as campaigns  # noqa: E402
from gpucheck import torch_compare as compare  # noqa: E402
from gpucheck.checkpoints import servers_say  # noqa: E402
from gpucheck.stage import ORDER, Stage  # noqa: E402
from gpucheck.stages import STAGES  # noqa: E402
from gpucheck.stages.modules import LAYOUTS  # noqa: E402
from gpucheck.stages.programs import REGISTERED  # noqa: E402


@pytest.fixture(scope="module")
def fake() -> Path:
    return fake_library()


# In the place of tests/cudart's programs: how each ends, natively and where our libraries are preloaded.
PROXIED = 'case "$LD_PRELOAD" in *libcuda.so.1*) '
STAND_INS = {
    "passes": "echo ok passes",
    "is_refused": f"{PROXIED}echo 'devproxy: cudaX is refused: because (cudaErrorNotSupported)' >&2; exit 1;; esac; echo ok is_refused",
    "differs": f"{PROXIED}echo other numbers >&2; exit 1;; esac; echo ok differs",
    "is_absent": "echo not here: libnvrtc.so.13; exit 3",
    "fails": "echo no device >&2; exit 1",
    "mlp": 'case "$*" in *ballast*) exit 1;; esac; echo median step 10.5 us; echo x digest "$(echo "$@" | md5sum | cut -c1-8)"',
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As gpu_bundle.py makes it, of this checkout's own files; the kernels are in the fake's language."""
    made = tmp_path_factory.mktemp("bundle")
    (made / "lib").symlink_to(ROOT / "build" / "lib")
    (made / "py").mkdir()
    (made / "py" / "devproxy").symlink_to(ROOT / "devproxy")
    (made / "programs").mkdir()
    suite = [
        ["memset", [], []],
        ["pointers", [], []],
        ["mapped", [], []],
        ["lost", ["ask"], ["--plain"]],
    ]
    for name in ("memset", "pointers", "mapped", "lost"):
        (made / "programs" / name).symlink_to(build_program(name)[0])
    torch_programs = [ROOT / "tests/torch" / name for name in ("opdb.py", "mix.py")]
    for source in [
        *(ROOT / "tests/subjects/gpu").glob("*.py"),
        *(ROOT / "tests/subjects").glob("[cg]*.py"),
        *torch_programs,
    ]:
        (made / "programs" / source.name).symlink_to(source)
    (made / "programs" / "comm").mkdir()
    for name in gpu_bundle.COMM_PROGRAMS:
        (made / "programs" / "comm" / name).symlink_to(ROOT / "tests/comm" / name)
    (made / "programs" / "cudart").mkdir()
    for name, text in STAND_INS.items():
        (made / "programs" / "cudart" / name).write_text(f"#!/bin/sh\n{text}\n")
        (made / "programs" / "cudart" / name).chmod(0o755)
    (made / "kernels").mkdir()
    slots = {n: " ".join(f"{o}:{s}" for o, s in p) for n, p in LAYOUTS.items()}
    text = "".join(f"kernel {name} {params}\n" for name, params in slots.items())
    text += "kernel slow 0:8\nglobal table 16\nglobal zeroes 4096\n"
    for form in ("cubin", "ptx"):
        (made / "kernels" / f"kernels.{form}").write_text(text)
    files = {
        f"kernels/kernels.{form}": {"sha256": hashlib.sha256(text.encode()).hexdigest()}
        for form in ("cubin", "ptx")
    }
    facts = {"files": files, "python": "none", "programs": suite, "commit": "none"}
    facts["cudart"] = [[name, []] for name in STAND_INS]
    facts["driver_symbols"] = gpu_bundle.driver_symbols()
    (made / "manifest.json").write_text(json.dumps(facts))
    return made


def as_root(tmp_path: Path, fake: Path) -> Path:
    """A folder where devproxy sees an NVIDIA device, and the fake as its driver."""
    for path in (tmp_path / "root/dev/nvidia0", tmp_path / "root" / str(fake).lstrip("/")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "root"


def check(
    bundle: Path,
    out: Path,
    *options: str,
    script: Path = SCRIPT,
    limit_s: float = 280,
    cwd: Path | None = None,
) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, results by stage, the log."""
    line = [
        sys.executable,
        str(script),
        "--bundle",
        str(bundle),
        "--out",
        str(out),
        "--small",
        *options,
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    results = json.loads((out / "gpu-check.json").read_text())["stages"]
    return done.returncode, {r["name"]: r for r in results}, (out / "gpu-check.log").read_text()


def test_dry_run(bundle: Path, fake: Path, tmp_path: Path) -> None:
    """Every stage on the fake. The address stages pass; what a fake cannot do is named; the proxied half works."""
    root = as_root(tmp_path, fake)
    names = [stage.name for stage in STAGES]
    dry = [n for n in names if n != "e_dump" and "e_dump" not in needs_of(n)]
    out = tmp_path / "out"
    options = ["--driver", str(fake), "--sysroot", str(root), "--only", ",".join(dry)]
    code, results, log = check(bundle, out, *options)
    assert code == 1
    assert list(results) == names
    status = {name: result["status"] for name, result in results.items()}
    for name in ("prepare", "machine", "driver", "a_ranges", "a_vmm_cost", "a_alias"):
        assert status[name] == "ok", results[name]
    assert status["e_dump"] == "not_run"
    assert "not asked for" in results["e_dump"]["text"]
    assert results["a_ranges"]["figures"]["slots_as_wished"] == layout.MAX_SLOTS
    assert "the driver has no cuLibraryLoadData" in results["b_layouts"]["text"]
    assert status["b_layouts"] == "refused"
    # Through the proxy the fake is a driver like another; natively it has not the calls that programs make.
    first = results["c_first"]["figures"]
    assert first["native"]["code"] != 0
    assert first["plain"]["code"] == 0, log
    assert "Fake GPU" in first["plain"]["said"]
    assert results["c_programs"]["figures"]["memset"]["plain"] == "pass", log
    assert results["c_programs"]["figures"]["lost ask"] == {"plain": "pass"}
    # Without registered memory it would not get as far as its kernel, which in the fake knows device memory alone.
    for way in ("plain", "namespaces"):
        mapped = results["c_programs"]["figures"]["mapped"][way]
        assert "cuCtxSynchronize() = 700 (CUDA_ERROR_ILLEGAL_ADDRESS)" in mapped, log
    assert results["c_programs"]["figures"]["passed"]["native"] == 0
    assert "nothing was compared" in results["c_programs"]["text"]
    runs = results["c_cudart"]["figures"]
    assert runs["passes"] == {"native": "pass", "proxied": "pass"}, log
    assert runs["is_refused"] == {"native": "pass", "proxied": "refused: cudaX is refused: because"}
    assert runs["is_absent"]["proxied"] == "not here: libnvrtc.so.13"
    assert runs["counted"] == {
        "of": 5, "native": 3, "proxied": {"pass": 1, "refused": 1, "not here": 1},
    }  # fmt: skip
    assert results["c_cudart"]["text"].endswith("nor are refused by name: differs")
    training = results["c_training"]["figures"]
    assert training["cudart launch_bound"]["ratio"] == {"plain": 1.0, "namespaces": 1.0}, log
    assert len({str(digests) for digests in training["cudart usual"]["digests"].values()}) == 1
    assert len(set(training["cudart two_at_once"].values())) == 1
    assert "driver, launch_bound, native" in results["c_training"]["text"]
    for name in ("c_triton", "c_torch", "c_numba_tests", "c_training_numba", "c_nvml"):
        assert status[name] == "refused", results[name]
    for name in [n for n in names if n.startswith("t_")]:
        assert results[name]["text"] == "no Python with PyTorch and CUDA is here", results[name]
    for name, result in results.items():
        assert result["status"] in ("ok", "failed", "refused", "not_run")
        assert result["text"] or result["status"] == "ok", name


def test_without_a_driver(bundle: Path, tmp_path: Path) -> None:
    options = ["--driver", "/nonexistent/libcuda.so.1", "--only", "driver,a_ranges,b_order,e_dump"]
    code, results, _ = check(bundle, tmp_path, *options)
    assert code == 1
    for name in ("driver", "a_ranges", "b_order", "e_dump"):
        assert results[name]["status"] == "refused"
        assert "no libcuda.so.1 here" in results[name]["text"]


FAT_BINARY = """
import ctypes, struct
cuda = ctypes.CDLL("libcuda.so.1")
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
text = b"kernel far_behind_the_first_nul 0:8\\n\\0"
image = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(text)) + text
assert cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"far_behind_the_first_nul") == 0
"""


def test_a_bare_fat_binary_goes_through_whole(fake: Path, tmp_path: Path) -> None:
    """cuModuleLoadData is given no length, and a fat binary has zeros in its header."""
    done = subprocess.run(
        [sys.executable, "-m", "devproxy.cli.run", "--device", "cuda", "--plain", "--",
         sys.executable, "-c", FAT_BINARY],
        env=os.environ | {"DEVPROXY_SYSROOT": str(as_root(tmp_path, fake)), "DEVPROXY_CUDA_DRIVER": str(fake)},
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- stages that go wrong ---------------------------------------------------------------------------------------------

FIGURE = """
import json, os, signal, subprocess, sys, time
def say(status="", **figures):
    open(sys.argv[1], "w").write(json.dumps({"status": status, "figures": figures, "text": ""}))
"""
GOOD_LIMITS = (1.0, 0.5)  # of a stage: at most, at least
BODIES = {
    "good": "say('ok', n=1)",
    "hangs": "say(n=2); signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15]); time.sleep(600)",
    "crashes": "say(n=3); os.kill(os.getpid(), signal.SIGSEGV)",
    "leaves": "subprocess.Popen(['sleep', '601'], start_new_session=True); say('ok', n=4)",
    "lies": "say('ok', n=5); sys.exit(7)",
    "silent": "pass",
    "refuses": "say('refused'); sys.exit(3)",
    "last": "say('ok', n=6)",
}


def campaign(
    tmp_path: Path,
    bodies: dict[str, str],
    limit_s: float = 60,
    limits: dict[str, tuple[float, float]] | None = None,
) -> list[dict[str, Any]]:
    """In a process of its own, since the campaign ends whatever is below its process."""
    stages = {name: (limits or {}).get(name, GOOD_LIMITS) for name in bodies}
    program = (
        "import json, pathlib, sys\n"
        f"sys.path[:0] = [{str(SCRIPT.parent)!r}, {str(ROOT)!r}]\n"
        "from gpucheck.campaign import campaign\n"
        "from gpucheck.stage import Stage\n"
        "from devproxy.proxy.command import become_subreaper\n"
        "become_subreaper()\n"
        f"bodies, figure = {bodies!r}, {FIGURE!r}\n"
        "out = pathlib.Path(sys.argv[1])\n"
        f"stages = [Stage(n, *limits) for n, limits in {stages!r}.items()]\n"
        "command = lambda s, r: [sys.executable, '-c', figure + bodies[s.name], str(r)]\n"
        f"campaign(stages, command, out, out, {{'about': 1}}, {limit_s})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["about"] == 1
    results: list[dict[str, Any]] = found["stages"]
    missed = [r["name"] for r in results if "it needs" in r["text"] or "later stages" in r["text"]]
    assert found["next"].rpartition(" ")[2].split(",") == (missed or [""])
    return results


def running(*words: str) -> bool:
    want = "\0".join(words).encode()
    found = False
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found = found or want in path.read_bytes()
        except OSError:
            pass
    return found


def test_each_stage_reports_whatever_the_others_do(tmp_path: Path) -> None:
    begin = time.monotonic()
    results = {r["name"]: r for r in campaign(tmp_path, BODIES)}
    assert list(results) == list(BODIES)
    assert {n: r["status"] for n, r in results.items()} == {
        "good": "ok", "hangs": "failed", "crashes": "failed", "leaves": "ok", "lies": "failed",
        "silent": "failed", "refuses": "refused", "last": "ok",
    }  # fmt: skip
    assert results["hangs"]["figures"] == {"n": 2}  # what was known before
    assert "no end after 1 s; killed" in results["hangs"]["text"]
    assert results["crashes"]["figures"] == {"n": 3}
    assert "SIGSEGV" in results["crashes"]["text"]
    assert "exit code 7" in results["lies"]["text"]
    assert "no result" in results["silent"]["text"]
    assert not running("sleep", "601")
    assert time.monotonic() - begin < 120  # and not the 601 of the one that hangs
    log = (tmp_path / "gpu-check.log").read_text()
    assert "-- failed   hangs" in log
    assert "-- ok       last" in log


def test_stages_that_no_time_is_left_for(tmp_path: Path) -> None:
    bodies = {"hangs": BODIES["hangs"], "late": BODIES["good"]}
    first, late = campaign(tmp_path, bodies, limit_s=1.2, limits={"late": (5.0, 5.0)})
    assert first["status"] == "failed"
    assert late["status"] == "not_run"
    assert "s are left, and it needs" in late["text"]


def test_a_hanging_stage_leaves_the_last_one_its_time(tmp_path: Path) -> None:
    """Its own limit would take all that there is; and what was cut short is asked for again."""
    bodies = {"hangs": BODIES["hangs"], "last": BODIES["last"]}
    limits = {"hangs": (600.0, 0.5), "last": (30.0, 25.0)}
    hangs, last = campaign(tmp_path, bodies, limit_s=27 + campaigns.ENDING_S, limits=limits)
    assert hangs["status"] == "failed"
    assert hangs["figures"] == {"n": 2}
    assert "no end after 2 s (of its 600: later stages need the rest); killed" in hangs["text"]
    assert last["status"] == "ok"


def test_what_a_stage_may_take() -> None:
    early, late = Stage("early", 100, 5), Stage("late", 50, 20)
    spare = Stage("spare", 50, 40, call=2)
    everything, none, ending = [late, spare], frozenset[str](), campaigns.ENDING_S
    assert campaigns.limit_of(early, everything, 300, none) == 100
    assert (
        campaigns.limit_of(early, everything, 60 + ending, none) == 40
    )  # a spare one gets nothing
    assert campaigns.limit_of(early, everything, 22, none) == 5  # never less than it needs itself
    asked = frozenset({"early", "spare"})
    assert (
        campaigns.limit_of(early, everything, 60 + ending, asked) == 20
    )  # unless it was asked for


# -- the stages ------------------------------------------------------------------------------------------------------


def test_the_limits_fit_the_device_tool() -> None:
    """Three calls are enough: each stage gets its least in one of them, and some time is over."""
    total = campaigns.TOTAL_LIMIT_S
    assert total < 540
    assert all(s.least_s <= s.limit_s for s in STAGES)
    for call in (1, 2, 3):
        mine = [s for s in STAGES if s.call == call]
        brought = {"prepare", *(n for s in mine for n in s.needs)}
        asked = [s for s in STAGES if s in mine or s.name in brought]
        assert sum(s.least_s for s in asked) < 0.85 * total, call


def needs_of(name: str) -> tuple[str, ...]:
    needs: tuple[str, ...] = next(s for s in STAGES if s.name == name).needs
    return needs


def test_the_order_of_the_stages() -> None:
    """First what decides most, and what that stands on; each stage behind those whose figures it reads."""
    names = [s.name for s in STAGES]
    assert names == list(ORDER)
    assert names[:7] == [
        "prepare",
        "machine",
        "driver",
        "a_ranges",
        "c_first",
        "t_first",
        "t_models",
    ]
    calls = [s.call for s in STAGES]
    assert calls == sorted(calls)
    for number, name in enumerate(names):
        assert set(needs_of(name)) <= set(names[:number]), name
    first = {s.name for s in STAGES if s.name[:2] in ("a_", "b_", "e_", "t_")}
    first -= {"t_ops", "t_tune", "t_ranks", "t_share"}
    assert all(s.call == 1 for s in STAGES if s.name in first)


def test_a_folder_that_goes_while_the_servers_logs_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job's staging does, between the listing that names it and the look into it."""
    staging = tmp_path / "devproxy-0" / "j" / "staging"
    staging.mkdir(parents=True)
    (tmp_path / "devproxy-0" / "j" / "gpu0.log").write_text(
        "I device: dumped: bytes=5 us=7000000\n"
    )
    look = os.scandir

    def goes(path: Any = ".") -> Any:
        if path in (staging, str(staging)):
            staging.rmdir()
        return look(path)

    monkeypatch.setattr(os, "scandir", goes)
    setup = types.SimpleNamespace(shm=lambda: tmp_path)
    assert servers_say(setup, "dumped") == (5, 7.0)
    assert not staging.exists()
    staging.mkdir()
    assert [path.name for path in matching(tmp_path, "**/*.log")] == ["gpu0.log"]
    assert not staging.exists()


def test_the_real_kernels_have_the_suites_entry_points() -> None:
    """tests/subjects/gpu/kernels.cu against tests/subjects/driver/kernels.c, by their texts: no compiler of CUDA's is needed."""
    import re

    soft = (ROOT / "tests/subjects/driver/kernels.c").read_text()
    wanted = set(re.findall(r'^    \{"(\w+)",', soft, re.M)) - {"table", "zeroes", "sum_extra"}
    real = (ROOT / "tests/subjects/gpu/kernels.cu").read_text()
    there = set(re.findall(r"^ENTRY (?:__launch_bounds__\(\d+\) )?(\w+)\(", real, re.M))
    assert wanted - there == set()
    assert {"fill", "saxpy", "sum_struct", "mixed"} <= wanted


def test_the_bundle_is_whole_and_its_stages_run(tmp_path: Path) -> None:
    """What travels, made once: its manifest, its size, and the stages' bodies from it alone, over the recording device."""
    require_nvcc()
    require_criu()
    bundle = tmp_path / "bundle"
    made = gpu_bundle.build(bundle, {"wheels", "torch"})
    is_what_its_manifest_says(bundle, made)
    # Wheels come from elsewhere: what they may take is a limit of its own, kept when they are put in.
    assert made["bytes"] + gpu_bundle.MOST_BYTES["wheels"] < gpu_bundle.LIMIT_BYTES
    # Where the command is given there is a checkout, which is not to be taken for the bundle's Python side.
    decoy = tmp_path / "checkout"
    (decoy / "devproxy").mkdir(parents=True)
    (decoy / "devproxy" / "__init__.py").write_text("raise RuntimeError('of the checkout')\n")
    stages = (
        "driver,b_layouts,b_modules,b_order,b_faults,e_host_memory,e_dump,c_nvml,c_registered,d_cost,"
        "f_checkpoint_cudart"
    )
    _, results, log = check(
        bundle, tmp_path / "out", "--rehearse", "record", "--only", stages,
        script=bundle / "gpu_check.py", cwd=decoy,
    )  # fmt: skip
    assert json.loads((tmp_path / "out" / "gpu-check.json").read_text())["rehearsal"]
    named = {"b_order": "cuStreamWriteValue64_v2"}
    for name in ["prepare", *stages.split(",")]:
        assert results[name]["status"] == ("refused" if name in named else "ok"), f"{name}\n{log}"
        assert named.get(name, "") in results[name]["text"]
    registered = results["c_registered"]["figures"]
    assert registered["copies"] == {"native": "pass", "proxied": "pass"}
    assert {name for name, _ in made["cudart"]} >= set(REGISTERED)
    medians = results["d_cost"]["figures"]["medians"]
    assert set(medians["launch_async_us"]["ratio"]) == {"proxied", "namespaces", "registered"}
    assert medians["h2d_pinned_1MiB_GBps"]["native"] > 0
    assert "cudart_launch_async_us" in medians
    saved = results["f_checkpoint_cudart"]["figures"]
    assert saved["digest_after_restore"] == saved["native"]["digest"]
    for way in ("dump", "load"):
        assert saved[way]["bytes"] >= 16 << 20
        assert {"GBps", "of_pcie", "target_met"} <= set(saved[way])


def is_what_its_manifest_says(bundle: Path, made: dict[str, Any]) -> None:
    there: Sequence[Path] = [p for p in bundle.rglob("*") if p.is_file() and not p.is_symlink()]
    assert {str(p.relative_to(bundle)) for p in there} == set(made["files"]) | {"manifest.json"}
    assert made["files"]["lib/devproxy-server"]["bytes"] < 8_000_000  # without debug information
    assert "libstdc++.so.6" in made["needs"]["lib/devproxy-server"]["libraries"]
    assert made["needs"]["lib/devproxy-init"]["libraries"] == []  # static
    assert "cuMemcpyHtoDAsync_v2" in made["driver_symbols"]
    assert "cuCtxCreate_v2" in made["driver_symbols"]
    assert "cuLinkCreate_v2" in made["optional_driver_symbols"]
    assert not set(made["driver_symbols"]) & set(made["optional_driver_symbols"])
    assert ["assert", ["text"]] in made["cudart"]
    assert {"mlp", "cost"} <= {name for name, _ in made["cudart"]}
    for library in ("libcuda.so.1", "libcudart.so.13", "refused/libcublas.so.13"):
        assert f"lib/{library}" in made["files"]


def test_a_bundle_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "LIMIT_BYTES", 1_000_000)
    files = {"sys/large": {"bytes": 900_000}, "py/small": {"bytes": 200_000}}
    with pytest.raises(gpu_bundle.Refused, match=r"more than 1 MB; largest: sys/large 0.9 MB"):
        gpu_bundle.check_size(1_100_000, files)
    with pytest.raises(gpu_bundle.Refused, match=r"wheels in the bundle have 40.0 MB, more than"):
        gpu_bundle.check_part("wheels", 40_000_000)


def test_a_machines_own_folder_is_not_in_the_plugin() -> None:
    place = b"/home/somebody/venv/lib/python3.12/site-packages/torch/lib"
    for behind in (b"", b":$ORIGIN"):
        library = b"\x7fELF\0libc10.so\0" + place + behind + b"\0_ZN3c10\0"
        changed = gpu_bundle.without_our_folders(library)
        assert len(changed) == len(library)
        assert b"somebody" not in changed
        assert b"\0libc10.so\0$ORIGIN\0" in changed
        assert changed.endswith(b"\0_ZN3c10\0")
    assert gpu_bundle.without_our_folders(b"\0$ORIGIN\0") == b"\0$ORIGIN\0"


# -- torch's programs on two sides ------------------------------------------------------------------------------------

# As tests/subjects/gpu/torch_cases.py writes its lines, without torch.
CASES = """
import json, os, signal, sys, time
path, after = sys.argv[sys.argv.index("--json") + 1], ""
if "--after" in sys.argv:
    after = sys.argv[sys.argv.index("--after") + 1]
def say(**facts):
    open(path, "a").write(json.dumps(facts) + "\\n")
names = ["good", "dies", "spoils", "last"]
say(plan=names)
for name in names[names.index(after) + 1 if after else 0:]:
    say(begin=name)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    say(case=name, result=name, **({"sticky": "a fault"} if name == "spoils" else {}))
    if name == "spoils":
        sys.exit(17)
say(end="all")
"""


def test_a_side_goes_on_behind_a_case_that_ends_its_process(tmp_path: Path) -> None:
    def side(name: str, program: str) -> Any:
        line = [sys.executable, "-c", program]
        return compare.Side(name, line, dict(os.environ), tmp_path / name, tmp_path / f"{name}.log")

    one = side("one", CASES)
    one.run(30)
    done = one.read()
    assert list(done) == one.plan() == ["good", "dies", "spoils", "last"]
    assert done["dies"]["died"] == "the process ended with signal SIGSEGV"
    assert done["spoils"]["sticky"] == "a fault"
    assert one.trouble == ["dies: the process ended with signal SIGSEGV"]
    broken = side("broken", "raise SystemExit('no torch here')")
    broken.run(30)
    assert broken.trouble == ["exit code 1 before any case: no torch here"]


def test_verdicts() -> None:
    def op(digest: str = "d", form: str = "float32[2] cuda", **more: Any) -> dict[str, Any]:
        return {"samples": [{"in": "i", "out": [[digest, form, [1], "1.5"]]} | more]}

    raises = {"samples": [{"in": "i", "error": "RuntimeError: no"}]}
    expected = (
        (op(), op(), "bitwise", ""),
        (op(), op("e"), "different", "sample 0: out 0: other bits; float32[2] cuda, sum 1.5"),
        (op(), op(form="float16[2] cuda"), "different", "sample 0: out 0: float16[2] cuda"),
        (op(unsteady=True), op("e"), "not deterministic natively", "sample 0: out 0: other bits"),
        (op(), raises, "error in the proxy", "sample 0: RuntimeError: no"),
        (raises, raises, "raises alike", "RuntimeError: no"),
        (raises, op(), "different", "sample 0: natively RuntimeError: no"),
        (op(), op() | {"sticky": "a fault"}, "error in the proxy", "a fault"),
        (op(), {"died": "it hung"}, "error in the proxy", "it hung"),
        ({"died": "it hung"}, op(), "no native result", "it hung"),
        ({"no_samples": "no scipy"}, op(), "no samples", "no scipy"),
        (op(), None, "not reached", ""),
    )
    for native, proxied, kind, why in expected:
        found = compare.compare_op(native, proxied)
        assert found[0] == kind, (native, proxied, found)
        assert found[1].startswith(why)
    names = {str(n): compare.compare_op(a, b) for n, (a, b, _, _) in enumerate(expected)}
    table = compare.Table(names)
    assert table.fraction() == round(2 / 8, 5)
    verdict = compare.compare_result(
        {"same": {"losses": ["1", "2"], "end": "x"}}, {"same": {"losses": ["1", "3"], "end": "y"}}, "same"
    )  # fmt: skip
    assert verdict == ("different", 'losses[1]: "3", natively "2"')


def graphs_are_equal(figures: dict[str, Any]) -> None:
    assert figures["counts"]["bitwise"] >= 3


def ranks_are_equal(figures: dict[str, Any]) -> None:
    assert figures["counts"] == {"bitwise": 4}


def ranks_share(shared: dict[str, Any]) -> None:
    assert shared["collectives"]["comparisons"] > 700
    assert len(shared["scenarios"]["each_s"]) > 20
    assert shared["links"]["passed"]
    want = shared["reference"]["digest"]
    assert shared["ddp"]["digest"] == shared["digest_after_restore"] == want
    assert shared["spliced"]["equal"] and shared["spliced"]["counts"]["squashed"] > 0


@pytest.fixture
def whole_bundle(bundle: Path, tmp_path: Path) -> Path:
    """With CRIU. For the stages of PyTorch."""
    plugins = [p.name for p in (ROOT / "build" / "lib").glob("torch-*/libdevproxy_torch.so")]
    if not plugins or importlib.util.find_spec("torch") is None:
        pytest.fail("no torch plugin is built: make build", pytrace=False)
    require_criu()
    whole = tmp_path / "bundle"
    whole.mkdir()
    for part in (*bundle.iterdir(), ROOT / "build" / "criu"):
        (whole / part.name).symlink_to(part)
    return whole


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("stage", "right"),
    [("t_graphs", graphs_are_equal), ("t_ranks", ranks_are_equal), ("t_share", ranks_share)],
    ids=["t_graphs", "t_ranks", "t_share"],
)
def test_torch_stage_over_the_software_gpu(
    whole_bundle: Path, tmp_path: Path, stage: str, right: Callable[[dict[str, Any]], None]
) -> None:
    """Both sides through the proxy: equal compares equal."""
    code, results, log = check(whole_bundle, tmp_path, "--rehearse", "soft", "--only", stage)
    assert code == 0 and results[stage]["status"] == "ok", log
    right(results[stage]["figures"])


def test_torch_ops_over_the_software_gpu(whole_bundle: Path, tmp_path: Path) -> None:
    """An op that has other numbers on one side is named."""
    ops = "float32/addmm,float32/sort,int64/add,float32/nn.functional.dropout"
    options = ["--rehearse", "soft", "--ops", ops, "--spoil", "addmm"]
    code, results, log = check(whole_bundle, tmp_path, *options)
    assert code == 1
    sweep = results["t_ops"]
    assert sweep["status"] == "failed", log
    assert sweep["figures"]["ops"]["counts"] == {"bitwise": 3, "different": 1}, log
    assert sweep["text"].startswith("1 of 4 are not bitwise as natively: float32/addmm: sample 0")
    assert list(json.loads((tmp_path / "torch-ops.json").read_text())) == ["float32/addmm"]
