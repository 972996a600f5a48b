# SPDX-License-Identifier: Apache-2.0
"""The words of an entry: who answers an API, what it may send, whether it waits and what the replay log keeps.

Everything that is generated comes from these entries and the header facts in codegen/ir. A symbol without an entry
is exported and refused by name. Whoever writes an entry has read the header's page; until then there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What a virtual handle names: a 64-bit number that the client chose, with this number on top (wire/handle.h).

    The numbers are in images, and none is used again. In lower case the name is the type of a wire field.
    """

    CONTEXT = 1
    STREAM = 2
    EVENT = 3
    MODULE = 4
    FUNCTION = 5
    GRAPH = 12
    ARRAY = 13
    TEXTURE = 14  # and surface objects: for the replay log; the job holds the device's value
    COMM = 15


class Space(Enum):
    """Where an address of a copy is. Beside them ARRAY_COPY has 3, an array (wire/array.h)."""

    DEVICE = 0  # a device address
    PINNED = 1  # an address in the pinned window, the same in both processes
    CHUNK = 2  # a byte offset into the segment's chunks


class Carry(Enum):
    """How a call travels. LOCAL never does; ANNOUNCE is decided in the client and told in order."""

    LOCAL = "local"
    SYNC = "sync"
    ASYNC = "async"
    ANNOUNCE = "announce"


class Log(Enum):
    """What the replay log of the server does with a message."""

    NONE = "none"
    CREATE = "create"
    DESTROY = "destroy"
    SET = "set"


class Capture(Enum):
    """What a call does while some stream of the process captures: the check that its stub makes, and the support page's words.

    NODE and HOOK: the stub calls devproxy::sa::<domain>::captured::<symbol> then, which has the vendor's signature, so a
    missing function is a link error. The others are refused by the stub itself (interceptors/graph/hooks.h), or are not.
    """

    FREE = "free"  # it may be called at any time; what the others mean: emit/docs.py
    NODE = "node"
    HOOK = "depends"
    REFUSED = "refused"
    STREAM = "stream"
    DEVICE = "device"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Op:
    """One message of the wire. Several APIs may travel as the same message (all copies are COPY).

    req, rep: field name -> type ("u8 u16 u32 i32 u64 i64 f32 f64", or a Kind's name for a virtual handle, u64).
    bulk: "in" appends bulk data to the request (inline, or as a list of chunks); "out" appends bytes to the reply.
    server_sa: the interceptor domain whose server half handles it; the dispatch row calls devproxy::server::<domain>::<name>,
    the message's name in lower case, so a missing function is a link error. Empty: answered with success.
    stream: the field that names the stream on which the message is a command.
    log: what the replay log does when the handler says that it is done. handle: the field that names the object. parent: of
    a CREATE, the field of the object that it is made from and goes with. key: of a SET, the field that tells its messages
    apart; one of the same key replaces the earlier. log_bulk: a CREATE is logged with its bulk data.
    communicates: it needs other ranks, so a cut of the job counts it (csrc/server/agreement.h).
    """

    opcode: int
    carry: Carry
    req: dict[str, str] = field(default_factory=dict)
    rep: dict[str, str] = field(default_factory=dict)
    bulk: str = ""
    server_sa: str = ""
    stream: str = ""
    log: Log = Log.NONE
    handle: str = ""
    parent: str = ""
    key: str = ""
    log_bulk: bool = False
    communicates: bool = False


@dataclass(frozen=True)
class Api:
    """One function of a vendor header that is answered.

    client_sa: the interceptor domain; the generated export calls devproxy::sa::<domain>::<symbol> with the vendor's
    own signature, so a missing function is a link error and there is no registry.
    nonnull: pointer parameters that the stub checks first (CUDA_ERROR_INVALID_VALUE).
    ops: the wire messages it may send, the usual one first; empty means that it never leaves the client.
    first: those that it may also send where what it names is used for the first time.
    waits: it returns only when the device has come to a point; with ops empty that is seen in the segment's counters.
    capture: what it does while a stream captures. A driver function that sends, waits, or names a stream or an event must
    say it; None, for the others, is FREE.
    enters: of a runtime library's function. "driver": the driver is initialised first; "context": the thread's device has
    its primary context current first, as that library does it lazily. Empty: neither.
    records: of a runtime library's function. Its failure becomes the thread's last error.
    """

    client_sa: str
    nonnull: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    needs_init: bool = True
    waits: bool = False
    capture: Capture | None = None
    enters: str = ""
    records: bool = True


@dataclass(frozen=True)
class Refused:
    """A function that is refused by name, and why; the support page shows the reason."""

    reason: str


@dataclass(frozen=True)
class Library:
    """A library other than the driver that the job finds under its SONAME; it is answered within the client.

    prefix: of its functions. status, refused, invalid: the vendor's name and number for a refused call, and its number for
    a null pointer. also: names that programs import although the header does not declare them. reason: why what has no
    entry is refused. null_hook: domain.function that says a null pointer in the library's own way, given the names of
    the function and the parameter; it returns the result.
    """

    prefix: str
    soname: str
    status: str
    refused: int
    invalid: int
    reason: str
    also: tuple[str, ...] = ()
    null_hook: str = ""


class Answer(Enum):
    """How a function of a Shim that only tells something is answered; the C signature that it has."""

    NUMBER = "size_t f(void)"
    NUMBER_TO = "status f(int*)"
    PROPERTY = "status f(int which, int*)"  # libraryPropertyType: 0 major, 1 minor, 2 patch
    TEXT = "const char* f(status)"
    TEXT_TO = "status f(status, const char**)"
    TEXT_INTO = "void f(char*, size_t)"


@dataclass(frozen=True)
class Shim:
    """A library of the vendor that the job finds under its SONAME and that refuses every call by name.

    Its functions are those that torch's wheels import (codegen/ir/wheels), and `also`. status, refused: the library's
    own result for what it cannot do, as named in `header`. version: what it says it is. answers: functions that only
    tell something, with the number that they tell. returns: a refusal of another kind, as of a function that gives a
    pointer. node: the version node where no wheel imports a function and so says it.
    """

    what: str
    status: str
    refused: int
    header: str
    version: tuple[int, int, int]
    answers: dict[str, tuple[Answer, int]] = field(default_factory=dict)
    returns: dict[str, int] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    node: str = ""


Declared = tuple[str, tuple[tuple[str, str], ...]]  # result, (type, name) of each parameter


@dataclass(frozen=True)
class Runtime:
    """One major version of a library above the driver, answered in the job's process by calls of the driver's exports.

    Compiled with its own header; hooks, tables of names and stubs of all majors share one folder of interceptors. soname
    is also its symbols' version node. result: the type whose failures are recorded; invalid, refused: its codes for a
    null pointer and for a refused call. names: the enum whose names it gives out as text. declared: functions that no
    header declares for C, also: those of which even the types are unknown (refused).
    """

    soname: str
    header: str
    result: str
    refused: int
    invalid: int
    names: str
    declared: dict[str, Declared] = field(default_factory=dict)
    also: tuple[str, ...] = ()
