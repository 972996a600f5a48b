# SPDX-License-Identifier: Apache-2.0
"""Brings a job back from an image, from nothing: who it is now, where its streams go, and its coordinator.

What the trees need is node/restore.py's. What fails before the processes live leaves nothing running; files that were
put back stay, with the newer ones kept beside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from devproxy import config, machine, records, runtime, state
from devproxy.checkpoint import image
from devproxy.checkpoint.store import Store
from devproxy.control import coordinator_api as api
from devproxy.control import outputs
from devproxy.control.coordinator import JobCoordinator
from devproxy.control.meeting import Hello
from devproxy.control.serving import Agent
from devproxy.control.side import MEET_S, First, Other, PartAgent, given_up
from devproxy.control.stage_note import MEET, StageNote, note_that_it_waits
from devproxy.errors import Refused
from devproxy.log import say
from devproxy.node import build, kin
from devproxy.node.local import LocalTree
from devproxy.node.restore import Wishes
from devproxy.node.spec import JobSpec, check_encryption, own_id, own_name, write_job_file
from devproxy.node.stages import Progress, Stages
from devproxy.node.stdio import Stdio
from devproxy.node.tree import Tree
from devproxy.proxy import command as cmd
from devproxy.proxy import preflight
from devproxy.proxy.janitor import Janitor
from devproxy.proxy.server_set import ServerSet

INSTEAD = "; or give the new one files of its own: --name NEW --files DIR"


def make_folder(request: dict[str, Any], whole: image.Image) -> runtime.JobFolder:
    """The job folder, under its own name or the new one. Raises Refused where that name, or that job, lives."""
    node = request.get("node") or 0
    name = own_name(request.get("name") or whole.job, node)
    if name == own_name(whole.job, node):
        for other in kin.living(whole, node):
            if other.facts["job_id"] == own_id(whole.job_id, node):
                raise Refused(
                    f"image {whole.id} is of job {other.name!r}, which is running",
                    "end it first (devproxy kill), or restore under another name: --name NEW",
                )
    return runtime.create_job(name)


def _check_files(request: dict[str, Any], whole: image.Image, beside: list[kin.Living]) -> str:
    """The folder of --files, or "". Raises Refused."""
    if not request.get("files"):
        return ""
    base = os.path.realpath(str(request["files"]))
    if len(whole.trees) > 1:
        raise Refused(
            f"--files {base}: image {whole.id} is of a job of {len(whole.trees)} nodes",
            "leave out --files: it is for a job of one node",
        )
    if not request.get("name") or request["name"] == whole.job:
        raise Refused(
            f"--files {base}: with files of its own it is another job",
            "give it another name too: --name NEW",
        )
    if len(beside) > 1:
        names = ", ".join(other.name for other in beside)
        raise Refused(
            f"--files {base}: several jobs have these files ({names}), and each has changed them",
            "end all but one of them (devproxy kill)",
        )
    return base


def bring_back(
    request: dict[str, Any],
    store: Store,
    whole: image.Image,
    folder: runtime.JobFolder,
    janitor: Janitor,
) -> Restored:
    """Raises DevproxyError; then nothing runs, on any node."""
    node = _check_node(request, whole)
    part = whole.trees[node]
    spec = JobSpec(**whole.spec)
    spec.store = request["store"]
    spec.job = folder.name
    spec.started_unix_s = round(time.time(), 3)
    if request.get("name") and request["name"] != whole.job:
        spec.job_id = os.urandom(8).hex()  # a job of its own from here on
        spec.copy_of = kin.first_id(whole)
    spec.job_id = own_id(spec.job_id, node)
    gpus = list(request.get("gpus") or part.gpus)
    # Before it looks: of two restores at once at least one sees the other.
    write_job_file(folder.path, spec, gpus, os.getpid())
    beside = kin.living(whole, node, but=folder.name)
    if files_dir := _check_files(request, whole, beside):
        spec.files_dir, spec.every = files_dir, ""
        write_job_file(folder.path, spec, gpus, os.getpid())
    else:
        for other in beside:
            kin.check_beside(other, whole, instead=INSTEAD)
    if len(gpus) != len(part.gpus):
        raise Refused(
            f"image {whole.id} is of a job with {len(part.gpus)} GPU(s){' on that node' if len(whole.trees) > 1 else ''}, {len(gpus)} given",
            "name as many",
        )
    preflight.check_there(request.get("device") or spec.device, gpus)
    other_device = None
    if request.get("device") and request["device"] != spec.device:
        other_device = (spec.device, request["device"])
        _change_device(spec, gpus, request["device"], whole)
    lib = build.ensure(store, whole)
    servers = ServerSet()
    detached = bool(
        request.get("note")
    )  # not in the foreground, where our own streams are the job's
    output = outputs.choose(
        part.stdio,
        request.get("output"),
        request.get("output_stderr"),
        again=detached
        and not beside
        and not files_dir
        and (request.get("name") or whole.job) == whole.job,
    )
    log = state.log_path(folder.name)
    stdio = Stdio(folder.path, (output.fds[0], output.fds[1], output.fds[2]), log)
    note = StageNote(request.get("note"))
    if len(whole.trees) > 1:
        note.write(MEET)
        note_that_it_waits(folder.path, True)
    side = _meet(request, spec, whole, node)
    place = side.place if side else None
    tree = Tree(spec, gpus, folder, servers, janitor, stdio, lib, config.server_path(lib), place)
    wishes = Wishes(
        put_files=not beside or bool(files_dir),
        looked_beside=True,
        files_dir=files_dir,
        files_of=(beside[0].folder, beside[0].facts["job_id"]) if beside else ("", ""),
        cut_back=tuple(path for _, path, _ in output.cut),
        image_job_id=whole.job_id,
        other_device=other_device,
        allow_other_gpu=bool(request.get("allow_other_gpu")),
    )

    def before_it_runs() -> None:
        records.begin(folder.name, spec.job_id, spec.command, spec.started_unix_s)
        output.cut_back()
        if not detached:  # else the verb says it, and our stderr is the job's log
            for line in output.said:
                say(line)
        tree.begin_streams()

    try:
        write_job_file(folder.path, spec, gpus, os.getpid())
        stdio.open(part.stdio)
        if side is not None:
            side.attach(tree)
        if isinstance(side, Other):
            return Restored(tree, _as_part(note, whole, side, before_it_runs), side)
        if side is not None:
            side.gather(MEET_S, _interrupted)
            coordinator = side.coordinator(phase=api.RESTORING, opened=store)
        else:
            coordinator = JobCoordinator(
                spec, [LocalTree(tree)], lib=lib, phase=api.RESTORING, opened=store
            )
        agent = Agent(folder.path, coordinator)
        try:

            def facts() -> dict[str, Any]:
                return _times(stages) | output.facts(log if detached else "")

            with agent.operation("restore", facts) as report:

                def noted(progress: Progress) -> None:
                    note.write(progress.stage)
                    report(progress)

                stages = Stages(noted, "manifest", f"image {whole.id}", coordinator.record)
                stages.say("checking this machine")
                coordinator.restore(whole, coordinator.gpus, wishes, stages, before_it_runs)
        except BaseException:
            agent.stop()
            raise
        agent.begin()
    except BaseException:
        if tree.root is not None:
            tree.send(9)
        if side is not None:
            side.stop()
        servers.stop()
        raise
    return Restored(tree, agent, side)


class Restored(NamedTuple):
    """A job that runs again, or this node's part of one."""

    tree: Tree
    agent: Agent | PartAgent
    side: First | Other | None

    def stop(self) -> None:
        self.agent.stop()
        if self.side is not None:
            self.side.stop()
        self.tree.servers.stop()


def _check_node(request: dict[str, Any], whole: image.Image) -> int:
    """Which tree of the image. Raises Refused for what does not fit it."""
    nodes, node, meet = len(whole.trees), request.get("node"), request.get("meet")
    if nodes == 1:
        if meet or node is not None:
            raise Refused(
                f"image {whole.id} is of a job of one node", "leave out --node and --meet"
            )
        return 0
    if not meet or node is None:
        raise Refused(
            f"image {whole.id} is of a job of {nodes} nodes",
            f"restore each of them, here or on other hosts: devproxy restore {whole.id} --node K --meet HOST:PORT",
        )
    if not 0 <= node < nodes:
        raise Refused(f"image {whole.id} has no node {node}", f"it has {nodes}, from 0 on")
    return int(node)


def _meet(
    request: dict[str, Any], spec: JobSpec, whole: image.Image, node: int
) -> First | Other | None:
    """The job's nodes find together again. Raises Refused."""
    if len(whole.trees) == 1:
        return None
    hello = Hello(
        job=request.get("name") or whole.job,
        node=node,
        nodes=len(whole.trees),
        device=spec.device,
        abi=spec.abi,
        image=whole.id,
        host=os.uname().nodename,
        encrypt_data=spec.encrypt_data,
    )
    meet, address = request["meet"], request.get("address") or ""
    if node == 0:
        return First(
            meet, hello, job_id=spec.job_id, store=spec.store, network=spec.network, address=address
        )
    other = Other(meet, hello, timeout_s=MEET_S, interrupted=_interrupted, address=address)
    spec.job_id = other.job_id
    return other


def _interrupted() -> None:
    """While it waits for the job's other nodes. Raises Refused where a signal has ended that."""
    try:
        cmd.check_interrupted()
    except cmd.Interrupted as interruption:
        raise given_up(interruption.number) from None


def _as_part(
    note: StageNote,
    whole: image.Image,
    side: Other,
    before_it_runs: Callable[[], None],
) -> PartAgent:
    """This node does what the first one asks for, until the job runs. Raises Refused where it comes to nothing."""
    agent = side.serve()
    try:
        with agent.operation("restore") as report:

            def noted(progress: Progress) -> None:
                note.write(progress.stage)
                report(progress)

            Stages(noted, MEET, f"image {whole.id}").say("waiting for the job's other nodes")
            side.restore(noted, before_it_runs)
    except BaseException:
        agent.stop()
        raise
    return agent


def _times(stages: Stages) -> dict[str, Any]:
    """How long the parts of the restore took, in seconds. They overlap."""
    parts = {f"{name}_s": round(seconds, 4) for name, seconds in stages.seconds.items()}
    return parts | {"restore_s": round(stages.elapsed_s(), 4)}


def _change_device(spec: JobSpec, gpus: list[int], device: str, whole: image.Image) -> None:
    """The job gets another kind of GPU than it was started with. Raises Refused where this machine has none."""
    if device not in ("soft", "cuda") or spec.device not in ("soft", "cuda"):
        raise Refused(
            f"a job of device {spec.device!r} cannot be restored on device {device!r}",
            "soft and cuda can take each other's jobs",
        )
    if spec.encrypt_data:
        check_encryption(device)
    _, note = preflight.choose_device(device, gpus)
    if note:
        say(note)
    # A real GPU has the memory that it has; a simulated one gets what it would get at a start, or what the job needs.
    spec.gpu_memory_bytes = 0
    if device == "soft":
        available = machine.available_memory_bytes(config.sysroot())
        least = 2 * int(whole.sizes["device"])
        default = machine.gpu_memory_bytes(None, len(gpus), available)
        spec.gpu_memory_bytes = max(default, least)
    spec.device = device
