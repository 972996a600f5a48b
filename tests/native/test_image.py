# SPDX-License-Identifier: Apache-2.0
"""hal/image against oracles that are not itself: gcc for layouts, ptxas -v for sizes, readelf for variables."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.needs import require_nvcc
from tests.native.build import as_one

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests" / "image"
SOURCE = ROOT / "tests" / "native" / "image_kernels.cu"
IMAGE = ROOT / "devproxy" / "hal" / "image"
MODES = ("none", "size", "speed", "balance", "default")
ARCHS = ("75", "80", "86", "89", "90", "90a", "100", "103a", "120f")
# Damaged copies per image; DEVPROXY_IMAGE_FUZZ asks for more.
FUZZ = int(os.environ.get("DEVPROXY_IMAGE_FUZZ") or 4000)
# kernel -> its parameters as members of a C struct
STRUCTS = {
    "mixed": "uint8_t a; uint64_t out; uint16_t b; double c; struct Odd d; uint32_t e; struct V16 f; uint8_t g;"
    " struct V64 h; char i;",
    "nothing": "",
    "unused": "int a; long b; short c;",
    "nested": "char a; struct Nested b; struct V128 c; char d; float* e;",
    "aligned_first": "struct V128 a; char b;",
    "big": "struct Big b; uint64_t out;",
    "bounded": "void* p;",
    "dynamic": "void* p;",
    "says": "int x;",
    "takes": "void* x;",
    "local": "void* x; int n;",
    "cluster": "void* x;",
    "_Z9templatedIdLi3EEvPFT_S0_ES0_": "void* f; double x;",
}
TYPES = """
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
struct V16 { _Alignas(16) float x[4]; };
struct V64 { _Alignas(64) uint8_t b[65]; };
struct V128 { _Alignas(128) uint8_t b[5]; };
struct Odd { uint8_t a[3]; };
struct Nested { uint8_t a; double b; uint16_t c[3]; };
struct Big { uint8_t b[32700]; };
"""
# Where a parameter block begins in the constant bank: alignments above 16 count from the bank's beginning. The numbers
# are those of EIATTR_PARAM_CBANK, which this test reads out of each cubin.
BASES = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}


def program() -> Path:
    """image_facts under ASan and UBSan."""
    sources = [ROOT / "tests/native/image_facts.cc", *sorted(IMAGE.glob("*.cc"))]
    sources.append(ROOT / "devproxy/csrc/base/json.cc")
    text = b"".join(p.read_bytes() for p in [*sources, *sorted(IMAGE.glob("*.h"))])
    out = BUILD / f"image_facts-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    if not out.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror"]
        command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
        command += [f"-I{ROOT}", "-o", f"{out}.part", "-x", "c++", "-", "-llz4", "-lzstd"]
        subprocess.run(command, check=True, input=as_one(map(str, sources)), text=True)
        Path(f"{out}.part").rename(out)
    return out


def ask(*words: object) -> Any:
    done = subprocess.run(
        [program(), *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def compiled(name: str, *options: str, source: Path = SOURCE) -> tuple[Path, str]:
    """(the image, what ptxas said); made anew when the source has changed."""
    nvcc = require_nvcc()
    key = hashlib.blake2b(source.read_bytes() + " ".join(options).encode(), digest_size=6)
    out = BUILD / f"{name}-{key.hexdigest()}"
    if not out.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        command = [nvcc, *options, "-Xptxas", "-v", "-o", f"{out}.part", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        out.with_suffix(".log").write_text(done.stderr)
        Path(f"{out}.part").rename(out)
    return out, out.with_suffix(".log").read_text()


def cubin(arch: str) -> tuple[Path, str]:
    return compiled(f"sm_{arch}", "-cubin", f"-arch=sm_{arch}")


def device(arch: str) -> str:
    return re.sub(r"\D", "", arch)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[list[int]]]]:
    """base -> kernel -> [offset, size] of each parameter, by gcc."""
    folder = tmp_path_factory.mktemp("layout")
    found: dict[int, dict[str, list[list[int]]]] = {}
    for base in set(BASES.values()):
        body, main = [TYPES], ["int main(void) {"]
        for kernel, members in STRUCTS.items():
            body.append(f"struct S{kernel} {{ char base[{base}]; {members} }};")
            for name in re.findall(r"(\w+);", members):
                s = f"struct S{kernel}"
                main.append(
                    f'printf("{kernel} %zu %zu\\n", offsetof({s}, {name}) - {base},'
                    f" sizeof((({s}*)0)->{name}));"
                )
        (folder / "l.c").write_text("\n".join([*body, *main, "}"]))
        subprocess.run(["gcc", "-o", folder / "l", folder / "l.c"], check=True)
        rows: dict[str, list[list[int]]] = {kernel: [] for kernel in STRUCTS}
        for line in subprocess.check_output([folder / "l"], text=True).splitlines():
            kernel, offset, size = line.split()
            rows[kernel].append([int(offset), int(size)])
        found[base] = rows
    return found


def base_of(image: bytes) -> Iterator[int]:
    """The begin of each kernel's parameter block: u16 behind the symbol in EIATTR_PARAM_CBANK (format 4, number 0x0a)."""
    for match in re.finditer(re.escape(bytes([4, 0x0A, 8, 0])), image):
        yield struct.unpack_from("<H", image, match.end() + 4)[0]


@pytest.mark.parametrize("arch", ARCHS)
def test_cubin(arch: str, layouts: dict[int, dict[str, list[list[int]]]]) -> None:
    path, said = cubin(arch)
    facts = ask("facts", path, device(arch))
    # 'f' is not written into a cubin, and the 'a' of one means what it means.
    assert facts["arch"] == f"sm_{arch.removesuffix('f')}"
    base = BASES[int(device(arch)) // 10]
    assert base in base_of(path.read_bytes())
    check_layouts(facts, layouts[base])
    check_variables(facts, path)

    # ptxas -v names a kernel, then its frame, then "Used N registers, ... M bytes smem".
    kernels = {k["name"]: k for k in facts["kernels"]}
    blocks = re.findall(
        r"Compiling entry function '(\w+)'.*?\n.*?\n\s*(\d+) bytes stack frame.*?\n"
        r".*?Used (\d+) registers(.*)",
        said,
    )
    assert {name for name, *_ in blocks} == set(STRUCTS)
    for name, frame, regs, rest in blocks:
        shared = re.search(r"(\d+) bytes smem", rest)
        k = kernels[name]
        assert (k["regs"], k["local"], k["shared"]) == (
            int(regs), int(frame), int(shared[1]) if shared else 0,
        ), name  # fmt: skip
    check_rest(kernels, clusters=int(device(arch)) >= 90)


def check_layouts(facts: dict[str, Any], layout: dict[str, list[list[int]]]) -> None:
    kernels = {k["name"]: k for k in facts["kernels"]}
    assert set(kernels) == set(STRUCTS)
    for name, params in layout.items():
        assert kernels[name]["params"] == params, name
        assert kernels[name]["params_bytes"] == (sum(params[-1]) if params else 0), name


def check_rest(kernels: dict[str, Any], clusters: bool) -> None:
    assert {n for n, k in kernels.items() if k["printf"]} == {"says"}
    assert {n for n, k in kernels.items() if k["malloc"]} == {"takes"}
    assert {n: k["max_threads"] for n, k in kernels.items() if k["max_threads"]} == {"bounded": 256}
    wanted = {"cluster": [2, 1, 1]} if clusters else {}
    assert {n: k["cluster"] for n, k in kernels.items() if k["needs_cluster"]} == wanted


def initial() -> dict[str, bytes]:
    return {
        "table": struct.pack("<4I", 11, 22, 33, 44),
        "zeroes": bytes(4096),
        "settings": struct.pack("<4I", 1, 2, 3, 4),
        "factors": struct.pack("<7d", 0.5, -1.25, 0, 0, 0, 0, 0),
        "pointer": bytes(8),  # an address: the loader's to fill in
        "matrix": struct.pack("<6f", 1.5, 0, 0, -2.5, 3, 0),
        "bytes": struct.pack("<5b", -1, 2, -3, 4, -5),
        "wide": struct.pack("<q", -2),
    }


def check_variables(facts: dict[str, Any], path: Path | None) -> None:
    found = {g["name"]: g for g in facts["globals"] if not g["name"].startswith("$")}
    values = initial()
    assert set(found) == set(values)
    for name, value in values.items():
        g = found[name]
        assert g["bytes"] == len(value), name
        assert base64.b64decode(g["initial"]).ljust(len(value), b"\0") == value, name
        assert g["constant"] == (name in ("settings", "factors")), name
        assert g["addresses"] == (name == "pointer"), name
    if path:
        listed = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True).stdout
        rows = re.findall(r"\s(\d+) OBJECT\s+\S+\s+DEFAULT\s+\d+ (\w+)$", listed, re.M)
        assert {name: int(size) for size, name in rows} == {n: len(v) for n, v in values.items()}


@pytest.mark.parametrize("chip", ["75", "80", "89", "90", "100", "120"])
def test_ptx(chip: str, layouts: dict[int, dict[str, list[list[int]]]]) -> None:
    """One PTX text, on each generation of chips: the layout differs for alignments above 16."""
    path, _ = compiled("compute_75", "-ptx", "-arch=compute_75")
    facts = ask("facts", path, chip)
    assert facts["arch"] == "compute_75"
    check_layouts(facts, layouts[BASES[int(chip) // 10]])
    check_variables(facts, None)
    kernels = {k["name"]: k for k in facts["kernels"]}
    assert (kernels["mixed"]["shared"], kernels["local"]["local"]) == (400, 400)
    check_rest(kernels, clusters=False)


@pytest.mark.parametrize("mode", MODES)
def test_fatbin(mode: str) -> None:
    """The entry that a device takes, in each way of packing, equals the cubin or PTX that was put in."""
    codes = [f"arch=compute_{a},code=sm_{a}" for a in ("80", "86", "90", "90a", "100f", "120")]
    codes += ["arch=compute_80,code=compute_80", "arch=compute_90a,code=compute_90a"]
    options = [word for code in codes for word in ("-gencode", code)]
    path, _ = compiled(f"fat-{mode}", "-fatbin", f"-compress-mode={mode}", *options)
    entries = ask("entries", path)
    assert {arch for arch, *_ in entries} == {
        *("sm_80", "sm_86", "sm_90", "sm_90a", "sm_100f", "sm_120"),
        *("compute_80", "compute_90a"),
    }
    packings = {packing for _, packing, _ in entries}
    print(f"{mode}: packings {packings}")
    assert packings == {"none": {0}, "size": {2}, "speed": {0, 1}}.get(mode, {0, 2})
    taken = {
        "75": None, "80": "sm_80", "86": "sm_86", "87": "sm_86", "89": "sm_86", "90": "sm_90a",
        "100": "sm_100f", "103": "sm_100f", "110": "compute_80", "120": "sm_120", "121": "sm_120",
    }  # fmt: skip
    for chip, arch in taken.items():
        facts = ask("facts", path, chip)
        assert facts.get("arch") == arch, (chip, facts)
        if arch is None:
            assert facts["refused"] == 209 and facts["text"].endswith("this device is sm_75")
        elif arch == f"sm_{chip}":
            plain = ask("facts", cubin(chip)[0], chip)
            assert facts["kernels"] == plain["kernels"] and facts["globals"] == plain["globals"]


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text("__device__ int helper(int); __global__ void k(int* x) { *x = helper(1); }")
    relocatable, _ = compiled("rdc", "-cubin", "-arch=sm_90", "-rdc=true", source=source)
    fat = compiled("only80", "-fatbin", "-gencode", "arch=compute_80,code=sm_80")[0].read_bytes()
    images = {
        "relocatable device code": relocatable.read_bytes(),
        "for machine 62": Path("/bin/true").read_bytes(),
        "neither cubin, fat binary nor PTX": b"short",
        "PTX text is damaged": b"this is not an image of any kind",
        "wrapper": struct.pack("<IIQQ", 0x466243B1, 1, 0, 0),
        "holds no code": struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0),
        "version 2 is unknown": struct.pack("<IHHQ", 0xBA55ED50, 2, 16, 0),
        "shorter than it says": fat[:-8],
        "fat binary holds sm_80": fat,
        "cubin is for sm_80": cubin("80")[0].read_bytes(),
    }
    for why, image in images.items():
        (tmp_path / "image").write_bytes(image)
        facts = ask("facts", tmp_path / "image", 90)
        assert facts["refused"] in (200, 209), why
        assert why in facts["text"], facts


@pytest.mark.parametrize("form", ["cubin", "ptx", "none", "size", "speed"])
def test_damaged_images(form: str) -> None:
    """Cut, flipped, overwritten: each copy is taken or refused by name, and never read outside (ASan)."""
    if form == "cubin":
        path, _ = cubin("90")
    elif form == "ptx":
        path, _ = compiled("compute_75", "-ptx", "-arch=compute_75")
    else:
        options = ["-gencode", "arch=compute_90,code=[sm_90,compute_90]"]
        path, _ = compiled(f"fuzz-{form}", "-fatbin", f"-compress-mode={form}", *options)
    ends = ask("fuzz", path, 1, FUZZ)
    print(f"{form}: {FUZZ} damaged copies: {ends}")
    assert sum(ends.values()) == FUZZ
    assert ends["damaged"] > FUZZ // 10
