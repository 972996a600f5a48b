# SPDX-License-Identifier: Apache-2.0
"""The user's key, with which manifests are signed: 32 random bytes in a file that only the user can read.

Restoring an image runs what is in it as the user, so an image that somebody else wrote must not be taken for one's own.
"""

from __future__ import annotations

import os
import stat

from devproxy.errors import Refused

VARIABLE = "DEVPROXY_KEY_FILE"
KEY_BYTES = 32


def path() -> str:
    """$DEVPROXY_KEY_FILE, else ~/.config/devproxy/image.key (or the same below $XDG_CONFIG_HOME)."""
    if given := os.environ.get(VARIABLE):
        return os.path.abspath(given)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(config, "devproxy", "image.key")


def load(*, create: bool = True) -> bytes:
    """The key; makes it at first use. Raises Refused for a file that others can read or that is not a key."""
    name = path()
    try:
        return _read(name)
    except FileNotFoundError:
        if not create:
            raise Refused(
                f"key file {name} does not exist",
                f"bring the key that signed the images, or name it with {VARIABLE}",
            ) from None
    except OSError as error:
        raise Refused(
            f"key file {name} cannot be read: {error.strerror}", f"set {VARIABLE}"
        ) from None
    try:
        return _make(name)
    except OSError as error:
        raise Refused(
            f"key file {name} cannot be made: {error.strerror}", f"set {VARIABLE}"
        ) from None


def _make(name: str) -> bytes:
    os.makedirs(os.path.dirname(name), mode=0o700, exist_ok=True)
    # Written under another name and linked: two first uses at once see one whole key, never a half one.
    temporary = f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, name)
        except FileExistsError:
            pass  # the other one was first: its key is the key
    finally:
        os.unlink(temporary)
    return _read(name)


def _read(name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO is no key
    with open(fd, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise Refused(f"key file {name} is not a file", f"remove it or set {VARIABLE}")
        if facts.st_uid != os.geteuid():
            raise Refused(
                f"key file {name} belongs to user {facts.st_uid}, not to you", f"set {VARIABLE}"
            )
        if facts.st_mode & 0o077:
            raise Refused(f"key file {name} can be read by others (mode {facts.st_mode & 0o777:o})",
                          "make a new key, or chmod 600 if nobody can have read it")  # fmt: skip
        data = file.read(KEY_BYTES + 1)
    if len(data) != KEY_BYTES:
        raise Refused(
            f"key file {name} has not {KEY_BYTES} bytes", "bring the right file; images need it"
        )
    return data
