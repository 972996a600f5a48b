"""Brings a job back from an image: into a supervisor whose job is suspended, or from nothing.

In order: read and check the manifest, fetch into a staging folder, put the job's files back, start servers from the
device state (they fill segments and pinned windows and stay parked), restore the processes, let the servers go on.
What fails before the processes live leaves nothing running; files that were put back stay, with the newer ones kept
beside them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from devproxy import config, fault, machine, runtime, state
from devproxy.checkpoint import criu, criu_image, facts, files, image, netdiag, store
from devproxy.checkpoint.errors import ImageError
from devproxy.control import coordinator_api as api
from devproxy.control.coordinator_api import Progress, Report
from devproxy.control.job import Job
from devproxy.control.spec import JobSpec, read_job_file, write_job_file
from devproxy.control.stage_note import StageNote
from devproxy.control.stdio import Stdio
from devproxy.errors import DevproxyError, Refused, RestoreError, object_of
from devproxy.log import say
from devproxy.proxy import preflight, supervisor
from devproxy.proxy.control_channel import ControlChannel
from devproxy.proxy.janitor import Janitor
from devproxy.proxy.server import Server
from devproxy.proxy.supervisor import Supervisor

fault.register("restore_fetch", "the manifest is read, nothing is fetched")
fault.register(
    "restore_files", "all is fetched, the servers are there, the job's files are not put back"
)
fault.register("restore_device", "device state is fetched, no server is started")
fault.register("restore_host", "the servers have the device state, the processes are not restored")
fault.register(
    "restore_root", "CRIU has made the tree's root; the rest is not there, none of it runs"
)
fault.register("restore_go_on", "processes and servers are back, the servers stand still")

SHARED_SUFFIXES = (".seg", ".pinned", ".link")


class Times:
    """How long the parts of a restore took, in seconds. They overlap."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._parts[part] = time.monotonic() - begin

    def facts(self) -> dict[str, Any]:
        parts = {f"{name}_s": round(seconds, 4) for name, seconds in self._parts.items()}
        return parts | {"restore_s": round(time.monotonic() - self._begin, 4)}


@contextmanager
def _beside(action: Callable[[], None], times: Times, part: str) -> Iterator[Future[None]]:
    """Runs the action in a thread while the block runs. The end of both is waited for, however the block ends."""

    def timed() -> None:
        with times(part):
            action()

    with ThreadPoolExecutor(1, thread_name_prefix=part) as pool:
        yield pool.submit(timed)


class _AgentClass(Protocol):
    def __call__(self, job: Job, coordinator: Any) -> Any: ...


def mount_point() -> str:
    """Where a job sees its own folder."""
    return os.path.join(runtime.root_path(), runtime.MOUNT_NAME)


def make_folder(spec: dict[str, Any]) -> runtime.JobFolder:
    """The job folder, under its own name or the new one. Raises Refused where that name, or that job, lives."""
    opened = store.Store.open(spec["store"])
    manifest = opened.read_manifest(spec["image"])
    name = spec.get("name") or manifest["job"]
    image.check(manifest, spec["image"])
    other, _ = _living(manifest["job_id"])
    if other and name == manifest["job"]:
        raise Refused(
            f"image {spec['image']} is of job {other!r}, which is running",
            "end it first (devproxy kill), or restore under another name: --name NEW",
        )
    return runtime.create_job(name)


def _living(job_id: str) -> tuple[str, str]:
    """(name, folder) of the job with that id if it lives on this host, else empty ones."""
    for name, path, alive in runtime.list_jobs():
        try:
            if alive and read_job_file(path).get("job_id") == job_id:
                return name, path
        except (OSError, ValueError):
            pass
    return "", ""


def _check_beside(name: str, folder: str, manifest: dict[str, Any]) -> None:
    """A second copy beside the living job `name`: its files cannot be taken back under its feet."""
    tracker = files.FilesTracker(folder, state.state_dir(), job_id=manifest["job_id"])
    changed = tracker.would_change(image.file_entries(manifest))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise Refused(
            f"job {name!r}, of which image {manifest['image']} is, runs and has changed files since:"
            f" {', '.join(changed[:3])}{more}",
            "end it first (devproxy kill): the image needs them as they were",
        )


def bring_back(
    request: dict[str, Any], folder: runtime.JobFolder, keeper: Janitor, agent_class: _AgentClass
) -> tuple[Job, Any]:
    """From nothing. Returns the running job and its agent. Raises DevproxyError; then nothing runs."""
    from devproxy.control.coordinator import JobCoordinator

    opened = store.Store.open(request["store"])
    manifest = opened.read_manifest(request["image"])
    image.check(manifest, request["image"])
    spec = JobSpec(**manifest["spec"])
    image_job_id = spec.job_id
    spec.store = request["store"]
    spec.job = folder.name
    spec.started_unix_s = round(time.time(), 3)
    if request.get("name") and request["name"] != manifest["job"]:
        spec.job_id = os.urandom(8).hex()  # a job of its own from here on
    original, original_dir = _living(image_job_id)
    if original:
        _check_beside(original, original_dir, manifest)
    if request.get("gpus"):
        if len(request["gpus"]) != len(spec.gpus):
            raise Refused(
                f"image {request['image']} is of a job with {len(spec.gpus)} GPU(s),"
                f" {len(request['gpus'])} given",
                "name as many",
            )
        spec.gpus = list(request["gpus"])
    image_device = spec.device
    if request.get("device") and request["device"] != spec.device:
        _change_device(spec, request["device"], manifest)
    lib = ensure_build(opened, manifest, request["image"])
    supervisor = Supervisor()
    descriptors = _descriptors(request.get("output"))
    stdio = Stdio(folder.path, descriptors)
    job = Job(spec, folder, supervisor, keeper, stdio, lib, config.server_path(lib))
    job.phase = api.RESTORING
    try:
        write_job_file(folder.path, spec, os.getpid())
        stdio.open(manifest["stdio"])
        coordinator = JobCoordinator(job)
        agent = agent_class(job, coordinator)
        try:
            times = Times()
            note = StageNote(request.get("note"))
            with agent.operation("restore", times.facts) as report:

                def noted(progress: Progress) -> None:
                    note.write(progress.stage)
                    report(progress)

                into(
                    job,
                    opened,
                    request["image"],
                    noted,
                    put_files=not original,
                    image_job_id=image_job_id,
                    times=times,
                    ready=lambda entries: coordinator.adopt(request["image"], entries),
                    other_device=(image_device, spec.device)
                    if image_device != spec.device
                    else None,
                    allow_other=bool(request.get("allow_other_gpu")),
                )
                # Not before it runs: a restore that fails must not make a job that lives elsewhere stale.
                coordinator.take_epoch()
                _cut_back(manifest, request.get("output"), descriptors[1])
                job.begin_streams()
                job.phase = api.RUNNING
        except BaseException:
            agent.stop()
            raise
        agent.begin()
    except BaseException:
        if job.root is not None:
            job.send(9)
        supervisor.stop()
        raise
    return job, agent


def _change_device(spec: JobSpec, device: str, manifest: dict[str, Any]) -> None:
    """The job gets another kind of GPU than it was started with. Raises Refused where this machine has none."""
    if device not in ("soft", "cuda") or spec.device not in ("soft", "cuda"):
        raise Refused(
            f"a job of device {spec.device!r} cannot be restored on device {device!r}",
            "soft and cuda can take each other's jobs",
        )
    _, note = preflight.choose_device(device, spec.gpus)
    if note:
        say(note)
    # A real GPU has the memory that it has; a simulated one gets what it would get at a start, or what the job needs.
    spec.gpu_memory_bytes = 0
    if device == "soft":
        available = machine.available_memory_bytes(config.sysroot())
        least = 2 * int(manifest["sizes"]["device"])
        default = machine.gpu_memory_bytes(None, len(spec.gpus), available)
        spec.gpu_memory_bytes = max(default, least)
    spec.device = device


def _descriptors(output: str | None) -> tuple[int, int, int]:
    """Where the restored job's streams go: the file that was named, or ours."""
    if output is None:
        return (0, 1, 2)
    try:
        fd = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise Refused(
            f"--output {output}: {error.strerror}", "name a file that you may write"
        ) from None
    return (0, fd, fd)


def _cut_back(manifest: dict[str, Any], output: str | None, fd: int) -> None:
    """A file that took the job's output then and shall now: what the job wrote after the cut it will write again."""
    if output is None:
        return
    for stream in manifest["stdio"]["outputs"]:
        file = stream.get("file")
        if file and os.path.realpath(file["path"]) == os.path.realpath(output):
            size = os.fstat(fd).st_size
            if size > file["bytes"]:
                os.ftruncate(fd, file["bytes"])
                say(
                    f"{output}: cut back from {size} to {file['bytes']} bytes,"
                    " where it was when the image was taken"
                )


def ensure_build(opened: store.Store, manifest: dict[str, Any], image_id: str) -> str:
    """The folder with the devproxy files that the image was made with; fetched where it is not there any more."""
    build = manifest["build"]
    path: str = build.get("path") or state.build_path(build["id"])
    state.take_over_build(path)
    if os.path.isdir(path):
        os.utime(path)  # so that no start takes it for unused
        return path
    temporary = f"{path}.{os.getpid()}"
    try:
        for name, entry in build["files"].items():
            to = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
            opened.fetch_file(entry["chunks"], to, name=f"image {image_id}: build file {name}")
            os.chmod(to, entry["mode"])
            os.utime(to, ns=(entry["mtime_ns"], entry["mtime_ns"]))
        state.make_links(temporary)
        try:
            os.rename(temporary, path)
        except OSError:
            if not os.path.isdir(path):  # else another restore was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def into(
    job: Job,
    opened: store.Store,
    image_id: str,
    report: Report,
    *,
    put_files: bool,
    image_job_id: str = "",
    times: Times | None = None,
    ready: Callable[[list[files.FileEntry]], None] = lambda entries: None,
    other_device: tuple[str, str] | None = None,
    allow_other: bool = False,
) -> None:
    """Servers and processes of the image into this job. `ready` is called with the image's files before a process runs.

    Precondition: no server and no process of the job lives; its FIFOs exist; its streams are paused or not begun.
    """
    spec = job.spec
    stage = ""
    staging = ""
    started: list[Server] = []
    root: int | None = None
    times = times or Times()
    servers = f"GPU {', '.join(map(str, spec.gpus))}"
    about = f"image {image_id}"

    def at(name: str, text: str, object: str = "") -> None:
        nonlocal stage, about
        stage, about = name, object or f"image {image_id}"
        report(Progress(stage, text))

    try:
        at("manifest", "reading the manifest")
        manifest = opened.read_manifest(image_id)
        image.check(manifest, image_id)
        entries = image.file_entries(manifest)
        findings = facts.check_restore(
            manifest["facts"], put_back={e.path for e in entries if not e.listed_only}
        )
        here = [supervisor.describe(config.server_path(), spec.device, gpu) for gpu in spec.gpus]
        findings += facts.check_gpus(manifest["facts"], here, other_device, allow_other)
        other_gpu = bool(other_device) or facts.is_other_gpu(manifest["facts"], here)
        refusals = [finding.text for finding in findings if finding.refuse]
        for finding in findings:
            if not finding.refuse:
                say(finding.text)
        # destroy_tcp below must not reach connections that live: a twin of a running job would end that one's.
        refusals += [
            f"the connection {ends} is inside of the image and of a running job too"
            for ends in netdiag.established(manifest["criu"].get("inside_tcp", []))
        ]
        if refusals:
            raise Refused("; ".join(refusals[:5]))
        at("fetch", "fetching")
        fault.point("restore_fetch")
        staging = _staging(job, manifest)
        fetch = image.Fetch(
            opened,
            manifest,
            staging,
            lambda done, total: report(Progress("fetch", "fetching", done, total)),
        )
        with times("fetch_device"):
            fetch.device()
            ensure_build(opened, manifest, image_id)
        at("device", "starting servers with the device memory", servers)
        fault.point("restore_device")
        remove_shared(job.folder.path)
        # Servers fill device memory while the rest is fetched.
        with _beside(fetch.host, times, "fetch_host") as host, times("servers"):
            more = ("--restore", staging, "--restore-shared")
            started = start_servers(job, spec.gpus, (*more, "--other-gpu") if other_gpu else more)
        stage, about = "fetch", f"image {image_id}"
        host.result()
        if put_files:
            at("files", "putting the job's files back")
            fault.point("restore_files")
            with times("files"):
                put_back(job, opened, manifest, entries, image_job_id or spec.job_id)
        at("host", "restoring the processes", f"the processes of job {spec.job}")
        fault.point("restore_host")
        _forget_end(job.folder.path)
        ready(entries)
        job.await_root()
        for local, remote in manifest["criu"].get("inside_tcp", []):
            netdiag.destroy_tcp(local, remote)  # in TIME_WAIT after a kill, it would keep the port
        with times("processes"):
            root = _restore_tree(job, manifest, staging)
        at("go on", "letting the servers go on", servers)
        fault.point("restore_go_on")
        if manifest["criu"]["tcp"] == "established":
            # CRIU keeps all connections or none; those that lead outside have lost their other end.
            for local, remote in manifest["criu"].get("outside_tcp", []):
                netdiag.destroy_tcp(local, remote)
        for server in started:
            with ControlChannel(job.folder.path, server.gpu, bytes.fromhex(spec.abi)) as channel:
                channel.resume()
        job.restored(root)
        job.stdio.restored()
        if job.stdio.terminal:
            job.send(signal.SIGWINCH)  # this one may have another size
    except BaseException as error:
        job.no_root()
        if root is not None:
            os.kill(root, 9)
        if staging:
            kept = keep_log(os.path.join(staging, "criu-restore.log"), spec.job)
            if isinstance(error, criu.CriuError):  # its own words are about a path that goes now
                error.remedy = f"CRIU's log is {kept}" if kept else ""
        if started:
            job.supervisor.dismiss(started, grace_s=0.5)
        if isinstance(error, RestoreError) or not isinstance(error, Exception):
            raise
        if isinstance(error, Refused) and stage == "manifest":
            raise  # nothing was begun
        raise _failure(stage, about, error, opened, image_id) from error
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)


def _failure(
    stage: str, about: str, error: Exception, opened: store.Store, image_id: str
) -> RestoreError:
    """With the image to use instead, where this one is no good."""
    what = error.what if isinstance(error, DevproxyError) else f"{type(error).__name__}: {error}"
    remedy = error.remedy if isinstance(error, DevproxyError) else ""
    if isinstance(error, ImageError):
        try:
            older = opened.older_whole(image_id)
        except (DevproxyError, OSError):
            older = None
        remedy = f"use the older whole image: {older}" if older else "there is no older whole image"
    return RestoreError(stage, what, remedy, "nothing of it runs", object_of(error) or about)


def put_back(
    job: Job,
    opened: store.Store,
    manifest: dict[str, Any],
    entries: list[files.FileEntry],
    job_id: str,
) -> None:
    """The files that the job wrote, as they were at the cut; what somebody else changed since is kept beside."""
    tracker = files.FilesTracker(job.folder.path, state.state_dir(), job_id=job_id)

    def fetch(entry: files.FileEntry, to: str) -> None:
        opened.fetch_file(entry.refs, to, name=f"image {manifest['image']}: file {entry.path}")

    done = tracker.put_back(entries, fetch, say, image_time=manifest["created"])
    for path in done.not_rolled_back:
        say(f"{path} is not part of the image and stays as it is")


def _staging(job: Job, manifest: dict[str, Any]) -> str:
    need = sum(int(manifest["sizes"][kind]) for kind in ("device", "shared", "host"))
    path = os.path.join(job.folder.path, "staging")
    if min(machine.available_memory_bytes() // 2, shutil.disk_usage(job.folder.path).free) < need:
        path = os.path.join(state.subfolder("staging"), job.spec.job_id)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.join(path, "criu"), mode=0o700)
    return path


def keep_log(source: str, name: str) -> str:
    """CRIU's log outlives the staging folder: where it is then, or "" where there is none."""
    if not os.path.exists(source):
        return ""
    to = os.path.join(state.subfolder("logs"), f"{name}.{os.path.basename(source)}")
    try:
        shutil.copy(source, to)
    except OSError:
        return ""  # a full disk: the error that made the log is worth more than this one
    return to


def _inherited(manifest: dict[str, Any]) -> dict[str, int]:
    """The pipe that the job read is ours if we are the same supervisor, else one that has ended."""
    inode = manifest["stdio"].get("stdin_pipe")
    if not inode:
        return {}
    try:
        if os.fstat(0).st_ino == inode:
            return {f"pipe:[{inode}]": 0}
    except OSError:
        pass
    read_end, write_end = os.pipe()
    os.close(write_end)
    return {f"pipe:[{inode}]": read_end}


def _restore_tree(job: Job, manifest: dict[str, Any], staging: str) -> int:
    """The root's process id. Tried again where a mount went away between our look and CRIU's."""
    inherited = _inherited(manifest)
    tries_left = criu.MOUNT_TRIES

    def watch(root: int) -> None:
        job.keeper.watch(root)  # should we be killed now, it ends with us
        fault.point("restore_root")

    images = os.path.join(staging, "criu")
    while True:
        _make_mount_points(manifest["facts"])
        try:
            with _ghosts_laid(images, job.folder.path):
                return criu.find().restore(
                    images,
                    job_dir=job.folder.path,
                    mount_at=mount_point(),
                    inherit_fds=inherited,
                    tcp=manifest["criu"]["tcp"],
                    log=os.path.join(staging, "criu-restore.log"),
                    on_root=watch,
                )
        except criu.CriuError:
            tries_left -= 1
            gone = [p for p, _ in manifest["facts"].get("mounts", []) if not os.path.lexists(p)]
            if not gone or not tries_left:
                raise


@contextmanager
def _ghosts_laid(images_dir: str, job_dir: str) -> Iterator[None]:
    """The files that CRIU makes for deleted ones are not there before the block, nor behind it where it raises.

    An attempt that is ended in the middle leaves them, and with one of them there CRIU refuses to restore. Another
    restore may be making the same right now (a twin, of the same image): a byte of one file is locked for each name,
    in rising order, so that two that have names in common come one after the other and none waits in a circle.
    """
    paths = [_seen_from_here(path, job_dir) for path in criu_image.ghosts(images_dir)]
    places = {hashlib.blake2b(os.fsencode(path), digest_size=7).digest() for path in paths}

    def lay() -> None:
        for path in paths:
            with suppress(OSError):  # most are not there; of one that stays CRIU will say so
                os.unlink(path)

    with open(os.path.join(state.state_dir(), "ghosts.lock"), "wb") as file:
        for place in sorted(places):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, int.from_bytes(place, "big"))
        lay()
        try:
            yield
        except BaseException:
            lay()
            raise


def _seen_from_here(path: str, job_dir: str) -> str:
    """The job's path as the host has it: the same, but for the job's own folder."""
    inside = os.path.relpath(path, mount_point())
    return path if inside.startswith("..") else os.path.join(job_dir, inside)


def _make_mount_points(facts: dict[str, Any]) -> None:
    """A file system that the job saw and that is not mounted any more: CRIU is content with an empty place."""
    for path, is_folder in facts.get("mounts", []):
        if os.path.lexists(path):
            continue
        try:
            os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
            if not is_folder:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise DevproxyError(
                f"{path}, where a file system was mounted when the job started, cannot be made: {error.strerror}",
                "mount it again",
            ) from None
        say(f"{path} was a mounted file system when the job started; now it is an empty place")


def _forget_end(job_dir: str) -> None:
    try:
        os.unlink(os.path.join(job_dir, "init.status"))
    except FileNotFoundError:
        pass


def start_servers(job: Job, gpus: list[int], more: tuple[str, ...]) -> list[Server]:
    """One server per GPU of the job, parked. Raises Refused with the server's own words; then none of them runs."""
    spec = job.spec
    before = list(job.supervisor.servers)
    try:
        fresh = job.supervisor.start_all(
            job.server, job.folder, gpus, spec.device, spec.gpu_memory_bytes, spec.chaos, more
        )
        job.supervisor.wait_ready(config.start_timeout_s(), lambda: None, fresh)
    except BaseException:
        started = [server for server in job.supervisor.servers if server not in before]
        job.supervisor.dismiss(started, grace_s=0.5)
        raise
    return fresh


def remove_shared(job_dir: str) -> None:
    """Segments, pinned windows, links and the slot table of servers that have left."""
    for name in os.listdir(job_dir):
        if name.endswith(SHARED_SUFFIXES) or name == "slots":
            os.unlink(os.path.join(job_dir, name))
