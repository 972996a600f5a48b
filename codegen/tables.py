# SPDX-License-Identifier: Apache-2.0
"""Header facts and entries put together: what each exported symbol does. Pure; raises ValueError on a bad table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from codegen.apis import cuda_driver, cudart, nccl, nvml
from codegen.apis.mathlibs import SHIMS
from codegen.ops import OPS
from codegen.spec import Answer, Api, Carry, Library, Runtime

IR = Path(__file__).parent / "ir"
FORM = re.compile(r"^(?P<base>\w+?)(?P<version>_v\d+)?(?P<form>_pt[ds][sz])?$")
UNCHECKED = "unchecked: nobody has compared this function with its header yet"


@dataclass(frozen=True)
class Function:
    """A declaration of a vendor header: C types and parameter names."""

    name: str
    result: str
    params: tuple[tuple[str, str], ...]  # type, name
    header: str


@dataclass(frozen=True)
class Facts:
    """One file of codegen/ir. versions: base name -> rows of (driver version, thread form, export)."""

    source: str
    functions: dict[str, Function]
    typedefs: dict[str, str]
    structs: dict[str, list[list[str]]]
    versions: dict[str, list[tuple[int, str, str]]]
    enums: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Export:
    """One symbol of a generated library.

    api: the entry that answers, under the name `target`; None: refused with `reason`.
    per_thread: a _ptds or _ptsz variant, where a null stream is the thread's own.
    over_driver: of a library that answers by calls of the driver's exports; its entries name no messages.
    """

    name: str
    family: str
    api: Api | None = None
    target: str = ""
    per_thread: bool = False
    reason: str = ""
    over_driver: bool = False


@cache
def facts(stem: str) -> Facts:
    """Read codegen/ir/<stem>-*.json, or <stem>.*.json where the stem names a major; of several toolkits the newest."""
    newest = max(
        IR.glob(f"{stem}[-.]*.json"),
        key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)],
    )
    raw = json.loads(newest.read_text())
    functions = {
        name: Function(name, result, tuple((kind, param) for kind, param in params), header)
        for name, (result, params, header) in raw["functions"].items()
    }
    versions = {
        k: [(v, form, export) for v, form, export in rows]
        for k, rows in raw.get("versions", {}).items()
    }
    enums = {tag: [(n, v) for n, v in rows] for tag, rows in raw.get("enums", {}).items()}
    return Facts(raw["source"], functions, raw["typedefs"], raw.get("structs", {}), versions, enums)


def canonical(kind: str, typedefs: dict[str, str]) -> str:
    """A type down to scalars and struct pointers; const does not change an ABI."""
    words = kind.replace("*", " * ").split()
    for _ in range(8):
        step = [typedefs.get(w, w) for w in words]
        step = [w if s in ("struct", "enum") else s for w, s in zip(words, step, strict=True)]
        words = " ".join(step).replace("*", " * ").split()
    return " ".join(w for w in words if w != "const")


def same_abi(one: Function, other: Function, typedefs: dict[str, str]) -> bool:
    """True where a caller of the one may be given the other."""
    kinds = [
        [canonical(k, typedefs) for k in (f.result, *(kind for kind, _ in f.params))]
        for f in (one, other)
    ]
    return kinds[0] == kinds[1]


def split(name: str) -> tuple[str, int, str]:
    """('cuMemcpyHtoD', 2, '_ptds') of cuMemcpyHtoD_v2_ptds."""
    match = FORM.match(name)
    if not match:
        raise ValueError(f"{name} is not a symbol name")
    return match["base"], int((match["version"] or "_v1")[2:]), match["form"] or ""


def entries(*chapters: ModuleType) -> dict[str, Api]:
    """Symbol -> Api of some table modules, in table order; raises ValueError where a symbol has two entries."""
    out: dict[str, Api] = {}
    for chapter in chapters:
        for name, value in vars(chapter).items():
            if isinstance(value, Api):
                if name in out:
                    raise ValueError(f"{name} has two entries, the second in {chapter.__name__}")
                out[name] = value
    return out


def chapter_names(*chapters: ModuleType) -> dict[str, str]:
    """Symbol -> the chapter whose table answers it."""
    return {name: c.__name__.rsplit(".", 1)[1] for c in chapters for name in entries(c)}


def answered(name: str, table: dict[str, Api], known: Facts) -> str:
    """The entry that answers a symbol: its own, or a version of it with the same types (""; none)."""
    base, version, form = split(name)
    plain = name.removesuffix(form) if form else name
    if plain in table:
        return plain
    if plain not in known.functions and name not in known.functions:
        return ""
    mine = known.functions.get(plain) or known.functions[name]
    others = sorted((split(e)[1], e) for e in table if split(e)[0] == base)
    for other, entry in others:
        if other > version and same_abi(mine, known.functions[entry], known.typedefs):
            return entry
    return ""


def driver_table() -> dict[str, Api]:
    return entries(*cuda_driver.CHAPTERS)


@cache
def driver_exports() -> tuple[Export, ...]:
    """Every symbol of libcuda.so.1, sorted by name."""
    known, table, chapters = facts("cuda"), driver_table(), chapter_names(*cuda_driver.CHAPTERS)
    by_base: dict[str, list[str]] = {}
    for entry in table:
        by_base.setdefault(split(entry)[0], []).append(entry)
    out = []
    for name in sorted(known.functions):
        base, _, form = split(name)
        candidates = {entry: table[entry] for entry in by_base.get(base, [])}
        target = answered(name, candidates, known)
        if target:
            out.append(Export(name, chapters[target], table[target], target, form != ""))
            continue
        family, reason = "unchecked", UNCHECKED
        if candidates:
            newest = max(candidates, key=lambda e: split(e)[1])
            family, reason = (
                "other versions",
                f"another version of this function is answered: {newest}",
            )
        else:
            for title, (pattern, refused) in cuda_driver.FAMILIES.items():
                if re.fullmatch(pattern, base):
                    family, reason = title, refused.reason
                    break
        out.append(Export(name, family, reason=reason))
    return tuple(out)


def library_of(module: ModuleType) -> Library:
    found = module.LIBRARY
    if not isinstance(found, Library):
        raise ValueError(f"{module.__name__} has no LIBRARY")
    return found


LIBRARIES: dict[str, ModuleType] = {"nvml": nvml, "nccl": nccl}


@cache
def library_exports(stem: str) -> tuple[Export, ...]:
    """Every symbol of libnvidia-ml.so.1 or libnccl.so.2, sorted by name."""
    module = LIBRARIES[stem]
    library, known, table = library_of(module), facts(stem), entries(module)
    out = []
    for name in sorted({*known.functions, *library.also}):
        target = answered(name, table, known) if name in known.functions else ""
        if target:
            out.append(Export(name, stem, table[target], target))
        else:
            out.append(Export(name, stem, reason=library.reason))
    return tuple(out)


@cache
def wheel_imports() -> dict[str, dict[str, dict[str, tuple[str, ...]]]]:
    """What torch's wheels import: torch version -> SONAME -> version node ("" where symbols have none) -> names."""
    out: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
    for path in sorted((IR / "wheels").glob("torch-*.json")):
        out[path.stem.removeprefix("torch-")] = {
            soname: {node: tuple(names) for node, names in found["nodes"].items()}
            for soname, found in json.loads(path.read_text())["libraries"].items()
        }
    return out


@dataclass(frozen=True)
class ShimExport:
    """One symbol of a library of codegen/apis/mathlibs. answer: None where it is refused."""

    name: str
    answer: tuple[Answer, int] | None


def shim_node(soname: str) -> str:
    """The version node of a library's symbols, as the wheels have it; the entry's own where they import none."""
    found = {
        node for wheel in wheel_imports().values() for node in wheel.get(soname, {}) if node
    } or {SHIMS[soname].node}
    if len(found) != 1:
        raise ValueError(f"{soname} has several version nodes: {', '.join(sorted(found))}")
    return found.pop()


@cache
def shim_exports(soname: str) -> tuple[ShimExport, ...]:
    """Every symbol of one library, sorted by name."""
    shim = SHIMS[soname]
    names = set(shim.also) | set(shim.answers)
    for wheel in wheel_imports().values():
        names |= {name for found in wheel.get(soname, {}).values() for name in found}
    return tuple(ShimExport(name, shim.answers.get(name)) for name in sorted(names))


RUNTIMES: dict[str, Runtime] = cudart.MAJORS


@cache
def runtime_facts(stem: str) -> Facts:
    """The header's facts and the functions that it does not declare."""
    known = facts(stem)
    declared = {
        name: Function(name, result, params, "")
        for name, (result, params) in RUNTIMES[stem].declared.items()
    }
    return replace(known, functions=known.functions | declared)


def runtime_table(stem: str) -> dict[str, Api]:
    """The entries of a runtime library that this major has, in table order."""
    known = runtime_facts(stem).functions
    return {name: api for name, api in entries(*cudart.CHAPTERS).items() if name in known}


@cache
def runtime_exports(stem: str) -> tuple[Export, ...]:
    """Every symbol of one major of a runtime library, sorted by name."""
    known, table, chapters = (
        runtime_facts(stem),
        runtime_table(stem),
        chapter_names(*cudart.CHAPTERS),
    )
    out = []
    for name in sorted({*known.functions, *RUNTIMES[stem].also}):
        target = answered(name, table, known)
        if target:
            form = split(name)[2]
            entry = table[target]
            out.append(Export(name, chapters[target], entry, target, form != "", over_driver=True))
            continue
        base = split(name)[0]
        family, reason = "unchecked", UNCHECKED
        for title, (pattern, refused) in cudart.FAMILIES.items():
            if re.fullmatch(pattern, base):
                family, reason = title, refused.reason
                break
        out.append(Export(name, family, reason=reason))
    return tuple(out)


# What no entry says for itself: a thread's own default stream is made when a call first names it, by its form or as
# CU_STREAM_PER_THREAD, and whoever waits fetches what kernels printed.
PER_THREAD = ("STREAM_CREATE",)
WAITING = ("OUTPUT",)


def may_send(export: Export) -> tuple[str, ...]:
    """Every message that a call of an answered export may send."""
    api = export.api
    assert api is not None
    kinds = [kind for kind, _ in facts("cuda").functions[export.target].params]
    return (
        *api.ops,
        *api.first,
        *(PER_THREAD if export.per_thread or "CUstream" in kinds else ()),
        *(WAITING if api.waits else ()),
    )


def status(export: Export) -> str:
    """The word of the support page: local, async, sync, driver, refused or unchecked."""
    if export.api is None:
        return "unchecked" if export.reason == UNCHECKED else "refused"
    if export.api.waits or any(OPS[op].carry is Carry.SYNC for op in export.api.ops[:1]):
        return "sync"
    if export.over_driver:
        return "driver"
    return "async" if export.api.ops else "local"


@cache
def resolver_rows() -> dict[str, list[tuple[int, str, str]]]:
    """Name that cuGetProcAddress knows -> its (driver version, thread form, export) in rising order."""
    known, also = facts("cuda").versions, cuda_driver.entrypoint.ALSO_RESOLVES
    return {
        name: sorted(known.get(name, []) + also.get(name, [])) for name in sorted({*known, *also})
    }


def resolve(symbol: str, version: int, per_thread: bool) -> str:
    """The export that cuGetProcAddress gives ("" where there is none): the model of entrypoint/resolve.h.

    The largest version that is not above the asked one; per-thread variants first where they are wanted.
    """
    rows = resolver_rows().get(symbol, [])
    for wanted in [True, False] if per_thread else [False]:
        fits = [export for v, form, export in rows if v <= version and (form != "") is wanted]
        if fits:
            return fits[-1]
    return ""
