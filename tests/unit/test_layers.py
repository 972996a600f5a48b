# SPDX-License-Identifier: Apache-2.0
"""Who may include whom (CONTRIBUTING.md): grep, because it is simple and nothing can hide from it."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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
    "csrc/server/main": {BASE, SERVER, "hal", "hal/devices"},
    "csrc/init": set(),
    "csrc/hostlib": set(),
    "hal": {BASE, ARGS},
    "hal/image": {BASE},
    "hal/host_module/include": set(),
    "hal/host_module": {BASE, "hal", "hal/host_module/include"},
    "hal/soft": {BASE, ARGS, "hal", "hal/host_module", "hal/soft/comm", "hal/soft/splice"},
    "hal/soft/splice": {BASE, "hal", "hal/host_module/include"},
    "hal/soft/comm": {BASE, ARGS, "hal"},
    "hal/cuda": {BASE, ARGS, "hal", "hal/host_module", "hal/image"},
    "hal/record": {BASE, ARGS, "hal", "hal/image", "hal/soft"},
    "hal/template": {BASE, ARGS, "hal"},
    "hal/devices": {BASE, "hal", "hal/cuda", "hal/record", "hal/soft"},
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
        if name.startswith("devproxy/")
        and folder_of(name.removeprefix("devproxy/")) not in MAY_INCLUDE[folder] | {folder}
    ]
    assert bad == []


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
