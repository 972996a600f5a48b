# SPDX-License-Identifier: Apache-2.0
"""Processes and threads as such: who runs them, their namespaces, states and leaders, and who traces them."""

from __future__ import annotations

import os

from devproxy import procfs, proctree
from devproxy.checkpoint.dumpable.tree import Process, Tree, name_of, obstacle, process_of

_CAP_SYS_RESOURCE = 24
_NAMESPACES = ("pid", "user", "ipc", "uts", "net", "time", "cgroup")


def check_process(tree: Tree, process: Process, root_pid: int, spaces: dict[str, str]) -> None:
    refuse, status = tree.refusals.append, process.status
    if status.state == "Z":
        return
    if status.uids != (os.getuid(),) * 4 and not _own_capability(_CAP_SYS_RESOURCE):
        refuse(
            obstacle(
                process,
                "",
                f"it runs as uid {status.uids[1]}",
                f"only processes of uid {os.getuid()} can be dumped",
                "run the whole job as one user",
            )
        )
    if status.state == "D":
        wait = "it waits in the kernel, uninterruptibly (state D)"
        refuse(obstacle(process, "", wait, "it cannot be frozen now", "try again", True))
    mine = namespaces(process.pid)
    if "pid" in mine and "pid_for_children" not in mine:  # unshare, and no child yet
        mine["pid_for_children"] = ""
    for name in _NAMESPACES:
        for link in (name, f"{name}_for_children"):
            if link in spaces and link in mine and mine[link] != spaces[link]:
                refuse(
                    obstacle(
                        process,
                        "",
                        f"it made a {name} namespace of its own",
                        "CRIU cannot dump nested ones",
                        "run it without containers, sandboxes and unshare",
                    )
                )
                break
    if not status.inner_session or not status.inner_group:
        which = "process group" if status.inner_session else "session"
        refuse(
            obstacle(
                process,
                "",
                f"the leader of its {which} is outside of the job",
                "it could not be restored into it",
                "start the job through devproxy-run",
            )
        )
    if procfs.thread_timers(process.pid):
        refuse(
            obstacle(
                process,
                "",
                "a POSIX timer that signals one thread (SIGEV_THREAD, SIGEV_THREAD_ID)",
                "CRIU cannot make it again at restore",
                "use a timer that signals the process (SIGEV_SIGNAL), a timerfd or a thread that sleeps",
            )
        )
    if process.pid != root_pid and status.tracer:
        _refuse_traced(tree, process, "", status.tracer)


def namespaces(pid: int) -> dict[str, str]:
    found = {}
    for name in _NAMESPACES:
        # for_children too: after unshare of the PID or time namespace only the next child enters it
        for link in (name, f"{name}_for_children"):
            try:
                found[link] = os.readlink(f"/proc/{pid}/ns/{link}")
            except OSError:
                pass
    return found


def _own_capability(number: int) -> bool:
    me = procfs.status("self")
    return me is not None and me.has_capability(number)


def _refuse_traced(tree: Tree, process: Process, thing: str, tracer: int) -> None:
    tree.refusals.append(
        obstacle(
            process,
            thing,
            f"process {tracer} ({name_of(tracer)}) traces it",
            "a traced process cannot be dumped",
            "detach the debugger or tracer",
        )
    )


def check_threads(tree: Tree, process: Process) -> None:
    """The leader is checked with the process; here are the others."""
    try:
        tids = os.listdir(f"/proc/{process.pid}/task")
    except OSError:
        return
    for tid in tids:
        if int(tid) == process.pid:
            continue
        status = procfs.status(process.pid, int(tid))
        if status is None:
            continue
        if status.tracer and status.tracer != process.status.tracer:
            _refuse_traced(tree, process, f"thread {status.inner_pid}", status.tracer)
        if status.state == "D":
            thing = f"thread {status.inner_pid} ({status.name})"
            wait = "it waits in the kernel, uninterruptibly (state D)"
            tree.refusals.append(
                obstacle(process, thing, wait, "it cannot be frozen now", "try again", True)
            )


def check_zombies(tree: Tree) -> None:
    """proctree leaves zombies out, and with them a leader that has ended before its threads."""
    for process in tree.processes:
        for pid in proctree.children(process.pid):
            child = process_of(pid)
            if child is None or child.status.state != "Z":
                continue
            try:
                threads = len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                continue
            if threads > 1:
                tree.refusals.append(
                    obstacle(
                        child,
                        "",
                        "its first thread has ended and others live on",
                        "CRIU cannot dump that",
                        "let the first thread wait for the others",
                    )
                )
