# SPDX-License-Identifier: Apache-2.0
"""The command line: what runs, and where."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpucheck
from devproxy import machine
from devproxy.proxy.command import become_subreaper
from gpucheck import running
from gpucheck.campaign import TOTAL_LIMIT_S, campaign, hold_devices, run_here
from gpucheck.ends import FAILED, NOT_RUN, OK, REFUSED
from gpucheck.report import Report
from gpucheck.running import run
from gpucheck.setup import Setup
from gpucheck.stage import Stage
from gpucheck.stages import STAGES


def find_driver(named: str) -> str:
    """An absolute path, or nothing: then each stage that needs the driver is refused."""
    if place := machine.find_cuda_driver(os.path.abspath(named) if named else ""):
        return place
    if named:
        return ""
    # Where the loader itself finds it: ask a process that is not this one.
    code = 'import ctypes; ctypes.CDLL("libcuda.so.1"); print([l.split()[-1] for l in open("/proc/self/maps") if "libcuda.so" in l][0])'
    done = run([sys.executable, "-c", code], dict(os.environ), 20)
    return done.out.strip() if done.code == 0 else ""


LOG_BYTES = 400_000  # of each log, its end


def keep_logs(work: Path, to: Path) -> None:
    """What the programs of the stages said, and the jobs' logs, as one archive."""
    with tarfile.open(to, "w:gz") as archive:
        for path in sorted([*work.rglob("*.log"), *work.rglob("*.jsonl")]):
            if path.is_file() and not path.is_symlink():
                end = path.read_bytes()[-LOG_BYTES:]
                entry = tarfile.TarInfo(str(path.relative_to(work)))
                entry.size = len(end)
                archive.addfile(entry, io.BytesIO(end))


@contextlib.contextmanager
def working_folder(driver: str, bundle: Path, out: Path) -> Iterator[Path]:
    """The campaign's folders: on disk, and one in /dev/shm. Only their logs stay."""
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    shm = Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/dev/shm"))
    try:
        (work / "shm").write_text(str(shm))
        (work / "native").mkdir()
        (work / "shim").mkdir()
        (work / "driver_alone").mkdir()
        for name in ("libcuda.so.1", "libcuda.so"):
            if driver:
                (work / "native" / name).symlink_to(driver)
                (work / "driver_alone" / name).symlink_to(driver)
            (work / "shim" / name).symlink_to(bundle / "lib" / "libcuda.so.1")
        yield work
    finally:
        with contextlib.suppress(OSError):
            keep_logs(work, out / "gpu-check-logs.tar.gz")
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def parse(script: Path, argv: list[str]) -> argparse.Namespace:
    here = script.resolve().parent
    beside = here if (here / "manifest.json").exists() else here.parent / "build" / "gpu-bundle"
    parser = argparse.ArgumentParser(description=(gpucheck.__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=beside)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or here.parent / "gpu-check" if beside == here else here.parent / "build" / "gpu-check"))  # fmt: skip
    parser.add_argument("--driver", default="", help="the genuine libcuda.so.1")
    parser.add_argument("--limit", type=float, default=TOTAL_LIMIT_S, help="seconds for everything")
    parser.add_argument("--only", default="", help="names of stages, separated by commas")
    parser.add_argument(
        "--second", action="store_true", help="the stages that a first call keeps no time for"
    )
    parser.add_argument("--third", action="store_true", help="and those of a third call")
    parser.add_argument("--ops-start", default="", help="t_ops begins with this case (TYPE/OP)")
    parser.add_argument("--ops", default="", help="t_ops takes these cases alone (TYPE/OP,...)")
    parser.add_argument("--list", action="store_true", help="names the stages, in their order")
    parser.add_argument("--rehearse", default="", choices=["record", "soft"], help="for developers, without a GPU: this device of devproxy's on both sides of each comparison; with record no kernel is executed, so nothing is learnt but that the stages run")  # fmt: skip
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sysroot", default="", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--spoil", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(script: str, argv: list[str]) -> int:
    options = parse(Path(script), argv)
    running.patience = 5.0 if options.rehearse else 1.0
    if options.list:
        for one in STAGES:
            when = ("first", "second", "third")[one.call - 1]
            print(f"{one.name:20} {when:6} {one.least_s:3.0f} to {one.limit_s:3.0f} s  {' '.join((one.run.__doc__ or '').split())}")  # fmt: skip
        return 0
    bundle, options.out = options.bundle.resolve(), options.out.resolve()
    if options.stage:
        one = next(s for s in STAGES if s.name == options.stage)
        return run_here(
            one,
            Setup(
                bundle,
                options.work,
                options.driver,
                options.sysroot,
                options.small,
                options.rehearse,
                options.out,
                options.ops_start,
                options.ops,
                options.spoil,
            ),
            Report(options.report),
        )
    if not (bundle / "manifest.json").exists():
        print(f"gpu_check: no bundle at {bundle}: make gpu-bundle", file=sys.stderr)
        return 2
    only = frozenset(filter(None, options.only.split(",")))
    if unknown := only - {s.name for s in STAGES}:
        print(f"gpu_check: no stage {', '.join(sorted(unknown))}: --list", file=sys.stderr)
        return 2
    for asked, call in ((options.second, 2), (options.third, 3)):
        if asked:
            only |= {s.name for s in STAGES if s.call == call}
    if options.ops or (options.ops_start and only):
        only |= {"t_ops"}
    if only:
        only |= {name for s in STAGES if s.name in only for name in s.needs}
        if options.rehearse or any(
            n[:2] in ("c_", "d_", "f_", "t_") or n == "machine" for n in only
        ):
            only |= {"prepare"}  # the proxy needs what it unpacks
    begin = time.monotonic()
    become_subreaper()
    held = [] if options.rehearse else hold_devices()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu-check.log").write_bytes(b"")
    # In a rehearsal the stages that call the driver are jobs themselves, and their driver is devproxy's.
    shim = str(bundle / "lib" / "libcuda.so.1")
    driver_path = shim if options.rehearse else find_driver(options.driver)
    facts = json.loads((bundle / "manifest.json").read_text())
    about = {
        "command": " ".join([os.path.basename(sys.executable), *sys.argv]),
        "begun_unix_s": int(time.time()),
        "driver": driver_path,
        "devices_held_open": len(held),
        "bundle": {
            k: v
            for k, v in facts.items()
            if k not in ("files", "needs", "driver_symbols", "optional_driver_symbols")
        },
    }
    if options.rehearse:
        about["rehearsal"] = f"over devproxy's {options.rehearse} device: no GPU, no driver"
    with working_folder("" if options.rehearse else driver_path, bundle, options.out) as work:
        setup = Setup(bundle, work, driver_path, options.sysroot, options.small, options.rehearse)

        def command_of(one: Stage, report: Path) -> list[str]:
            line = [
                sys.executable, os.path.abspath(script), "--stage", one.name, "--bundle", str(bundle),
                "--driver", driver_path, "--work", str(work), "--report", str(report), "--sysroot", options.sysroot,
                "--out", str(options.out), "--ops-start", options.ops_start, "--ops", options.ops, "--spoil", options.spoil,
                *(["--small"] if options.small else []),
            ]  # fmt: skip
            if not options.rehearse:
                return line
            return [*(setup.native().prefix if one.direct else []), *line, "--rehearse", options.rehearse]  # fmt: skip

        def env_of(one: Stage) -> dict[str, str] | None:
            return setup.native().env if options.rehearse and one.direct else None

        limit_s = options.limit - (time.monotonic() - begin)
        stages = [dataclasses.replace(s, limit_s=s.limit_s * running.patience) for s in STAGES]
        results = campaign(stages, command_of, options.out, work, about, limit_s, only, env_of)
    counts = {s: sum(r["status"] == s for r in results) for s in (OK, FAILED, REFUSED, NOT_RUN)}
    print(f"{counts} in {time.monotonic() - begin:.0f} s: {options.out / 'gpu-check.json'}")
    if about["next"]:
        print(f"next: {about['next']}")
    return 0 if counts[FAILED] == counts[REFUSED] == 0 and counts[OK] else 1
