"""Who may include whom (CONTRIBUTING.md): grep, because it is simple and nothing can hide from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [p for p in (ROOT / "devproxy").rglob("*") if p.suffix in (".h", ".cc", ".cpp", ".c")]
VENDOR = re.compile(r"^(cuda|cudaTypedefs|nvml|nccl|cublas|cudnn)[\w]*\.h$|^cuda_.*\.h$")
DEVICE_SIDE = r"csrc/(transport|client|server)/|interceptors/"
# folder (pattern of the path under devproxy/) -> what none of its files may include
FORBIDDEN = [
    (r"csrc/base/", r"csrc/(wire|transport|client|server)/|interceptors/|hal/"),
    (r"csrc/wire/", r"csrc/(transport|client|server)/|interceptors/|hal/"),
    (r"csrc/transport/", r"csrc/(client|server)/|interceptors/|hal/"),
    (r"csrc/client/", r"csrc/server/|hal/"),
    (r"csrc/server/", r"csrc/client/"),
    (r"interceptors/\w+/client", r"csrc/server/|hal/"),
    (r"interceptors/\w+/server", r"csrc/client/"),
    (r"hal/", DEVICE_SIDE + r"|torch/"),
    (r"torch/client/", DEVICE_SIDE + r"|torch/executor/|hal/"),
    (r"torch/executor/", DEVICE_SIDE + r"|torch/client/|hal/(?!host_module/include/)"),
]


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(errors="replace"), re.M)


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 10


def test_csrc_includes_no_vendor_header() -> None:
    core = [p for p in SOURCES if p.is_relative_to(ROOT / "devproxy" / "csrc")]
    assert [(p, i) for p in core for i in includes(p) if VENDOR.match(i.rsplit("/", 1)[-1])] == []


@pytest.mark.parametrize(("folder", "forbidden"), FORBIDDEN)
def test_layer(folder: str, forbidden: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)} includes {name}"
        for path in SOURCES
        if re.match(folder, path.relative_to(ROOT / "devproxy").as_posix())
        for name in includes(path)
        if re.match("devproxy/(" + forbidden + ")", name)
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
