# SPDX-License-Identifier: Apache-2.0
"""The exception tree. Every error is one line: what failed, on which object, and what to do.

Exit codes of devproxy-run: the command's own; 128+N when signal N ended it; 126 and 127 as a shell gives them; 2 when
nothing was started; 3 when the command ended well but a server had died under it.
"""

from __future__ import annotations

EXIT_REFUSED = 2
EXIT_SERVER_LOST = 3
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


class DevproxyError(Exception):
    """Something failed. `what` names it and the object; `remedy` says what to do about it.

    object: the file, server or image alone, where the error knows it: what a program reads, and what the operation
    that failed over it passes on.
    """

    exit_code = 1

    @property
    def name(self) -> str:
        """Which error it is, for programs: the name of its class."""
        return type(self).__name__

    def __init__(self, what: str, remedy: str = "", *, object: str = "") -> None:
        self.what = " ".join(what.split())
        self.remedy = " ".join(remedy.split())
        self.object = " ".join(object.split())
        super().__init__(f"{self.what}: {self.remedy}" if self.remedy else self.what)


class Refused(DevproxyError):
    """Bad input or a machine that cannot do it. Nothing was started."""

    exit_code = EXIT_REFUSED


class CommandNotFound(DevproxyError):
    exit_code = EXIT_NOT_FOUND


class CommandNotExecutable(DevproxyError):
    exit_code = EXIT_CANNOT_EXECUTE


class ServerUnreachable(DevproxyError):
    """A server does not answer on its socket."""


class ServerStopped(ServerUnreachable):
    """It lives, and a signal has stopped it: nothing is lost."""


class OperationFailed(DevproxyError):
    """A verb failed in the middle. stage: where; object: what was in the way; state: of the job, now."""

    verb = "operation"

    def __init__(
        self, stage: str, what: str, remedy: str = "", state: str = "", object: str = ""
    ) -> None:
        super().__init__(what, remedy, object=object)
        self.stage = " ".join(stage.split())
        self.state = " ".join(state.split())

    def __str__(self) -> str:
        stage = f"{self.verb} failed at {self.stage}: " if self.stage else ""
        where = f" [{self.object}]" if self.object and self.object not in self.what else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        who = "" if "job" in self.state else "the job: "
        state = f" ({who}{self.state})" if self.state else ""
        return f"{stage}{self.what}{where}{remedy}{state}"


class CheckpointError(OperationFailed):
    verb = "checkpoint"


class SuspendError(CheckpointError):
    verb = "suspend"


class RestoreError(OperationFailed):
    verb = "restore"


class MigrateError(OperationFailed):
    verb = "migrate"


class ResizeError(MigrateError):
    verb = "resize"


def object_of(error: BaseException) -> str:
    """What the error is about, where it knows."""
    if isinstance(error, DevproxyError):
        return error.object
    return str(error.filename or "") if isinstance(error, OSError) else ""


# How an error travels: the first class that fits gives the gRPC status code. The caller gets the same class again.
GRPC_CODES: tuple[tuple[type[DevproxyError], str], ...] = (
    (OperationFailed, "ABORTED"),
    (ServerUnreachable, "UNAVAILABLE"),
    (Refused, "FAILED_PRECONDITION"),
    (DevproxyError, "INTERNAL"),
)
