# SPDX-License-Identifier: Apache-2.0
"""Long campaigns: seeded, resumable, results in docs/soak.json.

    python scripts/soak.py [--only NAME] [--runs N] [--fresh]

Each campaign is a number of independent runs; run number n is fully given by its seed. What has been done is kept in
build/soak/<name>.json, so an interrupted campaign goes on where it was. Where that file is not there, it goes on where
docs/soak.json says it was: a campaign of days is the sum of several calls, on several machines and commits (`commits` says how
many runs of each). A run that fails is recorded with its seed and its last words, and the campaign goes on; the exit code
is 1 when a run of this call failed.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import datetime
import importlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "soak"
RESULT = ROOT / "docs" / "soak.json"
LIB = ROOT / "build" / "lib"
INCLUDES = [f"-I{ROOT}", f"-I{ROOT}/build/gen/wire"]
RUN = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft"]

# Allocates, fills, copies and frees until it is killed; every byte that comes back is checked.
BUSY = """
import ctypes, os, random
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)
call("cuInit", 0)
contexts = [ctypes.c_void_p() for _ in range(int(os.environ["DEVPROXY_GPUS"]))]
for gpu, context in enumerate(contexts):
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
print("up", flush=True)
size = 1 << 20
back = ctypes.create_string_buffer(size)
while True:
    call("cuCtxSetCurrent", random.choice(contexts))
    memory = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    value = random.randrange(256)
    call("cuMemsetD8_v2", memory, ctypes.c_ubyte(value), ctypes.c_size_t(size))
    call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(size))
    assert back.raw == bytes([value]) * size, "wrong bytes"
    call("cuMemFree_v2", memory)
"""


@dataclass(frozen=True)
class Campaign:
    """runs independent runs of run(seed), which returns figures to add up; raises AssertionError when it failed."""

    name: str
    what: str
    runs: int
    run: Callable[[int], dict[str, int]]


def binary(source: str, name: str, *flags: str) -> Path:
    """Compiles tests/<source> unless it is newer than every header it may use."""
    out = ROOT / "build" / "tests" / f"soak-{name}"
    inputs = [
        ROOT / "tests" / source,
        *(ROOT / "devproxy/csrc").rglob("*.h"),
        *(ROOT / "build/gen/wire").glob("*.h"),
        *(Path(flag) for flag in flags if flag.endswith(".cc")),
    ]
    if not out.exists() or any(p.stat().st_mtime > out.stat().st_mtime for p in inputs):
        out.parent.mkdir(parents=True, exist_ok=True)
        line = ["g++", "-std=c++20", "-O2", "-g", *INCLUDES, *flags, str(ROOT / "tests" / source)]
        subprocess.run([*line, "-o", str(out), "-pthread"], check=True)
    return out


def checked(
    line: list[str | Path], env: dict[str, str] | None = None, timeout_s: float = 3600
) -> str:
    done = subprocess.run(
        [str(word) for word in line],
        env=os.environ | (env or {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        errors="replace",
    )
    assert done.returncode == 0, (done.returncode, (done.stdout + done.stderr)[-2000:])
    return done.stdout


def processes_with(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in text and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


def kill_cycle(seed: int) -> dict[str, int]:
    """Starts a busy job, kills one of the three with -9 at a random moment, and looks what is left."""
    dice = random.Random(seed)
    victim = dice.choice(["job", "devproxy-run", "server"])
    shm = Path(tempfile.mkdtemp(prefix="devproxy-soak-", dir="/dev/shm"))
    env = os.environ | {
        "DEVPROXY_SHM_DIR": str(shm),
        "PYTHONPATH": str(ROOT),
        "DEVPROXY_LIB": str(LIB),
    }
    job = subprocess.Popen(
        [*RUN, "--gpus", str(dice.choice([1, 2])), "--", sys.executable, "-c", BUSY],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        if dice.random() < 0.75:
            assert job.stdout is not None
            assert job.stdout.readline() == b"up\n", "the job did not come up"
        time.sleep(dice.random() * 0.5)
        pids = {"devproxy-run": [job.pid], "job": [], "server": []}
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for child in children:
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"devproxy-server\0" in line:
                pids["server"].append(int(child))
            elif b"cuInit" in line:
                pids["job"].append(int(child))
        target = dice.choice(pids[victim]) if pids[victim] else job.pid
        os.kill(target, signal.SIGKILL)
        job.communicate(timeout=30)
        expected = {job.pid: {-9}, **{pid: {137} for pid in pids["job"]}}.get(target, {1, 3})
        assert job.returncode in expected, f"killed {victim}: exit code {job.returncode}"
        deadline = time.monotonic() + 10
        while list(shm.iterdir()) or processes_with(str(shm)):
            assert time.monotonic() < deadline, (
                f"killed {victim}: left {list(shm.rglob('*'))} {processes_with(str(shm))}"
            )
            time.sleep(0.02)
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate()
        for pid in processes_with(str(shm)):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(shm, ignore_errors=True)
    return {f"killed_{victim.replace('-', '_')}": 1}


def ring_threads(seed: int) -> dict[str, int]:
    checked(
        [
            binary("stress/ring_stress.cc", "ring_stress"),
            "--messages",
            "2000000",
            "--seed",
            str(seed),
        ]
    )
    return {"messages": 6_000_000}


def ring_kills(seed: int) -> dict[str, int]:
    checked([binary("stress/ring_stress.cc", "ring_stress"), "--kill", "500", "--seed", str(seed)])
    return {"kills": 500}


def fuzz(seed: int) -> dict[str, int]:
    """A million hostile messages against the server with ASan and UBSan, by the test that `make test` samples."""
    test = "tests/integration/test_fuzz.py::test_server_survives_a_million_messages"
    env = {"DEVPROXY_FUZZ_MESSAGES": "1000000", "DEVPROXY_FUZZ_SEED": str(100 * (1 + seed))}
    checked([sys.executable, "-m", "pytest", "-q", "-m", "soak", test], env)
    return {"messages": 1_000_000}


def frames(seed: int) -> dict[str, int]:
    """A million frames of hostile servers of other trees, four in five to those of the software GPU."""
    sys.path.insert(0, str(ROOT))
    from tests.integration.test_fuzz import fuzz_frames

    figures: dict[str, int] = {}
    for device, count in (("soft", 800_000), ("cuda", 200_000)):
        result = fuzz_frames(device, count, 100 + seed, seconds=3600)
        for name in ("frames", "connections", "cut_off", "operations"):
            figures[name] = figures.get(name, 0) + result[name]
    return figures


def sweeps(_seed: int) -> dict[str, int]:
    """Every case of the tests of which `make test` runs some (tests/sweeps.py)."""
    which = ["-m", "pytest", "-q", "-m", "(sweep or sampled) and not soak and not gpu"]
    job = ["devproxy.cli.run", "--device", "soft", "--gpus", "2", "--name", "sweeps", "--"]
    runs = (
        [sys.executable, *which, "-n", "3", "--ignore", "tests/torch", "tests"],
        [sys.executable, "-m", *job, sys.executable, *which, "tests/torch"],
    )
    texts = [checked(words, {"DEVPROXY_TEST_SWEEPS": "all"}, 8 * 3600) for words in runs]
    return {"passed": sum(int(text.split(" passed")[0].split()[-1]) for text in texts)}


def agreement(seed: int) -> dict[str, int]:
    """A million programs under the checker of tests/model/agreement_model.cc."""
    source = str(ROOT / "devproxy/csrc/server/agreement.cc")
    program = binary("model/agreement_model.cc", "agreement", "-O2", source)
    checked([str(program), "--first", str(1_000_000 * seed), "--seeds", "1000000"])
    return {"programs": 1_000_000}


def meta(seed: int) -> dict[str, int]:
    """Half a million programs under the checker of tests/model/meta_model.cc."""
    sources = [
        str(ROOT / f"devproxy/csrc/server/{name}.cc") for name in ("agreement", "meta_barrier")
    ]
    program = binary("model/meta_model.cc", "meta", "-O2", *sources)
    checked([str(program), "--first", str(1_000_000 * seed), "--seeds", "500000"])
    return {"programs": 500_000}


def takeback(seed: int) -> dict[str, int]:
    """Ten thousand programs under the checker of tests/model/comm_model.cc."""
    comm = sorted((ROOT / "devproxy/hal/soft/comm").glob("*.cc"))
    sources = [str(path) for path in comm if path.stem != "peers"]  # the checker has its own
    sources += [
        str(ROOT / path) for path in ("devproxy/hal/links/receiver.cc", "devproxy/csrc/base/log.cc")
    ]
    program = binary("model/comm_model.cc", "comm", "-O2", *sources)
    text = checked([str(program), "--first", str(1_000_000 * seed), "--seeds", "10000"])
    cuts = text.split(" cuts")[0].split()[-1]
    return {"programs": 10_000, "cuts": int(cuts)}


def splice(seed: int) -> dict[str, int]:
    """Sixteen random programs of ranks on one GPU, under ThreadSanitizer; every rank's memory is what it would be alone."""
    sources = [str(path) for path in sorted((ROOT / "devproxy/hal/splice").glob("*.cc"))]
    others = ("hal/engine.cc", "hal/soft/soft_pages.cc", "csrc/base/log.cc")
    sources += [str(ROOT / "devproxy" / path) for path in others]
    flags = ("-fsanitize=thread", "-DDEVPROXY_TSAN", "-Wno-tsan")
    program = binary("native/server_splice.cc", "splice", *flags, *sources)
    first = 16 * seed + 2
    text = checked([program, str(first), str(first + 16)])
    return {"programs": 16, "squashed": int(text.split()[0])}


def of_tests(module: str) -> Callable[[int], dict[str, int]]:
    """run(seed) of a module in tests/fault: its docstring says what a run is."""

    def run(seed: int) -> dict[str, int]:
        sys.path.insert(0, str(ROOT))
        figures: dict[str, int] = importlib.import_module(f"tests.fault.{module}").run(seed)
        return figures

    return run


def cuda_host_kills(seed: int) -> dict[str, int]:
    """host-kills on hal/cuda, over the fake driver and the fake NCCL."""
    sys.path.insert(0, str(ROOT))
    from tests.fault import host_kills as kills

    return kills.run(seed, on_cuda=True)


def small_files(seed: int) -> dict[str, int]:
    """See tests/bench/small_files.py; bytes are checked, and its targets for the freeze and the restore."""
    sys.path.insert(0, str(ROOT))
    from tests.bench import small_files as files

    dice = random.Random(seed)
    count, size = dice.choice([1_000, 20_000, files.FILES]), dice.choice([0, 1, 5, 300])
    with tempfile.TemporaryDirectory() as root:
        seconds = files.measure(count, size, Path(root))
    allowed = max(count / files.FILES, 0.1)
    assert seconds["same"] <= files.FREEZE_TARGET_S * allowed, (count, size, seconds)
    assert seconds["gone"] <= files.RESTORE_TARGET_S * allowed, (count, size, seconds)
    return {"files": count}


def fault_points(seed: int) -> dict[str, int]:
    """Run n is the n-th case of tests/fault/points.py. One job serves many of them, as in the tests."""
    sys.path.insert(0, str(ROOT))
    from tests.fault import points
    from tests.fault.scene import Scene

    case = points.CASES[seed - 1]
    if not _SCENES:
        _SCENES.append(Scene())
        atexit.register(lambda: [scene.close() for scene in _SCENES])
    try:
        points.run(_SCENES[0], case)
    except BaseException as error:
        _SCENES.pop().close()
        raise AssertionError(f"{case}: {error}") from error
    return {case.action: 1, case.verb: 1}


_SCENES: list[Any] = []

CAMPAIGNS = [
    Campaign(
        "kill-cycles",
        "start, kill -9 of job, devproxy-run or a server; nothing left",
        100,
        kill_cycle,
    ),
    Campaign(
        "ring-threads", "three producers on a small ring, every byte checked", 10, ring_threads
    ),
    Campaign("ring-kills", "a producer process killed at random moments", 10, ring_kills),
    Campaign(
        "random-kills",
        "kill -9 of any process of a job with periodic images, half of them between cut and commit; restored, bitwise right",
        1000,
        of_tests("random_kills"),
    ),
    Campaign(
        "verb-kills",
        "kill -9 of any process, the job's init and loader workers too, while a checkpoint, suspend, resume, restore or migrate is under way; bitwise right",
        200,
        of_tests("verb_kills"),
    ),
    Campaign(
        "host-kills",
        "kill -9 of any process of a job on two hosts, or of a whole host, in and out of every verb, resize too; bitwise right",
        112,  # every victim in every verb, twice
        of_tests("host_kills"),
    ),
    Campaign(
        "cuda-host-kills",
        "the same on hal/cuda, over a fake driver and a fake NCCL",
        112,
        cuda_host_kills,
    ),
    Campaign(
        "fault-points",
        "each fault point in each verb that passes it, as an error and as a kill; the job goes on or its image is whole",
        162,  # tests/fault/test_points.py knows that these are all
        fault_points,
    ),
    Campaign(
        "ranks",
        "training on several ranks in every way and with every barrier: verbs, and kill -9 of a rank, a server, the supervisor, init or everything, at random moments; restored, bitwise right",
        102,  # six of each way
        of_tests("rank_kills"),
    ),
    Campaign(
        "image-damage",
        "one to three objects of a store damaged in any way; its images are right or refused, and so is the next one of a living job",
        1200,  # about 2,000 damages
        of_tests("image_damage"),
    ),
    Campaign(
        "other-user",
        "another user exchanges folders and files of root's job by links while they are copied, put back and put elsewhere",
        500,
        of_tests("other_user"),
    ),
    Campaign(
        "clock-jumps",
        "a store whose wall clock jumps by seconds to years in the middle of everything; order, prune and gc are right",
        500,
        of_tests("clock_jumps"),
    ),
    Campaign(
        "s3-faults",
        "an S3 endpoint that resets, refuses, cuts short, delays or does twice what it is asked; each image is whole or not there",
        200,
        of_tests("s3_faults"),
    ),
    Campaign(
        "odd-jobs",
        "jobs made of random kernel objects and process states; restored bit for bit, or refused by name and unharmed",
        300,
        of_tests("odd_jobs"),
    ),
    Campaign("sweeps", "every case of the tests of which `make test` runs some", 1, sweeps),
    Campaign("agreement", "random programs of ranks, held at random moments", 10, agreement),
    Campaign("meta", "random programs of ranks that meet beside their collectives", 10, meta),
    Campaign(
        "takeback", "random programs of ranks, cut anywhere, their servers replaced", 10, takeback
    ),
    Campaign("splice", "random programs of ranks that share a GPU, under TSan", 20, splice),
    Campaign(
        "small-files",
        "up to 200,000 small files of a job: copied, put back, every byte checked, in the time that they may take",
        10,
        small_files,
    ),
    Campaign("fuzz", "hostile messages against the sanitized server", 100, fuzz),
    Campaign("frames", "hostile servers of other trees against sanitized receivers", 10, frames),
]


def load(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def save(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.rename(path)


EMPTY: dict[str, Any] = {"runs": 0, "seconds": 0.0, "figures": {}, "failures": [], "commits": {}}


def both_ends(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def so_far(c: Campaign) -> dict[str, Any]:
    """What has been done here or, where that is nothing, elsewhere."""
    state = load(STATE / f"{c.name}.json") or load(RESULT).get(c.name, {})
    if state and "commits" not in state:
        state["commits"] = {state.get("commit", ""): state["runs"]}
    return {name: state[name] for name in EMPTY if name in state}


def campaign(c: Campaign, runs: int, fresh: bool) -> dict[str, Any]:
    path = STATE / f"{c.name}.json"
    state = {"what": c.what} | copy.deepcopy(EMPTY) | ({} if fresh else so_far(c))
    at = commit()
    while state["runs"] < runs:
        seed = int(state["runs"]) + 1
        began = time.monotonic()
        try:
            for name, value in c.run(seed).items():
                state["figures"][name] = state["figures"].get(name, 0) + value
        except (AssertionError, subprocess.SubprocessError, OSError) as error:
            state["failures"].append(
                {"seed": seed, "why": both_ends(f"{type(error).__name__}: {error}", 20_000)}
            )
            print(f"{c.name}: seed {seed} failed: {error}", file=sys.stderr)
        state["runs"] = seed
        state["commits"][at] = state["commits"].get(at, 0) + 1
        state["seconds"] = round(state["seconds"] + time.monotonic() - began, 1)
        save(path, state)
        print(f"{c.name}: {seed}/{runs}, {len(state['failures'])} failed", flush=True)
    return state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[c.name for c in CAMPAIGNS], action="append")
    parser.add_argument(
        "--runs", type=int, help="another number of runs per campaign, those before among them"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was done before")
    arguments = parser.parse_args()
    # A shell gives what it starts in the background an ignored SIGINT. Jobs would keep that, and campaigns send them Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, str(ROOT))
    from tests import own_state

    own_state.take_own()
    failed = False
    for c in CAMPAIGNS:
        if arguments.only and c.name not in arguments.only:
            continue
        before = 0 if arguments.fresh else len(so_far(c).get("failures", []))
        state = campaign(c, arguments.runs or c.runs, arguments.fresh)
        failed |= len(state["failures"]) > before
        result = load(RESULT)  # now: another campaign may have ended meanwhile
        result[c.name] = state | {
            "command": f"scripts/soak.py --only {c.name} --runs {state['runs']}",
            "device": "soft",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
        }
        save(RESULT, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
