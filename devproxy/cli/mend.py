# SPDX-License-Identifier: Apache-2.0
"""devproxy doctor --fix: installs what is missing and may be installed; says what it does, and what it leaves to the user."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

from devproxy import config, state
from devproxy.checkpoint import criu
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.proxy import preflight

HEADERS = "nvidia-cuda-runtime==13.0.96"  # as requirements/headers.txt has it
INSIDE = "nvidia/cu13/include/"


def mend(python: str) -> list[str]:
    """What could not be mended, a line each. python: whose torch the plugin is for."""
    failed = []
    steps: list[tuple[str, Callable[[], None]]] = [
        ("system packages", lambda: _system(python)),
        ("CRIU", _criu),
        ("the torch plugin", lambda: _plugin(python)),
    ]
    for what, step in steps:
        _say(f"{what} ...")
        try:
            step()
        except (DevproxyError, OSError) as error:
            failed.append(f"{what}: {error}")
            _say(failed[-1])
    return failed


def _say(text: str) -> None:
    say(text, "devproxy doctor --fix")


def _script(name: str, *arguments: str) -> None:
    """Runs one of devproxy's scripts; it says on stderr what it does. Raises DevproxyError."""
    done = subprocess.run(
        ["sh", config.script(name), *arguments], stdin=subprocess.DEVNULL, stdout=sys.stderr
    )
    if done.returncode:
        raise DevproxyError(f"{name} ended with {done.returncode}", "see what it says above")


def _system(python: str) -> None:
    """A wheel needs a compiler for the plugin; a checkout is built here."""
    _script("install_system.sh", *(["--for", "plugin"] if config.is_installed() else []), python)


def _criu() -> None:
    try:
        found = criu.find()
        _say(f"CRIU is {found.program}")
    except Refused:
        folder = config.criu_dir()
        if config.is_installed():
            folder = state.subfolder("criu")
        _script("install_criu.sh", folder)
        criu.find()


def _plugin(python: str) -> None:
    if preflight.find_torch(python) is None:
        _say(f"{python} has no torch, so there is no plugin to build")
        return
    builder = importlib.import_module("devproxy.torch.build")
    folder = config.plugin_dir()
    if folder != config.lib_dir():
        state.state_dir()  # made, and looked at, first
    arguments = ["--python", python, "--out", folder]
    try:
        builder.find_cuda_include("", builder.ask_torch(python))
    except builder.BuildError as error:
        if "cuda.h" not in str(error):
            raise DevproxyError(str(error), "mend that first") from None
        _say(f"fetching CUDA's headers ({HEADERS}; headers only, nothing of it is loaded)")
        fetch_headers()
    _say("compiling the plugin: one to three minutes, at the first time")
    if builder.main(arguments):
        raise DevproxyError(f"no plugin for {python}", "see what the builder says above")


def fetch_headers() -> None:
    """NVIDIA's cuda.h and what it includes, from its package, to where the builder looks. Raises DevproxyError."""
    if config.is_installed():
        above = state.subfolder("headers")
    else:
        above = os.path.join(config.made_here_dir(), "headers")
        os.makedirs(above, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above) as work:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]  # fmt: skip
        done = subprocess.run([*command, "-d", work, HEADERS], stdout=sys.stderr)
        wheels = [name for name in os.listdir(work) if name.endswith(".whl")]
        if done.returncode or len(wheels) != 1:
            raise DevproxyError(
                f"{HEADERS} could not be fetched by {sys.executable} -m pip",
                "install it where devproxy is: pip install --no-deps " + HEADERS,
            )
        fresh = os.path.join(work, "cuda-13")
        with zipfile.ZipFile(os.path.join(work, wheels[0])) as archive:
            for name in archive.namelist():
                if name.startswith(INSIDE) and not name.endswith("/"):
                    to = os.path.join(fresh, *name[len(INSIDE) :].split("/"))
                    os.makedirs(os.path.dirname(to), exist_ok=True)
                    with archive.open(name) as source, open(to, "wb") as target:
                        shutil.copyfileobj(source, target)
        os.rename(fresh, os.path.join(above, "cuda-13"))
