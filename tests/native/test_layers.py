# SPDX-License-Identifier: Apache-2.0
"""Who may include whom (CONTRIBUTING.md): grep, because it is simple and nothing can hide from it. CMake is compared: what a
layer may not include, its compiler does not find."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from codegen.__main__ import outputs

ROOT = Path(__file__).resolve().parent.parent.parent
INTERCEPTORS = ROOT / "devproxy" / "interceptors"
SOURCES = [p for p in (ROOT / "devproxy").rglob("*") if p.suffix in (".h", ".cc", ".cpp", ".c")]
VENDOR = re.compile(r"^(cuda|cudaTypedefs|nvml|nccl|cublas|cudnn)[\w]*\.h$|^cuda_.*\.h$")
# folder of devproxy/ (see folder_of) -> the folders that its files may include from, besides their own
BASE, ARGS, WIRE, TRANSPORT = "csrc/base", "csrc/args", "csrc/wire", "csrc/transport"
CLIENT, SERVER, CORE = "csrc/client", "csrc/server", "csrc/core"
MAY_INCLUDE: dict[str, set[str]] = {
    BASE: set(),
    ARGS: set(),
    WIRE: {BASE, ARGS},
    TRANSPORT: {BASE, WIRE},
    CLIENT: {BASE, ARGS, WIRE, TRANSPORT},
    CORE: {ARGS},
    SERVER: {BASE, ARGS, WIRE, TRANSPORT, "hal"},
    "csrc/server/main": {BASE, WIRE, SERVER, "hal", "hal/devices"},
    "csrc/init": set(),
    "csrc/hostlib": set(),
    "hal": {BASE, ARGS},
    "hal/image": {BASE},
    "hal/links": {BASE, ARGS, "hal"},
    "hal/host_module/include": set(),
    "hal/host_module": {BASE, "hal", "hal/host_module/include", "hal/image"},
    "hal/soft": {
        BASE,
        ARGS,
        "hal",
        "hal/host_module",
        "hal/links",
        "hal/soft/comm",
        "hal/splice",
    },
    "hal/splice": {BASE, "hal", "hal/host_module/include"},
    "hal/soft/comm": {BASE, ARGS, "hal", "hal/links"},
    "hal/cuda": {
        BASE,
        ARGS,
        "hal",
        "hal/host_module",
        "hal/image",
        "hal/links",
        "hal/splice",
    },
    "hal/record": {BASE, ARGS, "hal", "hal/image", "hal/soft"},
    "hal/template": {BASE, ARGS, "hal"},
    "hal/devices": {BASE, "hal", "hal/cuda", "hal/record", "hal/soft", "hal/splice"},
    "interceptors/client": {BASE, ARGS, WIRE, TRANSPORT, CLIENT, CORE},
    "interceptors/server": {BASE, ARGS, WIRE, SERVER},
    "interceptors/cudart": {BASE},
    "interceptors/mathlibs": {BASE},
    "interceptors/nccl": {ARGS, BASE, CORE},
    "interceptors/nvml": {BASE},
    "torch": set(),
    "torch/client": {"torch"},
    "torch/client/c10d": {"torch", "torch/client"},
    "torch/executor": {WIRE, "torch", "hal/host_module/include"},
}


# A folder of build/gen -> the layer that it belongs to.
GENERATED = {
    "args": ARGS,
    "wire": WIRE,
    "server": SERVER,
    "client": "interceptors/client",
    "nccl": "interceptors/nccl",
    "nvml": "interceptors/nvml",
    "mathlibs": "interceptors/mathlibs",
    "cudart-12": "interceptors/cudart",
    "cudart-13": "interceptors/cudart",
}
GEN = ROOT / "build" / "gen"
SEES_VENDOR_HEADERS = {"hal/cuda", "interceptors/client", "interceptors/cudart"}

# A domain of the driver API -> the domains whose client halves its own calls. All may call "graph/hooks", which is what
# capture and graphs' memory mean to the others, so that graphs can stand above them.
HOOKS = "graph/hooks"
MAY_CALL: dict[str, set[str]] = {
    HOOKS: set(),
    "entrypoint": set(),
    "link": set(),
    "logs": set(),
    "module": set(),
    "hostmem": {HOOKS},
    "managed": {HOOKS},
    "memory": {HOOKS, "hostmem", "managed"},
    "vmm": {"memory"},
    "texture": {HOOKS, "memory"},
    "copies": {HOOKS, "managed", "memory", "texture"},
    "launch": {HOOKS, "memory", "module"},
    "sync": {HOOKS, "launch"},
    "graph": {HOOKS, "launch", "managed", "memory", "module", "sync"},
    "context": {HOOKS, "sync", "texture"},
    "comm": {HOOKS},
}


def folder_of(path: str) -> str:
    """The key of MAY_INCLUDE for a path under devproxy/. A domain's two halves are two folders; the libraries above the
    driver stand alone; hal/devices.* alone knows all devices, and the server's main.cc alone knows hal/devices.h."""
    folder, _, name = path.rpartition("/")
    if path == "csrc/server/main.cc":
        return "csrc/server/main"
    if folder == "hal" and name.startswith("devices."):
        return "hal/devices"
    if not folder.startswith("interceptors") or folder in MAY_INCLUDE:
        return folder
    return "interceptors/server" if name.startswith("server") else "interceptors/client"


def layer_of(include: str) -> str | None:
    """The layer of what an #include names; None for the system's headers and the vendor's."""
    if include.startswith("devproxy/"):
        return folder_of(include.removeprefix("devproxy/"))
    return generated().get(include)


@functools.cache
def generated() -> dict[str, str]:
    """Name of a generated header -> its layer."""
    return {name.split("/")[1]: GENERATED[name.split("/")[0]] for name in outputs() if ".h" in name}


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(errors="replace"), re.M)


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 10


def test_csrc_includes_no_vendor_header() -> None:
    core = [p for p in SOURCES if p.is_relative_to(ROOT / "devproxy" / "csrc")]
    assert [(p, i) for p in core for i in includes(p) if VENDOR.match(i.rsplit("/", 1)[-1])] == []


def test_every_folder_has_its_place() -> None:
    found = {folder_of(p.relative_to(ROOT / "devproxy").as_posix()) for p in SOURCES}
    assert found == set(MAY_INCLUDE)


def test_no_circle() -> None:
    for layers in (MAY_INCLUDE, MAY_CALL):
        assert list(TopologicalSorter(layers).static_order())  # or CycleError, with the circle


def called(path: Path) -> set[str]:
    """The domains that a client half includes, or whose functions it calls by their namespace."""
    text = re.sub(r"//.*", "", path.read_text())
    hooks = re.sub(r"//.*", "", (INTERCEPTORS / "graph" / "hooks.h").read_text())
    found = set(re.findall(r'#include "devproxy/interceptors/(\w+)/client\w*\.h"', text))
    for domain, name in re.findall(rf"\b({'|'.join(MAY_CALL)})::(\w+)", text):
        found.add(HOOKS if domain == "graph" and re.search(rf"\b{name}\b", hooks) else domain)
    return found | ({HOOKS} if "graph/hooks.h" in text else set())


@pytest.mark.parametrize("domain", MAY_CALL)
def test_domains_call_only_those_below(domain: str) -> None:
    """What is listed is called, and nothing else: a list that allows more than there is hides the next knot."""
    if domain == HOOKS:
        found = called(INTERCEPTORS / "graph" / "hooks.h") - {"launch"}  # a struct, declared
    else:
        files = [
            p
            for p in (INTERCEPTORS / domain).iterdir()
            if p.suffix in (".h", ".cc") and not p.name.startswith(("server", "hooks"))
        ]
        found = set().union(*map(called, files))
    assert found - {domain} == MAY_CALL[domain] - {domain}


def test_every_domain_has_its_place() -> None:
    alone = {folder.split("/")[1] for folder in MAY_INCLUDE if folder.startswith("interceptors/")}
    found = {p.name for p in INTERCEPTORS.iterdir() if p.is_dir()} - alone
    assert found == set(MAY_CALL) - {HOOKS}


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_layer(folder: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)} includes {name}"
        for path in SOURCES
        if folder_of(path.relative_to(ROOT / "devproxy").as_posix()) == folder
        for name in includes(path)
        if layer_of(name) not in MAY_INCLUDE[folder] | {folder, None}
    ]
    assert bad == []


@functools.cache
def units() -> dict[str, list[str]]:
    """Layer -> the command that compiles its files. Headers alone, the template and PyTorch's parts have none."""
    found: dict[str, list[str]] = {}
    for entry in json.loads((ROOT / "build/cmake/compile_commands.json").read_text()):
        file = Path(entry["file"])
        sources = includes(file) if "/Unity/" in entry["file"] else [file]
        layers = set()
        for path in map(Path, sources):
            if path.is_relative_to(GEN):
                layers.add(GENERATED[path.relative_to(GEN).parts[0]])
            else:
                layers.add(folder_of(path.relative_to(ROOT / "devproxy").as_posix()))
        assert len(layers) == 1, f"one target compiles files of several layers: {layers}"
        found.setdefault(layers.pop(), shlex.split(entry["command"]))
    return found


def visible(command: list[str]) -> set[str]:
    """The layers whose headers a compiler that is run so finds."""
    found = set()
    for folder in (Path(word[2:]) for word in command if word.startswith("-I")):
        if folder.parent == GEN:
            found.add(GENERATED[folder.name])
            continue
        assert folder.parent == ROOT / "build/cmake/layers", f"{folder} is of no layer"
        for path, _, files in os.walk(folder / "devproxy"):
            inside = Path(path).relative_to(folder / "devproxy").as_posix()
            found |= {folder_of(f"{inside}/{name}") for name in files}
    return found


def reached(folder: str) -> set[str]:
    """What a folder may include, and what that includes, and so on: a compiler has to find all of it."""
    below = MAY_INCLUDE[folder]
    return below.union(*map(reached, below))


def test_cmake_shows_each_layer_what_it_may_include() -> None:
    for folder, command in units().items():
        seen = visible(command) - {folder}
        assert seen <= reached(folder), f"CMake shows {folder} {seen - reached(folder)}"
        assert seen >= MAY_INCLUDE[folder], f"{folder} may include {MAY_INCLUDE[folder] - seen}"
        vendor = any(word == "-isystem" for word in command)
        assert not vendor or folder in SEES_VENDOR_HEADERS | {"hal/image"}, (
            folder
        )  # image: lz4, zstd
    # C++ that CMake compiles and that is here: no layer is without its check.
    compiled = {
        folder_of(p.relative_to(ROOT / "devproxy").as_posix())
        for p in SOURCES
        if p.suffix in (".c", ".cc") and not p.is_relative_to(ROOT / "devproxy" / "torch")
    }
    assert set(units()) - {"interceptors/mathlibs"} == compiled - {"hal/template"}


@pytest.mark.parametrize(
    ("folder", "allowed", "forbidden"),
    [
        ("hal/soft", "devproxy/hal/hal.h", "wire.gen.h"),
        ("hal/soft", "cuda_number.gen.h", "devproxy/csrc/server/gate.h"),
        ("csrc/client", "devproxy/csrc/base/futex.h", "devproxy/interceptors/memory/client.h"),
        ("csrc/server", "devproxy/hal/hal.h", "devproxy/hal/soft/soft_device.h"),
        ("interceptors/server", "wire.gen.h", "devproxy/csrc/client/attachment.h"),
        ("interceptors/nccl", "devproxy/csrc/core/core.h", "wire.gen.h"),
    ],
)
def test_a_forbidden_include_does_not_compile(folder: str, allowed: str, forbidden: str) -> None:
    command = units()[folder][: units()[folder].index("-o")]

    def preprocessed(header: str) -> subprocess.CompletedProcess[str]:
        line = [*command, "-E", "-o", os.devnull, "-x", "c++", "-"]
        text = f'#include "{header}"\n'
        return subprocess.run(
            line,
            input=text,
            capture_output=True,
            text=True,
            cwd=GEN.parent / "cmake",
        )

    assert preprocessed(allowed).returncode == 0
    assert f"{forbidden}: No such file" in preprocessed(forbidden).stderr


def test_commands_reach_the_device_through_one_door() -> None:
    """A server half, a dump or a restore that held a hal::Space would pass by what looks at every command."""
    halves = [
        p
        for p in SOURCES
        if re.match(
            r"csrc/server/|interceptors/\w+/server", p.relative_to(ROOT / "devproxy").as_posix()
        )
    ]
    names = {
        p.name
        for p in halves
        if re.search(r"\bhal::Space\b(?!::)|\bopen_space\b", re.sub(r"//.*", "", p.read_text()))
    }
    assert names == {"device_door.h"}
