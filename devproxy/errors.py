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
    """Something failed. `what` names it and the object; `remedy` says what to do about it."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = " ".join(what.split())
        self.remedy = " ".join(remedy.split())
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
