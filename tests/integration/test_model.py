# SPDX-License-Identifier: Apache-2.0
"""The command ring, the gate, the three ways of ranks to a cut and their collectives under checkers (tests/model), the ring
under real threads too.

The checkers explore the real ring.h, gate.h, agreement.cc, meta_barrier.cc and hal/soft/comm; each of their mutants, the code
around them broken on purpose, must be caught: a checker that cannot fail proves nothing.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests"
AGREEMENT = [ROOT / "devproxy/csrc/server/agreement.cc"]
META = [*AGREEMENT, ROOT / "devproxy/csrc/server/meta_barrier.cc"]
COMM = [
    # tests/model/comm_model.cc has its own peers.
    *(
        path
        for path in sorted((ROOT / "devproxy/hal/soft/comm").glob("*.cc"))
        if path.stem != "peers"
    ),
    ROOT / "devproxy/hal/links/receiver.cc",
    ROOT / "devproxy/hal/links/tls.cc",
    ROOT / "devproxy/csrc/base/log.cc",
]
CXX = ["g++", "-std=c++20", "-Wall", "-Wextra", "-I", str(ROOT)]
N_MUTANTS = 16
N_GATE_MUTANTS = 15
N_AGREEMENT_MUTANTS = 13
N_META_MUTANTS = 12
N_COMM_MUTANTS = 14


def build(source: str, name: str, *flags: str | Path) -> Path:
    """Compiles tests/<source> into build/tests/<name> unless it is newer than what it includes."""
    out = BUILD / name
    inputs = [ROOT / "tests" / source, *(ROOT / "devproxy/csrc/transport").glob("*.h")]
    inputs += (ROOT / "devproxy/csrc/wire").glob("*.h")
    inputs += [ROOT / "devproxy/csrc/server/gate.h", *META, *(p.with_suffix(".h") for p in META)]
    inputs += [
        *COMM,
        *(p for d in ("soft/comm", "links") for p in (ROOT / "devproxy/hal" / d).glob("*.h")),
    ]
    if out.exists() and all(out.stat().st_mtime > p.stat().st_mtime for p in inputs):
        return out
    BUILD.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{name}.{os.getpid()}")  # another test run may build the same
    cmd = [*CXX, *map(str, flags), str(ROOT / "tests" / source), "-o", str(fresh), "-pthread"]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fresh.rename(out)
    return out


def run(*argv: str | Path, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs a built test; its output is shown by pytest when an assertion fails."""
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=seconds, errors="replace"
    )
    print(done.stdout[-6000:])
    print(done.stderr[-6000:])
    return done


def test_every_interleaving_of_the_ring_holds() -> None:
    """3 producers and a consumer, wrap, full ring, a producer dying at every step."""
    done = run(build("model/ring_model.cc", "ring_model", "-O2", "-DMUTANT=0"))
    assert done.returncode == 0
    assert "every state holds" in done.stdout


@pytest.mark.parametrize("mutant", range(1, N_MUTANTS + 1))
def test_a_broken_ring_is_caught(mutant: int) -> None:
    """The checker finds each mutant and prints the schedule that shows it."""
    done = run(build("model/ring_model.cc", "ring_model_mutants", "-O2"), "--mutant", str(mutant))
    assert done.returncode == 1
    assert "VIOLATION" in done.stdout


def test_no_mutant_is_forgotten() -> None:
    """The list above covers every mutant of the checker."""
    done = run(build("model/ring_model.cc", "ring_model_mutants", "-O2"), "--list")
    assert len(done.stdout.splitlines()) == N_MUTANTS


def gate_model() -> Path:
    """The checker of the gate."""
    return build("model/gate_model.cc", "gate_model", "-O2")


def test_every_interleaving_of_the_gate_holds() -> None:
    """A server thread that cuts, resumes and stops, the dispatch loop, and a client with host functions."""
    done = run(gate_model())
    assert done.returncode == 0
    assert "every state holds" in done.stdout


@pytest.mark.parametrize("mutant", range(1, N_GATE_MUTANTS + 1))
def test_a_broken_loop_around_the_gate_is_caught(mutant: int) -> None:
    """The checker finds each mutant and prints the steps that show it."""
    done = run(gate_model(), "--mutant", str(mutant))
    assert done.returncode == 1
    assert "VIOLATION" in done.stdout


def test_no_mutant_of_the_gate_is_forgotten() -> None:
    """The list above covers every mutant of the checker."""
    assert len(run(gate_model(), "--list").stdout.splitlines()) == N_GATE_MUTANTS


def agreement_model() -> Path:
    """The checker of the agreement."""
    return build("model/agreement_model.cc", "agreement_model", "-O2", *AGREEMENT)


def test_random_programs_of_ranks_agree() -> None:
    """Collectives, sends, groups, communicators that come and go, and holds at any moment. `make soak` runs more."""
    done = run(
        agreement_model(),
        "--seeds",
        os.environ.get("DEVPROXY_TEST_PROGRAMS", "30000"),
        seconds=3600,
    )
    assert done.returncode == 0
    assert "programs hold" in done.stdout


@pytest.mark.parametrize("mutant", range(1, N_AGREEMENT_MUTANTS + 1))
def test_a_broken_agreement_is_caught(mutant: int) -> None:
    """The checker finds each mutant and prints the program that shows it."""
    done = run(agreement_model(), "--mutant", str(mutant))
    assert done.returncode == 1
    assert "seed" in done.stdout


def test_no_mutant_of_the_agreement_is_forgotten() -> None:
    """The list above covers every mutant of the checker."""
    assert len(run(agreement_model(), "--list").stdout.splitlines()) == N_AGREEMENT_MUTANTS


def meta_model() -> Path:
    """The checker of the meta-allreduce."""
    return build("model/meta_model.cc", "meta_model", "-O2", *META)


def test_random_programs_of_ranks_meet_in_band() -> None:
    """Asked, lifted and asked again at any moment; what is cut is closed. `make soak` runs more."""
    programs = os.environ.get("DEVPROXY_TEST_PROGRAMS", "10000")
    done = run(meta_model(), "--seeds", programs, seconds=3600)
    assert done.returncode == 0
    assert "programs hold" in done.stdout


@pytest.mark.parametrize("mutant", range(1, N_META_MUTANTS + 1))
def test_a_broken_meta_allreduce_is_caught(mutant: int) -> None:
    """The checker finds each mutant and prints the program that shows it."""
    done = run(meta_model(), "--mutant", str(mutant))
    assert done.returncode == 1
    assert "seed" in done.stdout


def test_no_mutant_of_the_meta_allreduce_is_forgotten() -> None:
    """The list above covers every mutant of the checker."""
    assert len(run(meta_model(), "--list").stdout.splitlines()) == N_META_MUTANTS


def comm_model(*flags: str) -> Path:
    """The checker of the software GPU's communicators and of cuts that take back what has not begun."""
    return build("model/comm_model.cc", "-".join(["comm_model", *flags]), "-O1", *flags, *COMM)


def test_random_collectives_are_cut_anywhere() -> None:
    """Communicators over several trees, whose servers are replaced; with AddressSanitizer. `make soak` runs more."""
    programs = os.environ.get("DEVPROXY_TEST_PROGRAMS", "300")
    done = run(comm_model("-fsanitize=address"), "--seeds", programs, seconds=3600)
    assert done.returncode == 0
    assert "programs hold" in done.stdout


@pytest.mark.parametrize("mutant", range(1, N_COMM_MUTANTS + 1))
def test_a_broken_take_back_is_caught(mutant: int) -> None:
    """The checker finds each mutant and prints the program that shows it."""
    done = run(comm_model(), "--mutant", str(mutant), "--seeds", "3000")
    assert done.returncode == 1
    assert "seed" in done.stdout


def test_no_mutant_of_the_take_back_is_forgotten() -> None:
    """The list above covers every mutant of the checker."""
    assert len(run(comm_model(), "--list").stdout.splitlines()) == N_COMM_MUTANTS


@pytest.mark.parametrize("sanitizer", ["none", "thread"])
def test_ring_under_real_threads(sanitizer: str) -> None:
    """Several producers against a consumer that sleeps; under ThreadSanitizer too."""
    flags = ["-O2", "-g"] + (["-fsanitize=thread", "-Wno-tsan"] if sanitizer == "thread" else [])
    binary = build("stress/ring_stress.cc", f"ring_stress_{sanitizer}", *flags)
    assert run(binary, "--messages", "40000", "--seed", "1").returncode == 0


def test_tsan_sees_a_relaxed_publish() -> None:
    """The sanitizer run above can fail: a ring that publishes without release is reported."""
    binary = build(
        "stress/ring_stress.cc", "ring_stress_relaxed", "-O1", "-g", "-fsanitize=thread", "-Wno-tsan",
        "-DRELAXED_PUBLISH",
    )  # fmt: skip
    done = run(binary, "--messages", "4000", "--seed", "1")
    assert done.returncode != 0
    assert "data race" in done.stderr


def test_producers_killed_between_two_processes() -> None:
    """A producer process dies by SIGKILL at a random moment, 60 times; the consumer never reads garbage."""
    binary = build("stress/ring_stress.cc", "ring_stress_none", "-O2", "-g")
    assert run(binary, "--kill", "60", "--seed", "1").returncode == 0
