# SPDX-License-Identifier: Apache-2.0
"""The messages between device-proxy client and server, in opcode order. Opcodes are never reused.

A change here changes codegen/wire.lock and so the ABI id: client and server of different builds refuse each other.
"""

from __future__ import annotations

from codegen.spec import Carry, Log, Op

SYNC, ASYNC, ANNOUNCE = Carry.SYNC, Carry.ASYNC, Carry.ANNOUNCE

# Opcodes that messages of earlier builds had; none is used again.
RETIRED = {0x0002: "DETACH", 0x0401: "MODULE_LOAD with the image in it"}

OPS: dict[str, Op] = {
    # -- connection
    "NOP": Op(0x0001, SYNC),
    # 0x0002 was DETACH: retired, see RETIRED
    # -- memory: the client's bidirectional allocator decides, the server keeps the mirror (design.md, Memory)
    # kept_bytes: of what the server takes for live, what the program has freed
    "MEM_ALLOC": Op(
        0x0101,
        ANNOUNCE,
        {"addr": "u64", "bytes": "u64", "flags": "u32", "kept_bytes": "u32"},
        server_sa="memory",
    ),
    "MEM_FREE": Op(
        0x0102,
        ANNOUNCE,
        {"addr": "u64", "kept_bytes": "u32", "pad": "u32"},
        server_sa="memory",
    ),
    # physical memory comes in credits: beyond its credit the client asks, so out-of-memory is exact and at the right call
    "MEM_CREDIT": Op(
        0x0103, SYNC, {"bytes": "u64", "minimum": "u64"}, {"granted": "u64"}, server_sa="memory"
    ),
    "MEM_CREDIT_RETURN": Op(0x0104, ANNOUNCE, {"bytes": "u64"}, server_sa="memory"),
    # spare: of what is free, how much may be kept unused, as far as other ranks of the job on the GPU need it. holders: 1 if
    # the reply's tail is to name the other jobs that have memory of the GPU, as text
    "MEM_INFO": Op(
        0x0105,
        SYNC,
        {"holders": "u32", "pad": "u32"},
        {"free": "u64", "total": "u64", "spare": "u64"},
        server_sa="memory",
    ),
    # spaces: codegen/spec.py, Space
    # chunk_release: 1 + index of the chunk to mark free when the command is complete, 0 for none
    "COPY": Op(
        0x0111,
        ASYNC,
        {
            "stream": "stream",
            "dst": "u64",
            "src": "u64",
            "bytes": "u64",
            "dst_space": "u8",
            "src_space": "u8",
            "pad": "u16",
            "chunk_release": "u32",
        },
        server_sa="memory",
        stream="stream",
    ),
    "COPY_2D": Op(
        0x0112,
        ASYNC,
        {
            "stream": "stream",
            "dst": "u64",
            "src": "u64",
            "dst_pitch": "u64",
            "src_pitch": "u64",
            "width_bytes": "u64",
            "height": "u64",
            "dst_space": "u8",
            "src_space": "u8",
            "pad": "u16",
            "chunk_release": "u32",
        },
        server_sa="memory",
        stream="stream",
    ),
    # width: bytes of one element (1, 2, 4); rows of `count` elements, `pitch` bytes apart
    "MEMSET": Op(
        0x0113,
        ASYNC,
        {
            "stream": "stream",
            "dst": "u64",
            "pitch": "u64",
            "count": "u64",
            "rows": "u64",
            "value": "u32",
            "width": "u32",
        },
        server_sa="memory",
        stream="stream",
    ),
    # -- host memory: the pinned window is one shared sparse file per slot
    "HOST_ALLOC": Op(0x0121, ANNOUNCE, {"addr": "u64", "bytes": "u64"}, server_sa="hostmem"),
    "HOST_FREE": Op(0x0122, ANNOUNCE, {"addr": "u64"}, server_sa="hostmem"),
    # another window of the same process, which the server of GPU `gpu` made for its connection `number` in address slot
    # `slot`: from now on HOST_ALLOC may name parts of it, so kernels of all a process's GPUs reach its managed memory
    "HOST_WINDOW": Op(
        0x0123, SYNC, {"number": "u64", "gpu": "u32", "slot": "u32"}, server_sa="hostmem"
    ),
    # -- streams and events: the low 16 bits of a stream handle are its index in the segment's stream table
    "STREAM_CREATE": Op(
        0x0201,
        ANNOUNCE,
        {"stream": "stream", "flags": "u32", "priority": "i32"},
        server_sa="sync",
        log=Log.CREATE,
        handle="stream",
    ),
    "STREAM_DESTROY": Op(
        0x0202, ANNOUNCE, {"stream": "stream"}, server_sa="sync", log=Log.DESTROY, handle="stream"
    ),
    "STREAM_WAIT_EVENT": Op(
        0x0203, ASYNC, {"stream": "stream", "event": "event"}, server_sa="sync", stream="stream"
    ),
    "HOST_FUNC": Op(
        0x0204, ASYNC, {"stream": "stream", "token": "u64"}, server_sa="sync", stream="stream"
    ),
    "HOST_FUNC_DONE": Op(0x0205, ANNOUNCE, {"token": "u64"}, server_sa="sync"),
    # an attribute of CUlaunchAttributeID that streams have; value: the first bytes of the vendor's union, which no such
    # attribute exceeds. It applies to what is submitted later, and its stream may be the legacy one
    "STREAM_SET_ATTRIBUTE": Op(
        0x0206,
        SYNC,
        {
            "stream": "stream",
            "attr": "u32",
            "pad": "u32",
            "value0": "u64",
            "value1": "u64",
            "value2": "u64",
            "value3": "u64",
        },
        server_sa="sync",
        log=Log.SET,
        handle="stream",
        key="attr",
    ),
    # a thread of the client waits for what it sent on this stream, so that the device tells of its completion without
    # delay. Part of a wait of any call, so no call's list of messages names it; sent where ControlPage::wants_awaited
    "STREAM_AWAITED": Op(0x0207, ANNOUNCE, {"index": "u32", "pad": "u32"}, server_sa="sync"),
    "EVENT_CREATE": Op(
        0x0211,
        ANNOUNCE,
        {"event": "event", "flags": "u32", "pad": "u32"},
        server_sa="sync",
        log=Log.CREATE,
        handle="event",
    ),
    "EVENT_DESTROY": Op(
        0x0212, ANNOUNCE, {"event": "event"}, server_sa="sync", log=Log.DESTROY, handle="event"
    ),
    "EVENT_RECORD": Op(
        0x0213,
        ASYNC,
        {"event": "event", "stream": "stream"},
        server_sa="sync",
        log=Log.SET,
        handle="event",
        stream="stream",
    ),
    "EVENT_ELAPSED": Op(
        0x0214, SYNC, {"start": "event", "end": "event"}, {"ms": "f64"}, server_sa="sync"
    ),
    # -- modules: a function's parameter layout comes back as u32 (offset, size) pairs
    # 0x0401 was MODULE_LOAD with the image in it: retired, see RETIRED
    "MODULE_UNLOAD": Op(
        0x0402, ANNOUNCE, {"module": "module"}, server_sa="module", log=Log.DESTROY, handle="module"
    ),
    # bulk in: the name; the reply's tail: n_attributes values (i32) by CUfunction_attribute, then n_params pairs
    "FUNCTION_GET": Op(
        0x0403,
        SYNC,
        {"module": "module", "function": "function"},
        {
            "n_params": "u32",
            "max_threads": "u32",
            "shared_bytes": "u32",
            "regs": "u32",
            "n_attributes": "u32",
            "pad": "u32",
        },
        bulk="in",
        server_sa="module",
        log=Log.CREATE,
        handle="function",
        parent="module",
        log_bulk=True,
    ),
    "MODULE_GLOBAL": Op(
        0x0404,
        SYNC,
        {"module": "module"},
        {"addr": "u64", "bytes": "u64"},
        bulk="in",
        server_sa="module",
    ),
    "FUNCTION_SET_ATTR": Op(
        0x0405,
        SYNC,
        {"function": "function", "attr": "u32", "value": "i32"},
        server_sa="module",
        log=Log.SET,
        handle="function",
        key="attr",
    ),
    # names of the module's kernels from the number `first` on, in the device's order. The reply's tail: n of them, each
    # ending in NUL; all: how many there are
    "FUNCTION_NAMES": Op(
        0x0406,
        SYNC,
        {"module": "module", "first": "u32", "pad": "u32"},
        {"all": "u32", "n": "u32"},
        server_sa="module",
    ),
    # An image is kept once per server, by its content (base/image_hash.h). MODULE_LOAD names it; where the answer is
    # known = 0, nothing was loaded: the client puts the image, in pieces from 0 up, and asks again.
    "IMAGE_PUT": Op(
        0x0411,
        ANNOUNCE,
        {"hash_low": "u64", "hash_high": "u64", "bytes": "u64", "offset": "u64"},
        bulk="in",
        server_sa="module",
    ),
    "MODULE_LOAD": Op(
        0x0412,
        SYNC,
        {"module": "module", "hash_low": "u64", "hash_high": "u64", "bytes": "u64"},
        {"known": "u32", "prints": "u32"},
        server_sa="module",
        log=Log.CREATE,
        handle="module",
    ),
    # bulk in: the packed parameter block, verbatim
    "LAUNCH": Op(
        0x0501,
        ASYNC,
        {
            "function": "function",
            "stream": "stream",
            "grid_x": "u32",
            "grid_y": "u32",
            "grid_z": "u32",
            "block_x": "u32",
            "block_y": "u32",
            "block_z": "u32",
            "shared_bytes": "u32",
            "flags": "u32",
        },
        bulk="in",
        server_sa="launch",
        stream="stream",
    ),
    # the same with launch attributes. bulk in: n_attributes records (hal.h, LaunchAttribute), then the block
    "LAUNCH_EX": Op(
        0x0511,
        ASYNC,
        {
            "function": "function",
            "stream": "stream",
            "grid_x": "u32",
            "grid_y": "u32",
            "grid_z": "u32",
            "block_x": "u32",
            "block_y": "u32",
            "block_z": "u32",
            "shared_bytes": "u32",
            "n_attributes": "u32",
        },
        bulk="in",
        server_sa="launch",
        stream="stream",
    ),
    # -- what only some devices have. kind: hal.h, OccupancyQuery; bulk in: launch attributes, as with LAUNCH_EX
    "OCCUPANCY": Op(
        0x0601,
        SYNC,
        {
            "function": "function",
            "kind": "u32",
            "flags": "u32",
            "shared_bytes": "u64",
            "grid_x": "u32",
            "grid_y": "u32",
            "grid_z": "u32",
            "block_x": "u32",
            "block_y": "u32",
            "block_z": "u32",
        },
        {"value": "i64"},
        bulk="in",
        server_sa="launch",
    ),
    # CUlimit of the process's context on this device
    "SET_LIMIT": Op(
        0x0602, SYNC, {"limit": "u32", "pad": "u32", "value": "u64"}, server_sa="context"
    ),
    "GET_LIMIT": Op(
        0x0603, SYNC, {"limit": "u32", "pad": "u32"}, {"value": "u64"}, server_sa="context"
    ),
    # by which address kernels reach pinned memory: bytes from addr on, inside of one allocation
    "HOST_DEVICE_ADDRESS": Op(
        0x0605, SYNC, {"addr": "u64", "bytes": "u64"}, {"addr": "u64"}, server_sa="hostmem"
    ),
    # functions of their arguments, which travel as bulk (link.h of csrc/args and of csrc/wire). LINK's tail: info_bytes
    # of the driver's log, then error_bytes of its errors; the image is fetched by parts into a chunk of the client's
    "TENSOR_MAP": Op(0x0606, SYNC, {}, bulk="in", server_sa="link"),
    "LINK": Op(
        0x0607,
        SYNC,
        {},
        {
            "result": "i32",
            "info_bytes": "u32",
            "image_bytes": "u64",
            "error_bytes": "u32",
            "pad": "u32",
        },
        bulk="in",
        server_sa="link",
    ),
    "LINK_FETCH": Op(
        0x0608, SYNC, {"offset": "u64", "chunk": "u32", "bytes": "u32"}, server_sa="link"
    ),
    # what this client's streams do and when (csrc/server/trace.h), for a profile in the job. what: 0, it begins, for at most
    # keep_ms; 1, it ends, and `total` events are there; 2 and 3: the tail is events from the number `first` on, or bytes of
    # their names, each behind the other with a NUL, of `total`; 4: they are not needed any more
    "TRACE": Op(
        0x060A,
        SYNC,
        {"what": "u32", "pad": "u32", "keep_ms": "u64", "first": "u64"},
        {"now_ns": "u64", "total": "u64", "lost": "u64"},
        server_sa="context",
    ),
    "RESET_PERSISTING_L2": Op(0x0609, SYNC, server_sa="context"),
    # what kernels printed: the reply's tail is out_bytes of stdout, then err_bytes of stderr; more: ask again. It is
    # answered also after an execution fault
    "OUTPUT": Op(
        0x0604,
        SYNC,
        {},
        {"out_bytes": "u32", "err_bytes": "u32", "more": "u32", "pad": "u32"},
        server_sa="context",
    ),
    # -- arrays, and the objects that show memory to kernels (array.h of csrc/args and of csrc/wire). An array's memory
    # lies wherever the device likes, so it has a handle and no address; its bytes come out of the ledger beside the
    # client's credit
    "ARRAY_CREATE": Op(
        0x0621,
        SYNC,
        {
            "array": "array",
            "width": "u64",
            "height": "u64",
            "depth": "u64",
            "format": "u32",
            "channels": "u32",
            "flags": "u32",
            "pad": "u32",
        },
        server_sa="texture",
        log=Log.CREATE,
        handle="array",
    ),
    "ARRAY_DESTROY": Op(
        0x0622, ANNOUNCE, {"array": "array"}, server_sa="texture", log=Log.DESTROY, handle="array"
    ),
    # bulk in: ArrayCopyArgs
    "ARRAY_COPY": Op(
        0x0623,
        ASYNC,
        {"stream": "stream", "chunk_release": "u32", "pad": "u32"},
        bulk="in",
        server_sa="texture",
        stream="stream",
    ),
    # bulk in: TextureArgs. value: the device's own, which kernels find in their parameters: a restore must make it again
    "TEXTURE_CREATE": Op(
        0x0624,
        SYNC,
        {"texture": "texture"},
        {"value": "u64"},
        bulk="in",
        server_sa="texture",
        log=Log.CREATE,
        handle="texture",
        log_bulk=True,
    ),
    "TEXTURE_DESTROY": Op(
        0x0625,
        ANNOUNCE,
        {"texture": "texture"},
        server_sa="texture",
        log=Log.DESTROY,
        handle="texture",
    ),
    # -- graphs: what was instantiated, as the list of messages that a launch stands for (csrc/wire/graph_step.h)
    # Logged without its bulk: updates change the steps in place, so a dump asks the graph itself for them.
    "GRAPH_CREATE": Op(
        0x0701,
        SYNC,
        {"graph": "graph"},
        bulk="in",
        server_sa="graph",
        log=Log.CREATE,
        handle="graph",
    ),
    # token: of the first HOST_FUNC step; the others count on from it. bulk in: as many bytes of nothing as the steps
    # need ring positions beside the request (docs/protocol.md, Graphs)
    "GRAPH_LAUNCH": Op(
        0x0702,
        ASYNC,
        {"graph": "graph", "stream": "stream", "token": "u64"},
        bulk="in",
        server_sa="graph",
        stream="stream",
        communicates=True,
    ),
    # bulk in: the steps that take the place of steps first .. first + count
    "GRAPH_UPDATE": Op(
        0x0703,
        ANNOUNCE,
        {"graph": "graph", "first": "u32", "count": "u32"},
        bulk="in",
        server_sa="graph",
    ),
    "GRAPH_DESTROY": Op(
        0x0704, ANNOUNCE, {"graph": "graph"}, server_sa="graph", log=Log.DESTROY, handle="graph"
    ),
    # -- communicators (csrc/args/comm.h). Their operations are commands; so is the making of one, which ends when every
    # member has come: the client waits for it on a stream of its own
    # key: what the members know the communicator by (CommKey)
    "COMM_INIT": Op(
        0x0801,
        ANNOUNCE,
        {
            "comm": "comm",
            "stream": "stream",
            "key_low": "u64",
            "key_high": "u64",
            "ranks": "u32",
            "rank": "u32",
        },
        server_sa="comm",
        log=Log.CREATE,
        handle="comm",
        communicates=True,
    ),
    "COMM_DESTROY": Op(
        0x0802, ANNOUNCE, {"comm": "comm"}, server_sa="comm", log=Log.DESTROY, handle="comm"
    ),
    # what was submitted ends without effect; the communicator is good for nothing but its end
    "COMM_ABORT": Op(
        0x0803, ANNOUNCE, {"comm": "comm"}, server_sa="comm", log=Log.SET, handle="comm"
    ),
    # bulk in: CommOp after CommOp. A group is one message, so no cut comes between its members
    "COMM_GROUP": Op(
        0x0804,
        ASYNC,
        {"stream": "stream"},
        bulk="in",
        server_sa="comm",
        stream="stream",
        communicates=True,
    ),
    # state: CommState; bulk out: the text behind it, of kOk for whom an operation waits (hal/comm.h)
    "COMM_STATE": Op(
        0x0805, SYNC, {"comm": "comm"}, {"state": "u32", "pad": "u32"}, bulk="out", server_sa="comm"
    ),
}
