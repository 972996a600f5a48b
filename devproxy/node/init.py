# SPDX-License-Identifier: Apache-2.0
"""The job's process tree: pid 1 of a PID and mount namespace (devproxy-init), and the command below it.

The tree's root is a child of this process: devproxy-init's parent part ends at once, and CRIU's does after a restore,
and a subreaper inherits both. Where the privilege for namespaces is missing the command is started as before (plain):
then it cannot be checkpointed, and everything else works.
"""

from __future__ import annotations

import errno
import os
import signal

from devproxy import proctree, runtime
from devproxy.errors import CommandNotExecutable, CommandNotFound, DevproxyError, Refused


class InitFailed(DevproxyError):
    """devproxy-init could not make the namespaces or start the command."""

    exit_code = 2


def may_make_namespaces() -> bool:
    """CAP_SYS_ADMIN, which unshare(2) and mount(2) ask for, and a kernel that lets us use it.

    The capability's bit is looked at first; a container may still forbid the calls, which a child finds out.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 21 & 1)
    return False


def start(
    init: str,
    program: str,
    argv: list[str],
    env: dict[str, str],
    *,
    job_dir: str,
    mount_at: str,
    modes: list[str],
    mask: set[int],
    namespace: int = -1,
) -> int:
    """Starts the tree; returns the outer process id of its root. namespace: a network namespace for it; -1: ours.

    Raises CommandNotFound, CommandNotExecutable or InitFailed; then nothing runs.
    """
    report_read, report_write = os.pipe()
    bits = 0
    for number in mask:
        bits |= 1 << (number - 1)
    command = [init, "--job-dir", job_dir, "--mount-at", mount_at, "--report-fd", str(report_write)]
    command += ["--stdin", modes[0], "--stdout", modes[1], "--stderr", modes[2]]
    if "tty" in modes:
        command.append("--tty")
    if namespace >= 0:
        command += ["--netns-fd", str(namespace)]
        os.set_inheritable(namespace, True)
    command += ["--sigmask", f"{bits:x}", "--", program, *argv]
    os.set_inheritable(report_write, True)
    try:
        pid = os.posix_spawn(
            init, command, env, setsigmask=[], setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
        )
    except OSError as error:
        os.close(report_read)
        raise InitFailed(
            f"{init} cannot be started: {error.strerror}", "build devproxy: make build"
        ) from None
    finally:
        os.close(report_write)
        if namespace >= 0:
            os.set_inheritable(namespace, False)
    with os.fdopen(report_read, "rb") as pipe:
        text = pipe.read().decode(errors="replace").strip()
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
    lines = text.splitlines()
    failed = next((line for line in lines if line.startswith("error:")), None)
    root = next((int(line[4:]) for line in lines if line.startswith("pid ")), None)
    if failed is None and root is not None:
        return root
    if root is not None:
        try:
            os.waitpid(root, 0)
        except ChildProcessError:
            pass
    raise _failure(program, (failed or "error: devproxy-init said nothing")[6:].strip())


def _failure(program: str, text: str) -> DevproxyError:
    if text.startswith("exec ENOENT"):
        return CommandNotFound(
            f"{program}: its interpreter is not there", "see the first line of the file"
        )
    if text.startswith("exec "):
        name = text.split()[1]
        number = next((n for n, e in errno.errorcode.items() if e == name), 0)
        return CommandNotExecutable(f"{program}: {os.strerror(number) if number else text}")
    return InitFailed(
        f"the job's namespaces cannot be made: {text}",
        "see: devproxy doctor; --plain runs the job without them, and without checkpoints",
    )


def read_status(job_dir: str) -> tuple[int, int] | None:
    """(exit code, processes that had to be ended) as devproxy-init left it; None when it was killed itself."""
    try:
        with open(os.path.join(job_dir, "init.status"), encoding="ascii") as file:
            words = file.read().split()
        return int(words[1]), int(words[3])
    except (OSError, ValueError, IndexError):
        return None


def command_lives(root: int) -> bool:
    """Does the job's command live, and not only what it left running, which devproxy-init is ending?"""
    return command_state(root) not in ("", "Z", "X")


def command_state(root: int) -> str:
    """The letter of proc(5) for the job's command; "" where it has ended.

    It is the first child of pid 1, so pid 2 in there, after a restore too.
    """
    for pid in proctree.children(root):
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                facts = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:
            continue
        if facts.get("NSpid", "").split()[-1:] == ["2"]:
            return facts["State"].split()[0]
    return ""


def mount_point() -> str:
    """Where every job of this user sees its own folder, by a mount of its own."""
    return os.path.join(runtime.root_path(), runtime.MOUNT_NAME)


def make_mount_point() -> str:
    """Its path. Raises Refused where it cannot be made."""
    path = mount_point()
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise Refused(f"{path} cannot be made: {error.strerror}") from None
    return path


def kill_tree(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
