# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel in isolation, installs it into fresh environments outside the checkout, and runs jobs from there.

    scripts/test_wheel.py [--wheel FILE | --quick] [--torch] [PYTHON...]     default: python3.10 to python3.13, those that are here

For each Python: pip install, versions, doctor, a driver-API job on the software GPU, pip uninstall. With --torch, also for
the first of them: `devproxy doctor --fix`, a training job, its checkpoint, kill and restore. Says what it does; exit code 0
when all of it worked. --quick packs what build/ has, and takes what devproxy imports from this Python's packages.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
# A job as a stranger writes it, without any package: fills device memory and reads it back.
JOB = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)
call("cuInit", 0)
context, memory, back = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(1 << 20)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
call("cuMemsetD8_v2", memory, ctypes.c_ubyte(7), ctypes.c_size_t(1 << 20))
call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(1 << 20))
print(f"{back.raw.count(7)} bytes of 7, by", [l.split()[-1] for l in open("/proc/self/maps") if "libcuda.so.1" in l][0])
"""


class Failed(Exception):
    """What did not work."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def output(*command: object, env: dict[str, str], cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
    """Both streams of a command. Raises Failed for another exit code than these."""
    done = subprocess.run(
        [str(word) for word in command], env=env, cwd=cwd, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode not in codes:
        raise Failed(f"{command[0]} {command[1]} ... ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def here(given: list[str]) -> list[str]:
    """Pythons that run; a name on the PATH may be an empty shell of a version manager."""
    found = []
    for name in given or [f"python{version}" for version in VERSIONS]:
        # pyenv's own, whatever version it has made the current one
        kept = sorted((Path.home() / ".pyenv/versions").glob(f"*/bin/{name}"))
        name = str(kept[-1]) if kept and not given else name
        ask = [name, "-c", "import ensurepip, venv, sys; print(sys.executable)"]
        try:
            done = subprocess.run(ask, capture_output=True, text=True)
        except OSError:
            done = None
        if done is not None and done.returncode == 0:
            found.append(done.stdout.strip())
        elif given:
            raise Failed(f"{name} cannot be run")
        else:
            say(f"{name} is not here: not tried")
    return found


def pack(to: Path) -> Path:
    """The wheel of what is built in build/."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    env = os.environ | {"DEVPROXY_BUILD": str(ROOT / "build")}
    output(*command, "-w", to, ROOT, env=env, cwd=to)
    (wheel,) = to.glob("devproxy-*.whl")
    return wheel


def make_sdist(python: str, to: Path) -> Path:
    """By a fresh environment: this Python may be without setuptools."""
    venv = to / "venv-sdist"
    output(python, "-m", "venv", venv, env=dict(os.environ), cwd=to)
    (pin,) = re.findall(r"^setuptools==.*$", (ROOT / "requirements/build.txt").read_text(), re.M)
    output(venv / "bin/python", "-m", "pip", "install", "-q", pin, env=dict(os.environ), cwd=to)
    program = (
        "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    )
    output(venv / "bin/python", "-c", program, to, env=dict(os.environ), cwd=ROOT)
    (sdist,) = to.glob("devproxy-*.tar.gz")
    return sdist


def build(python: str, to: Path) -> Path:
    """The wheel: from an sdist, by an isolated build. Raises Failed also where that changes the checkout."""
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--ignored"]
    before = output(*status, env=dict(os.environ), cwd=ROOT)
    sdist = make_sdist(python, to)
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", to, sdist]
    output(*command, env=dict(os.environ), cwd=to)
    after = output(*status, env=dict(os.environ), cwd=ROOT)
    if before != after:
        raise Failed(f"the build wrote into the checkout: before\n{before}after\n{after}")
    (wheel,) = to.glob("devproxy-*.whl")
    return wheel


def try_python(python: str, wheel: Path, home: Path, env: dict[str, str], borrow: bool) -> None:
    """Install, run, uninstall. borrow: what devproxy imports is taken from this Python. Raises Failed."""
    version = output(python, "--version", env=env, cwd=home).strip()
    venv = home / "venv"
    output(python, "-m", "venv", venv, env=env, cwd=home)
    pip = [venv / "bin/python", "-m", "pip"]
    if borrow:
        (packages,) = venv.glob("lib/python3*/site-packages")
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    output(*pip, "install", "-q", *(["--no-deps"] if borrow else []), wheel, env=env, cwd=home)
    expected = f"devproxy {wheel.name.split('-')[1]}"
    for program in ("devproxy", "devproxy-run"):
        said = output(venv / "bin" / program, "--version", env=env, cwd=home).strip()
        if said != expected:
            raise Failed(f"{program} --version says {said!r}, not {expected!r}")
    output(venv / "bin/devproxy", "doctor", env=env, cwd=home)
    output(venv / "bin/python", "-c", IMPORT_ALL, env=env, cwd=home)
    run = [venv / "bin/devproxy-run", "--device", "soft", "--", venv / "bin/python", "-c", JOB]
    said = output(*run, env=env, cwd=home)
    if "1048576 bytes of 7" not in said:
        raise Failed(f"the job said {said!r}")
    output(*pip, "uninstall", "-q", "-y", "devproxy", env=env, cwd=home)
    left = [p for p in venv.rglob("*devproxy*") if p.name != "__pycache__"]
    if left:
        raise Failed(f"pip uninstall left {left}")
    say(f"{version}: installed, {said.strip().splitlines()[-1]}, uninstalled: nothing left")


IMPORT_ALL = """
import importlib, pkgutil, devproxy
for module in pkgutil.walk_packages(devproxy.__path__, "devproxy."):
    if "pylib" not in module.name:
        importlib.import_module(module.name)
"""


def try_torch(python: str, wheel: Path, home: Path, env: dict[str, str]) -> None:
    """A training job from the wheel: plugin by `doctor --fix`, checkpoint, kill, restore. Raises Failed."""
    venv = home / "venv-torch"
    output(python, "-m", "venv", venv, env=env, cwd=home)
    say("installing the wheel and torch")
    pins = ROOT / "requirements" / "torch.txt"
    output(venv / "bin/python", "-m", "pip", "install", "-q", wheel, "-r", pins, env=env, cwd=home)
    ctl = venv / "bin/devproxy"
    say("devproxy doctor --fix")
    fixed = output(ctl, "doctor", "--fix", env=env, cwd=home)
    for word in ("CRIU", "plugin for torch"):
        if not any(word in line and "ok" in line for line in fixed.splitlines()):
            raise Failed(f"doctor --fix did not mend {word}:\n{fixed}")
    script, log = home / "train.py", home / "train.log"
    shutil.copy2(ROOT / "examples/train_gpt.py", script)
    train = [venv / "bin/python", script, "--steps", "60", "--every", "5"]
    say("a training job, with images; kill; restore")
    with open(log, "wb") as out:
        job = subprocess.Popen(
            [*map(str, (venv / "bin/devproxy-run", "--name", "wheel", "--", *train))],
            env=env, cwd=home, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + 240
    while b"step   10" not in log.read_bytes():
        if job.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"the job does not train:\n{log.read_text(errors='replace')}")
        time.sleep(0.2)
    output(ctl, "checkpoint", "wheel", env=env, cwd=home)
    output(ctl, "kill", "wheel", env=env, cwd=home)
    job.wait(60)
    output(ctl, "restore", "wheel", "--output", log, "--wait", env=env, cwd=home)
    text = log.read_text(errors="replace")
    if "parameters sha256" not in text:
        raise Failed(f"the restored job did not end well:\n{text}")
    say("restored, and trained to its end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="this one, instead of building it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("pythons", metavar="PYTHON", nargs="*")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="devproxy-wheel-"))
    shm = Path(tempfile.mkdtemp(prefix="devproxy-wheel-", dir="/dev/shm"))
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "DEVPROXY_LIB", "DEVPROXY_SERVER", "DEVPROXY_CRIU")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {"DEVPROXY_SHM_DIR": str(shm), "DEVPROXY_STATE_DIR": str(home / "state")}
    env |= {"DEVPROXY_KEY_FILE": str(home / "image.key"), "DEVPROXY_DAEMON_IDLE_S": "1"}
    try:
        pythons = here([sys.executable] if options.quick else options.pythons)
        if not pythons:
            raise Failed("no Python is here")
        wheel = options.wheel and options.wheel.resolve()
        if options.quick:
            wheel = pack(home)
        elif wheel is None:
            say(f"building the wheel with {pythons[0]}: two minutes of two cores")
            wheel = build(pythons[0], home)
        say(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
        for number, python in enumerate(pythons):
            each = home / str(number)
            each.mkdir()
            try_python(python, wheel, each, env, options.quick)
        if options.torch:
            try_torch(pythons[0], wheel, home, env)
    except Failed as error:
        print(f"test_wheel: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
