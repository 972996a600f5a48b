# SPDX-License-Identifier: Apache-2.0
"""The tables agree with the header facts, and what is generated from them is what was meant."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from codegen import check, tables
from codegen.__main__ import LOCK, ROOT, SUPPORT, abi_headers, main, outputs, results, write
from codegen.emit import client, dispatch, docs, library, numbers, wire
from codegen.ops import OPS
from codegen.spec import Api, Capture, Carry, Log, Op

DATA = Path(__file__).parent.parent / "data"
TYPICAL = [
    "cuMemAlloc_v2",
    "cuMemPrefetchAsync",
    "cuEventQuery",
    "cuMemcpyHtoD_v2_ptds",
    "cuCtxDestroy",
    "cuMemcpyHtoDAsync_v2_ptsz",
    "cuCtxSynchronize",
    "cuGetProcAddress_v2",
]


def requests() -> list[tuple[str, int, bool]]:
    """What the libraries of torch 2.11 asked of cuGetProcAddress: name, driver version, per-thread form."""
    rows = [
        line.split() for line in (DATA / "cuGetProcAddress-requests.txt").read_text().splitlines()
    ]
    return [(name, int(version), flags == "flags=2") for name, version, flags in rows]


def test_the_committed_tables_have_no_fault() -> None:
    assert check.table_faults() == []


def test_lock_and_support_page_are_in_step() -> None:
    assert LOCK.read_text() == wire.lock()
    assert SUPPORT.read_text() == docs.emit()


def test_support_page_has_every_function_of_the_driver() -> None:
    """Three chapters (texture, vmm, link) were in no list of the page's, and so on no page."""
    page = SUPPORT.read_text().split("# libcudart.so.12: answered")[0]
    words = set(re.findall(r"\w+", page))
    assert [e.name for e in tables.driver_exports() if e.name not in words] == []


def test_check_changes_nothing_and_takes_less_than_two_seconds(tmp_path: Path) -> None:
    before = (LOCK.stat().st_mtime_ns, SUPPORT.stat().st_mtime_ns)
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "codegen", "--out", str(tmp_path), "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    end = resource.getrusage(resource.RUSAGE_CHILDREN)  # not by the clock: others use the machine
    assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 2
    assert (LOCK.stat().st_mtime_ns, SUPPORT.stat().st_mtime_ns) == before


def test_generator_needs_no_parser_and_nothing_of_devproxy() -> None:
    code = (
        "import sys, codegen.__main__ as m; m.outputs();"
        "print([n for n in sys.modules if n.split('.')[0] in ('pycparser', 'devproxy')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_abi_id_is_of_the_shared_headers_code_alone() -> None:
    text = "struct A {  // bytes\n  uint64_t a;\n};\n"
    same = "// A note.\nstruct A { uint64_t a; };"
    assert wire.abi_id(wire.code_of(text)) == wire.abi_id(wire.code_of(same))
    assert wire.abi_id(wire.code_of(text)) != wire.abi_id(wire.code_of(text.replace("64", "32")))
    assert all(name in abi_headers() for name in ("ControlPage", "AttachRequest", "TensorMapArgs"))


def test_an_unchanged_file_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gen.h"
    assert write(path, "a\n")
    assert not write(path, "a\n")
    assert write(path, "b\n")


def test_every_generated_file_names_the_command_that_made_it() -> None:
    marks = ("// Made by: python3 -m codegen", "/* Made by: python3 -m codegen")
    assert all(text.startswith(marks) for text in outputs().values())


def test_generator_names_no_api() -> None:
    """Special behaviour is a word in the entry; an emitter that knows a function by name is a hook."""
    emitters = [*(ROOT / "codegen/emit").glob("*.py"), ROOT / "codegen/__main__.py"]
    for path in emitters:
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not re.findall(r"\bcu(da)?[A-Z]\w+|\bnvml[A-Z]\w+|\bnccl[A-Z]\w+", code), path


# -- tables


def test_every_header_symbol_is_exported_once() -> None:
    names = [e.name for e in tables.driver_exports()]
    assert len(names) == len(set(names))
    assert set(names) == set(tables.facts("cuda").functions)
    assert {
        "cuMemAlloc",
        "cuMemAlloc_v2",
        "cuLaunchKernel_ptsz",
        "cuMemcpyHtoD_v2_ptds",
        "cuGLInit",
    } <= set(names)


def test_symbols_that_libraries_look_up_by_dlsym_are_exported() -> None:
    wanted = (DATA / "driver-symbols-dlsym.txt").read_text().split()
    names = {e.name for e in tables.driver_exports()}
    # libcufile has functions of its own with the same beginning, and Inductor's wait helpers are static functions of it.
    missing = {n for n in wanted if n not in names and not n.startswith("cuFile")}
    assert missing == set()


def test_nccl_symbols_that_torch_imports_are_exported() -> None:
    wanted = set((DATA / "nccl-symbols-imported-by-torch-2.11.txt").read_text().split())
    assert wanted <= {e.name for e in tables.library_exports("nccl")}


def test_every_refusal_has_a_reason() -> None:
    for export in (
        *tables.driver_exports(),
        *tables.library_exports("nvml"),
        *tables.library_exports("nccl"),
    ):
        assert export.api or export.reason, export.name


def test_an_old_version_is_answered_only_if_its_types_are_the_same() -> None:
    exports = {e.name: e for e in tables.driver_exports()}
    assert exports["cuCtxDestroy"].target == "cuCtxDestroy_v2"
    assert exports["cuMemAlloc"].api is None  # its address and size have 32 bits
    assert "cuMemAlloc_v2" in exports["cuMemAlloc"].reason
    known = tables.facts("cuda")
    for export in exports.values():
        if export.api is not None:
            mine, other = known.functions[export.name], known.functions[export.target]
            assert tables.same_abi(mine, other, known.typedefs), export.name


def test_a_function_without_an_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tables.driver_table()
    rest = {name: api for name, api in table.items() if name != "cuInit"}
    monkeypatch.setattr(tables, "driver_table", lambda: rest)
    tables.driver_exports.cache_clear()
    try:
        export = next(e for e in tables.driver_exports() if e.name == "cuInit")
        assert (export.api, export.reason) == (None, tables.UNCHECKED)
    finally:
        tables.driver_exports.cache_clear()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("managed variables", "cuLibraryGetManaged"),
        ("inter-process handles", "cuIpcOpenMemHandle_v2"),
        ("graphics interop", "cuGraphicsGLRegisterBuffer"),
        ("graphics interop", "cuVDPAUCtxCreate_v2"),
        ("conditional graph nodes", "cuGraphConditionalHandleCreate"),
        ("green contexts", "cuGreenCtxCreate"),
        ("textures and arrays", "cuMipmappedArrayCreate"),
        ("virtual memory management", "cuMemGetHandleForAddressRange"),
        ("profiler", "cuProfilerStart"),
        ("other versions", "cuMemcpyDtoHAsync"),
        ("async notifications", "cuDeviceRegisterAsyncNotification"),
        ("GPUDirect RDMA", "cuFlushGPUDirectRDMAWrites"),
    ],
)
def test_refused_family(family: str, name: str) -> None:
    assert next(e for e in tables.driver_exports() if e.name == name).family == family


def test_every_function_was_compared_with_its_header() -> None:
    """Answered, or refused with a reason of its own. A new toolkit's functions end this, until somebody reads them."""
    exports = [*tables.driver_exports()]
    for stem in tables.RUNTIMES:
        exports += tables.runtime_exports(stem)
    assert [e.name for e in exports if tables.status(e) == "unchecked"] == []


# -- faults that the check must find


def test_repeated_opcode_is_found() -> None:
    faults = check.op_faults({"A": Op(1, Carry.SYNC), "B": Op(1, Carry.SYNC)})
    assert faults == ["message B: opcode 0x0001 is already A's"]


def test_field_that_is_not_aligned_is_found() -> None:
    with pytest.raises(ValueError, match="add a pad field"):
        wire.layout({"flags": "u32", "addr": "u64"})
    assert (
        "not aligned"
        in check.op_faults({"A": Op(1, Carry.SYNC, {"flags": "u32", "addr": "u64"})})[0]
    )
    assert wire.layout({"flags": "u32", "pad": "u32", "addr": "u64"}) == 16


def test_message_whose_end_is_not_aligned_is_found() -> None:
    """The compiler would have found it, in a generated file."""
    faults = check.op_faults({"A": Op(1, Carry.SYNC, {}, {"flags": "u32"}, server_sa="x")})
    assert faults == [
        "message A: {'flags': 'u32'} end at byte 4, no multiple of 8: add a pad field at the end"
    ]


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        (Op(1, Carry.ASYNC, {"a": "u64"}), "no server half handles it (server_sa=)"),
        (
            Op(1, Carry.SYNC, {"a": "event"}, server_sa="x", log=Log.SET),
            "log and handle go together",
        ),
        (
            Op(1, Carry.SYNC, {"a": "event"}, server_sa="x", handle="a"),
            "log and handle go together",
        ),
        (
            Op(1, Carry.SYNC, {"a": "u64"}, server_sa="x", log=Log.SET, handle="a"),
            "its field a is no handle",
        ),
        (
            Op(1, Carry.SYNC, {"a": "event"}, server_sa="x", log=Log.SET, handle="a", parent="a"),
            "parent and log_bulk are for what it creates",
        ),
        (
            Op(
                1,
                Carry.SYNC,
                {"a": "event"},
                server_sa="x",
                log=Log.CREATE,
                handle="a",
                log_bulk=True,
            ),
            "it brings no bulk data",
        ),
        (
            Op(1, Carry.SYNC, {"a": "event"}, server_sa="x", log=Log.SET, handle="a", key="a"),
            "key is a u32 field",
        ),
        (
            Op(
                1, Carry.SYNC, {"a": "event"}, server_sa="x", log=Log.CREATE, handle="a", parent="b"
            ),
            "it has no field b",
        ),
    ],
)
def test_message_that_does_not_hang_together_is_found(op: Op, fault: str) -> None:
    faults = check.op_faults({"A": op})
    assert len(faults) == 1 and fault in faults[0], faults


@pytest.mark.parametrize(
    ("api", "fault"),
    [
        (Api("memory", nonnull=("dprt",)), "nonnull names dprt"),
        (Api("memory", nonnull=("bytesize",)), "is no pointer"),
        (Api("memory", ops=("MEM_ALOC",)), "no message is called MEM_ALOC"),
    ],
)
def test_entry_that_disagrees_with_the_header_is_found(api: Api, fault: str) -> None:
    faults = check.api_faults({"cuMemAlloc_v2": api}, tables.facts("cuda"), OPS)
    assert len(faults) == 1 and fault in faults[0]


@pytest.mark.parametrize(
    ("name", "meets"),
    [
        ("cuStreamGetId", "names a CUstream"),
        ("cuEventSynchronize", "names a CUevent and waits"),
        ("cuCtxSynchronize", "waits"),
        ("cuLaunchKernelEx", "sends LAUNCH"),
        ("cuFuncGetModule", "sends FUNCTION_GET at the first use of what it names"),
    ],
)
def test_entry_that_does_not_say_what_it_does_in_a_capture_is_found(name: str, meets: str) -> None:
    silent = replace(tables.driver_table()[name], capture=None)
    faults = check.capture_faults({name: silent}, tables.facts("cuda"))
    assert faults == [f"{name}: it {meets}: say what it does in a stream capture (capture=)"]


@pytest.mark.parametrize("stem", tables.RUNTIMES)
def test_no_runtime_function_is_said_to_send_nothing(stem: str) -> None:
    """Its entry names no messages: it calls the driver's functions, which send."""
    words = {e.name: tables.status(e) for e in tables.runtime_exports(stem) if e.api}
    assert set(words.values()) == {"driver", "sync"}
    assert (words["cudaLaunchKernel"], words["cudaMemcpy"]) == ("driver", "sync")


def test_generation_stops_at_an_entry_that_is_silent_about_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = tables.driver_table()
    silent = table | {"cuMemsetD8Async": replace(table["cuMemsetD8Async"], capture=None)}
    monkeypatch.setattr(check, "driver_table", lambda: silent)
    monkeypatch.setattr(sys, "argv", ["codegen", "--out", "/nonexistent/written/by/nobody"])
    assert main() == 1


def test_refused_command_without_a_stream_is_found() -> None:
    api = replace(tables.driver_table()["cuCtxSynchronize"], capture=Capture.REFUSED)
    faults = check.capture_faults({"cuCtxSynchronize": api}, tables.facts("cuda"))
    assert faults == ["cuCtxSynchronize: capture=REFUSED, and it names no stream"]


def test_entry_without_a_declaration_is_found() -> None:
    assert (
        "declares no such function"
        in check.api_faults({"cuNope": Api("x")}, tables.facts("cuda"), OPS)[0]
    )


# -- the resolver


@pytest.mark.parametrize(
    ("symbol", "version", "per_thread", "export"),
    [
        ("cuCtxGetDevice", 12080, False, "cuCtxGetDevice"),
        ("cuCtxGetDevice", 13000, False, "cuCtxGetDevice_v2"),
        ("cuCtxSynchronize", 13000, False, "cuCtxSynchronize_v2"),
        ("cuStreamGetCaptureInfo", 11030, False, "cuStreamGetCaptureInfo_v2"),
        ("cuStreamGetCaptureInfo", 12030, True, "cuStreamGetCaptureInfo_v3_ptsz"),
        ("cuEventElapsedTime", 12080, False, "cuEventElapsedTime_v2"),
        ("cuGraphInstantiate", 11000, False, "cuGraphInstantiate_v2"),
        ("cuGraphInstantiate", 12000, False, "cuGraphInstantiateWithFlags"),
        ("cuMemcpyHtoD", 13000, True, "cuMemcpyHtoD_v2_ptds"),
        ("cuMemcpyHtoD", 3020, True, "cuMemcpyHtoD_v2"),  # the per-thread form came with 7.0
        ("cuMemAlloc", 2000, False, "cuMemAlloc"),
        ("cuGetProcAddress", 12000, False, "cuGetProcAddress_v2"),
        ("cuMemAlloc", 1000, False, ""),
        ("cuNope", 13000, False, ""),
    ],
)
def test_resolver_takes_the_newest_version_that_is_not_above(
    symbol: str, version: int, per_thread: bool, export: str
) -> None:
    assert tables.resolve(symbol, version, per_thread) == export


def test_everything_that_torch_asked_for_resolves() -> None:
    assert len(requests()) == 459
    assert [request for request in requests() if not tables.resolve(*request)] == []


# Of the requests, what cudaTypedefs.h does not have: headers of their own (cudaGL.h, cudaEGL.h, cudaVDPAU.h,
# cudaProfiler.h). A driver finds them on any machine, and so does ours: a refused export.
OUTSIDE_CUDA_TYPEDEFS = (
    r"cu(GL|Graphics(GL|EGL|VDPAU)|EGL|VDPAU|Profiler)\w+|cuGraphicsResourceGetMappedEglFrame"
)


def test_names_of_graphics_and_profiler_resolve_to_refused_exports() -> None:
    exports = {e.name: e for e in tables.driver_exports()}
    found = sorted({r[0] for r in requests() if re.fullmatch(OUTSIDE_CUDA_TYPEDEFS, r[0])})
    assert len(found) == 30
    for name, version, per_thread in requests():
        export = exports[tables.resolve(name, version, per_thread)]
        if name in found:
            assert (export.api, export.family) == (
                None,
                "profiler" if "Profiler" in name else "graphics interop",
            )


def test_per_thread_requests_give_the_per_thread_form_where_there_is_one() -> None:
    exports = {e.name for e in tables.driver_exports()}
    wanted = [r for r in requests() if r[2]]
    assert len(wanted) > 70
    for name, version, _ in wanted:
        plain, own = tables.resolve(name, version, False), tables.resolve(name, version, True)
        forms = {f"{plain}_ptds", f"{plain}_ptsz"} & exports
        assert own in (forms or {plain}), name


# -- generated text


def test_typical_stubs() -> None:
    """Golden text. After a wanted change: PYTHONPATH=. python tests/unit/test_codegen.py, and review the difference."""
    assert (DATA / "stubs.golden.txt").read_text() == golden()


def golden() -> str:
    answered = client.answered_exports()
    picked = [client.stub(e, n) for n, e in enumerate(answered) if e.name in TYPICAL]
    picked.append(
        next(line for line in client.emit_refused().splitlines() if "cuLibraryGetManaged" in line)
        + "\n"
    )
    # The numbers follow from all the other entries.
    return re.sub(r"(kApis\[|refuse_export\()\d+", r"\1N", "\n".join(picked))


def test_each_word_of_a_capture_makes_its_check() -> None:
    exports = {e.name: e for e in client.answered_exports()}

    def asked(name: str) -> str:
        export = exports[name]
        return " ".join(client.capture_check(export, client.function_of(export)))

    assert asked("cuGetErrorName") == ""
    assert "return devproxy::sa::sync::captured::cuEventRecord(hEvent, hStream);" in asked(
        "cuEventRecord_ptsz"
    )
    assert "return devproxy::sa::memory::captured::cuMemFree_v2(dptr);" in asked("cuMemFree_v2")
    assert "refuse_command(hStream, &refused)" in asked("cuStreamAddCallback")
    assert "refuse_stream(hStream, &refused)" in asked("cuStreamQuery")
    assert "refuse_stream(&refused)" in asked("cuMemcpyDtoH_v2")  # the default stream
    assert "refuse_device(&refused)" in asked("cuCtxSynchronize")
    assert "refuse_device(ctx, &refused)" in asked("cuCtxSynchronize_v2")
    assert "refuse_unsafe(&refused)" in asked("cuMemAllocHost_v2")
    assert "refuse_unsafe(hEvent, &refused)" in asked("cuEventSynchronize")


def test_a_call_may_send_what_its_entry_names_and_what_its_form_does() -> None:
    exports = {e.name: e for e in client.answered_exports()}

    def names(export: str) -> set[str]:
        bits = client.sends(exports[export])
        return {name for place, name in enumerate(OPS) if bits >> place & 1}

    assert names("cuEventDestroy_v2") == {"EVENT_DESTROY"}
    assert names("cuEventRecord") == {"EVENT_RECORD", "STREAM_CREATE"}
    assert names("cuMemcpyHtoD_v2_ptds") == {"COPY", "STREAM_CREATE"}
    assert names("cuCtxSynchronize") == {"OUTPUT"}
    assert names("cuFuncLoad") == {"FUNCTION_GET", "MODULE_LOAD", "IMAGE_PUT"}
    assert names("cuGetErrorName") == set()
    row = next(row for row in client.emit_client(results()).splitlines() if '{"cuFuncLoad",' in row)
    assert f"{client.sends(exports['cuFuncLoad']):#x}" in row


def test_what_the_interceptor_says_of_a_capture_is_declared() -> None:
    """So that an entry with NODE or HOOK and no captured:: function does not link."""
    text = client.emit_declarations()
    for name, api in tables.driver_table().items():
        own = api.capture in (Capture.NODE, Capture.HOOK)
        assert len(re.findall(rf" {name}\(", text)) == 1 + own, name


def test_result_numbers_are_held_against_the_vendors() -> None:
    assert results()["kInvalidValue"] == (1, "CUDA_ERROR_INVALID_VALUE")
    assert results()["kOutOfMemory"] == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    text = client.emit_client(results())
    assert "static_assert(static_cast<int>(devproxy::kNotReady) == CUDA_ERROR_NOT_READY);" in text


def test_dispatch_table_says_where_the_stream_is() -> None:
    launch, copy = OPS["LAUNCH"], OPS["COPY"]
    assert dispatch.offset(launch, "stream") == 8
    assert dispatch.offset(copy, "stream") == 0
    assert dispatch.offset(OPS["NOP"], "") == -1
    rows = re.findall(
        r'\{"(\w+)", (0x\w+), (\d+), (\d+), (\w+), (\w+), (\w+), (-?\d+), (-?\d+), Log::k(\w+), (\w+), '
        r"(-?\d+), (-?\d+), (-?\d+)\},",
        dispatch.emit(),
    )
    assert [row[0] for row in rows] == list(OPS)
    for (
        name,
        opcode,
        req_bytes,
        _,
        has_bulk,
        is_sync,
        communicates,
        stream,
        _,
        log,
        *logged,
    ) in rows:
        op = OPS[name]
        assert int(stream) == dispatch.offset(op, op.stream)
        assert (log.lower(), logged[0]) == (op.log.value, str(op.log_bulk).lower())
        places = [dispatch.offset(op, word) for word in (op.handle, op.parent, op.key)]
        assert [int(place) for place in logged[1:]] == places
        assert int(opcode, 16) == op.opcode
        assert int(req_bytes) == wire.layout(wire.request_fields(op))
        assert (has_bulk, is_sync, communicates) == (
            str(op.bulk == "in").lower(),
            str(op.carry is Carry.SYNC).lower(),
            str(op.communicates).lower(),
        )


def test_every_message_has_its_handler_and_its_place_in_the_log() -> None:
    text = dispatch.emit_handlers()
    rows = re.findall(r"^    (\S+),  // (\w+)$", text, re.MULTILINE)
    assert [name for _, name in rows] == list(OPS)
    found = {name: row for row, name in rows}
    assert found["NOP"] == "answer"
    assert found["LAUNCH"] == "launch::launch"
    assert found["EVENT_RECORD"] == "logged<sync::event_record>"
    for name, op in OPS.items():
        if op.server_sa:
            result = "void" if op.log is Log.NONE else r"\[\[nodiscard\]\] bool"
            domain = text.split(f"namespace {op.server_sa} {{")[1].split("}")[0]
            assert re.search(rf"^{result} {name.lower()}\(", domain, re.MULTILINE), name


def test_kinds_of_handles_are_those_of_every_image() -> None:
    kinds = re.findall(r"k(\w+) = (\d+),", wire.emit_kinds())
    assert [(name, int(number)) for name, number in kinds] == [
        ("None", 0),
        ("Context", 1),
        ("Stream", 2),
        ("Event", 3),
        ("Module", 4),
        ("Function", 5),
        ("Graph", 12),
        ("Array", 13),
        ("Texture", 14),
        ("Comm", 15),
    ]
    assert wire.HANDLES == {name.lower() for name, _ in kinds[1:]}


def test_numbers_of_the_vendor_have_its_names() -> None:
    found = dict(re.findall(r"int32_t (CU_\w+) = (-?\d+);", numbers.emit()))
    assert found["CU_DEVICE_ATTRIBUTE_WARP_SIZE"] == "10"
    assert found["CU_FUNC_ATTRIBUTE_NUM_REGS"] == "4"
    assert found["CU_FUNC_ATTRIBUTE_MAX"] == "16"  # no number is written in the header
    assert found["CU_EVENT_DISABLE_TIMING"] == "2"


def test_library_without_its_header_declares_what_it_uses() -> None:
    text = library.emit_declarations("nvml")
    assert (
        "struct nvmlMemory_t { unsigned long long total; unsigned long long free; unsigned long long used; };"
        in text
    )
    assert text.index("typedef struct nvmlDevice_st* nvmlDevice_t;") < text.index(
        "nvmlDeviceGetName("
    )


if __name__ == "__main__":
    (DATA / "stubs.golden.txt").write_text(golden())
