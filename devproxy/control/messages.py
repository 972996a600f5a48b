# SPDX-License-Identifier: Apache-2.0
"""Between the wire and the rest: facts and errors to and from protobuf messages, addresses of sockets."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import urllib.parse
from contextlib import suppress
from typing import Any, NoReturn

from devproxy import config, errors
from devproxy.control import trust as trust_module
from devproxy.control._pb import job_pb2 as pb
from devproxy.control.coordinator_api import ImageFacts, JobStatus, NodeServers
from devproxy.control.quiet_grpc import grpc
from devproxy.control.trust import Trust
from devproxy.errors import DevproxyError, OperationFailed
from devproxy.node.stages import Progress

ERROR_KEY = "devproxy-error-bin"
TAKEN_KEY = "devproxy-taken"
# gRPC refuses metadata above 8 KiB.
LONGEST_TEXT = 2000
LONGEST_FIELD = 400
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Two daemons, or two agents, must never share a socket.
    ("grpc.so_reuseport", 0),
]


def address(socket_path: str) -> str:
    """gRPC's name of a unix socket. It reads the path as part of a URI."""
    return "unix:" + urllib.parse.quote(socket_path)


def open_channel(socket_path: str) -> grpc.Channel:
    # A subchannel of its own: a socket that was replaced must not meet a connection to the one before.
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(address(socket_path), options=options)


def open_far_channel(where: str, trust: Trust) -> grpc.Channel:
    """To HOST:PORT, where both ends show their certificate."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", trust_module.NAME)]
    return grpc.secure_channel(where, trust.channel(), options=options)


# -- names and texts --------------------------------------------------------------------------------------------------

_ODD = re.compile("[\udc80-\udcff]")
_PACKED_ODD = re.compile("\0([89a-f][0-9a-f])")


def packed(value: Any) -> Any:
    """Strings, also in lists and dicts, as protobuf takes them. Bytes of a name that are no UTF-8 are lone surrogates in
    Python (PEP 383); here they become NUL, which no name has, and two digits."""
    if isinstance(value, str):
        return _ODD.sub(lambda odd: f"\0{ord(odd[0]) - 0xDC00:02x}", value)
    if isinstance(value, dict):
        return {packed(key): packed(item) for key, item in value.items()}
    return [packed(item) for item in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any) -> Any:
    """What packed() was given."""
    if isinstance(value, str):
        return _PACKED_ODD.sub(lambda odd: chr(0xDC00 + int(odd[1], 16)), value)
    if isinstance(value, dict):
        return {unpacked(key): unpacked(item) for key, item in value.items()}
    return [unpacked(item) for item in value] if isinstance(value, list | tuple) else value


# -- facts ----------------------------------------------------------------------------------------------------------


def progress_to_pb(progress: Progress) -> pb.Progress:
    return pb.Progress(**packed(dataclasses.asdict(progress)))


def progress_from_pb(message: pb.Progress) -> Progress:
    return Progress(message.stage, unpacked(message.text), message.done_bytes, message.total_bytes)


def image_to_pb(facts: ImageFacts) -> pb.ImageFacts:
    values = dataclasses.asdict(facts)
    stages = [pb.StageTime(stage=name, seconds=s) for name, s in values.pop("stages").items()]
    return pb.ImageFacts(**packed(values), stages=stages)


def image_from_pb(message: pb.ImageFacts) -> ImageFacts:
    values = {f.name: getattr(message, f.name) for f in dataclasses.fields(ImageFacts)}
    values["stages"] = {stage.stage: stage.seconds for stage in message.stages}
    values["warnings"] = list(message.warnings)
    return ImageFacts(**unpacked(values))


def status_to_pb(status: JobStatus) -> pb.JobStatus:
    return pb.JobStatus(**packed(dataclasses.asdict(status)))


def status_from_pb(message: pb.JobStatus) -> JobStatus:
    values: dict[str, Any] = {
        f.name: getattr(message, f.name) for f in dataclasses.fields(JobStatus)
    }
    for name in ("gpus", "here", "nodes"):
        values[name] = list(values[name])
    values["command"] = list(message.command)
    if not message.HasField("next_checkpoint_unix_s"):
        values["next_checkpoint_unix_s"] = None
    return JobStatus(**unpacked(values))


def elsewhere_to_pb(nodes: list[NodeServers]) -> pb.ServersElsewhere:
    told = (
        pb.NodeServers(node=n.node, servers_json=json.dumps(n.servers), problem=n.problem)
        for n in nodes
    )
    return pb.ServersElsewhere(nodes=told)


def elsewhere_from_pb(message: pb.ServersElsewhere) -> list[NodeServers]:
    return [NodeServers(n.node, json.loads(n.servers_json), n.problem) for n in message.nodes]


# -- errors ---------------------------------------------------------------------------------------------------------


def _known_class(error: BaseException) -> type[DevproxyError]:
    """The class of devproxy/errors.py that this error is: what the other side can make again."""
    for cls in type(error).__mro__:
        if cls.__module__ == errors.__name__ and issubclass(cls, DevproxyError):
            return cls
    return DevproxyError


def error_to_pb(error: BaseException) -> pb.ErrorInfo:
    """Any exception; one that is not ours is a bug, and says its class, unless the machine has no room."""
    if isinstance(error, DevproxyError):
        what, remedy, exit_code = error.what, error.remedy, error.exit_code
    elif isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f" for {error.filename}" if error.filename else ""
        what, exit_code = f"{error.strerror}{where}", 1
        places = (
            f"the state folder {config.state_dir()}, {config.shm_dir()} or where that file goes"
        )
        remedy = f"make room in {places}, and try again"
    else:
        what = " ".join(f"internal error: {type(error).__name__}: {error}".split())
        remedy, exit_code = "see the log; report it", 1

    def field(name: str) -> str:
        return str(packed(str(getattr(error, name, "") or "")[:LONGEST_FIELD]))

    return pb.ErrorInfo(
        kind=_known_class(error).__name__,
        what=packed(what[:LONGEST_TEXT]),
        remedy=packed(remedy[:LONGEST_TEXT]),
        stage=field("stage"),
        object=field("object"),
        state=field("state"),
        exit_code=exit_code,
    )


def error_from_pb(info: pb.ErrorInfo) -> DevproxyError:
    """The same error on this side. A class that a newer devproxy knows becomes a plain DevproxyError."""
    found = getattr(errors, info.kind, None)
    cls = found if isinstance(found, type) and issubclass(found, DevproxyError) else DevproxyError

    error: DevproxyError
    if issubclass(cls, OperationFailed):
        fields = (info.stage, info.what, info.remedy, info.state, info.object)
        error = cls(*map(unpacked, fields))
    else:
        error = cls(unpacked(info.what), unpacked(info.remedy))
        for name in ("stage", "object", "state"):
            if value := getattr(info, name):
                setattr(error, name, unpacked(value))
    error.exit_code = info.exit_code or error.exit_code
    return error


def grpc_code(error: BaseException) -> grpc.StatusCode:
    for cls, code in errors.GRPC_CODES:
        if isinstance(error, cls):
            return grpc.StatusCode[code]
    return grpc.StatusCode.INTERNAL


def taken(context: grpc.ServicerContext) -> None:
    """Tells the caller, before anything is done, that its call will be."""
    with suppress(grpc.RpcError):  # it has left
        context.send_initial_metadata(((TAKEN_KEY, "1"),))


def not_taken(context: grpc.ServicerContext) -> NoReturn:
    """Ends the call of somebody who came too late; nothing was done."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "it is leaving")
    raise AssertionError("abort returned")


def was_not_taken(call: Any) -> bool:
    """Waits for the other side's first word. True: there was none, and nothing was done."""
    if any(key == TAKEN_KEY for key, _ in call.initial_metadata() or ()) or call.is_active():
        return False  # active: an older daemon, which does not say so
    return bool(call.code() == grpc.StatusCode.UNAVAILABLE)


def abort(context: grpc.ServicerContext, error: BaseException) -> NoReturn:
    """Ends the call with the error, whole."""
    info = error_to_pb(error)
    context.set_trailing_metadata(((ERROR_KEY, info.SerializeToString()),))
    text = str(error) if isinstance(error, DevproxyError) else info.what
    context.abort(grpc_code(error), packed(text[:LONGEST_TEXT]))
    raise AssertionError("abort returned")


def carried_error(error: grpc.RpcError) -> DevproxyError | None:
    """The error that the other side gave, or None where the transport itself failed."""
    metadata: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    for key, value in metadata or ():
        if key == ERROR_KEY:
            info = pb.ErrorInfo()
            info.ParseFromString(value if isinstance(value, bytes) else value.encode("latin-1"))
            return error_from_pb(info)
    return None
