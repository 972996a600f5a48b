"""Brings a job back from an image: into a supervisor whose job is suspended, or from nothing.

In order: read and check the manifest, fetch into a staging folder, put the job's files back, start servers from the
device state (they fill segments and pinned windows and stay parked), restore the processes, let the servers go on.
What fails before the processes live leaves nothing running; files that were put back stay, with the newer ones kept
beside them.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import Any, Protocol

from devproxy import config, fault, machine, runtime, state
from devproxy.checkpoint import criu, facts, files, image, netdiag, store
from devproxy.control import coordinator_api as api
from devproxy.control.coordinator_api import Progress, Report
from devproxy.control.job import Job
from devproxy.control.spec import JobSpec, read_job_file, write_job_file
from devproxy.control.stdio import Stdio
from devproxy.errors import DevproxyError, Refused, RestoreError
from devproxy.log import say
from devproxy.proxy.control_channel import ControlChannel
from devproxy.proxy.janitor import Janitor
from devproxy.proxy.server import Server
from devproxy.proxy.supervisor import Supervisor

OLD_JOURNALS = "old-journals"
SHARED_SUFFIXES = (".seg", ".pinned", ".link")


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
    if not spec.get("name"):
        for other, path, alive in runtime.list_jobs():
            try:
                same = alive and read_job_file(path).get("job_id") == manifest["job_id"]
            except (OSError, ValueError):
                same = False
            if same:
                raise Refused(
                    f"image {spec['image']} is of job {other!r}, which is running",
                    "end it first (devproxy kill), or restore under another name: --name NEW",
                )
    kept = keep_journals(manifest["job_id"])
    folder = runtime.create_job(name)
    if kept:
        os.rename(kept, os.path.join(folder.path, OLD_JOURNALS))
    return folder


def keep_journals(job_id: str) -> str:
    """What a killed job noted of its files, out of its folder, which the next start removes. Empty: there is nothing."""
    for _, path, alive in runtime.list_jobs():
        names = [n for n in os.listdir(path) if n.startswith("files.journal")]
        try:
            if alive or not names or read_job_file(path).get("job_id") != job_id:
                continue
        except (OSError, ValueError):
            continue
        to = os.path.join(runtime.root_path(), f".journals-{os.getpid()}")
        os.mkdir(to, 0o700)
        for name in names:
            os.rename(
                os.path.join(path, name), os.path.join(to, name)
            )  # the tracker knows them by inode
        return to
    return ""


def bring_back(
    request: dict[str, Any], folder: runtime.JobFolder, keeper: Janitor, agent_class: _AgentClass
) -> tuple[Job, Any]:
    """From nothing. Returns the running job and its agent. Raises DevproxyError; then nothing runs."""
    from devproxy.control.coordinator import JobCoordinator

    opened = store.Store.open(request["store"])
    manifest = opened.read_manifest(request["image"])
    spec = JobSpec(**manifest["spec"])
    image_job_id = spec.job_id
    spec.store = request["store"]
    spec.job = folder.name
    spec.started_unix_s = round(time.time(), 3)
    if request.get("name") and request["name"] != manifest["job"]:
        spec.job_id = os.urandom(8).hex()  # a job of its own from here on
    if request.get("gpus"):
        if len(request["gpus"]) != len(spec.gpus):
            raise Refused(
                f"image {request['image']} is of a job with {len(spec.gpus)} GPU(s),"
                f" {len(request['gpus'])} given",
                "name as many",
            )
        spec.gpus = list(request["gpus"])
    lib = ensure_build(opened, manifest, request["image"])
    supervisor = Supervisor()
    descriptors = _descriptors(request.get("output"))
    stdio = Stdio(folder.path, descriptors)
    job = Job(spec, folder, supervisor, keeper, stdio, lib, config.server_path(lib))
    job.phase = api.RESTORING
    try:
        epoch = opened.take_epoch(spec.job_id)
        write_job_file(folder.path, spec, os.getpid())
        stdio.open(manifest["stdio"])
        coordinator = JobCoordinator(job)
        agent = agent_class(job, coordinator)
        try:
            with agent.operation("restore") as report:
                entries = into(
                    job, opened, request["image"], report, put_files=True, image_job_id=image_job_id
                )
                coordinator.adopt(request["image"], epoch, entries)
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
    path = state.build_path(build["id"])
    if os.path.isdir(path):
        return path
    state.subfolder("builds")
    temporary = f"{path}.{os.getpid()}"
    try:
        for name, entry in build["files"].items():
            to = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
            opened.fetch_file(entry["chunks"], to, name=f"image {image_id}: build file {name}")
            os.chmod(to, entry["mode"])
            os.utime(to, ns=(entry["mtime_ns"], entry["mtime_ns"]))
        os.rename(temporary, path)
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
) -> list[files.FileEntry]:
    """Servers and processes of the image into this job. Returns the image's file entries.

    Precondition: no server and no process of the job lives; its FIFOs exist; its streams are paused or not begun.
    """
    spec = job.spec
    stage = "manifest"
    staging = ""
    started: list[Server] = []
    root: int | None = None
    try:
        report(Progress("restore", "reading the manifest"))
        manifest = opened.read_manifest(image_id)
        findings = facts.check_restore(manifest["facts"])
        refusals = [finding.text for finding in findings if finding.refuse]
        for finding in findings:
            if not finding.refuse:
                say(finding.text)
        if refusals:
            raise Refused("; ".join(refusals[:5]))
        stage = "fetch"
        staging = _staging(job, manifest)
        image.fetch(
            opened,
            manifest,
            staging,
            lambda done, total: report(Progress("restore", "fetching", done, total)),
        )
        entries = image.file_entries(manifest)
        if put_files:
            stage = "files"
            report(Progress("restore", "putting the job's files back"))
            fault.point("restore_files")
            put_back(job, opened, manifest, entries, image_job_id or spec.job_id)
        stage = "device"
        report(Progress("restore", "starting servers"))
        fault.point("restore_device")
        remove_shared(job.folder.path)
        started = start_servers(job, spec.gpus, ("--restore", staging, "--restore-shared"))
        stage = "host"
        report(Progress("restore", "restoring the processes"))
        fault.point("restore_host")
        _forget_end(job.folder.path)
        for local, remote in manifest["criu"].get("inside_tcp", []):
            netdiag.destroy_tcp(local, remote)  # in TIME_WAIT after a kill, it would keep the port
        root = criu.find().restore(
            os.path.join(staging, "criu"),
            job_dir=job.folder.path,
            mount_at=mount_point(),
            inherit_fds=_inherited(manifest),
            tcp=manifest["criu"]["tcp"],
            log=os.path.join(staging, "criu-restore.log"),
        )
        stage = "go on"
        for server in started:
            with ControlChannel(job.folder.path, server.gpu, bytes.fromhex(spec.abi)) as channel:
                channel.resume()
        job.restored(root)
        job.stdio.restored()
        if job.stdio.terminal:
            job.send(signal.SIGWINCH)  # this one may have another size
        return entries
    except BaseException as error:
        if root is not None:
            os.kill(root, 9)
        if staging:
            _keep_log(staging, spec.job)
        if started:
            job.supervisor.dismiss(started, grace_s=0.5)
        if isinstance(error, Refused | RestoreError) or not isinstance(error, DevproxyError):
            raise
        raise RestoreError(stage, error.what, error.remedy, "nothing of it runs") from error
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)


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

    old = os.path.join(job.folder.path, OLD_JOURNALS)
    done = tracker.put_back(
        entries,
        fetch,
        say,
        image_time=manifest["created"],
        old_job_dir=old if os.path.isdir(old) else "",
    )
    shutil.rmtree(old, ignore_errors=True)
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


def _keep_log(staging: str, name: str) -> None:
    source = os.path.join(staging, "criu-restore.log")
    if os.path.exists(source):
        shutil.copy(source, os.path.join(state.subfolder("logs"), f"{name}.criu-restore.log"))


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


def _forget_end(job_dir: str) -> None:
    try:
        os.unlink(os.path.join(job_dir, "init.status"))
    except FileNotFoundError:
        pass


def start_servers(job: Job, gpus: list[int], more: tuple[str, ...]) -> list[Server]:
    """One server per GPU of the job, parked. Raises Refused with the server's own words; then none of them runs."""
    spec = job.spec
    fresh = job.supervisor.start_all(
        job.server, job.folder, gpus, spec.device, spec.gpu_memory_bytes, spec.chaos, more
    )
    try:
        job.supervisor.wait_ready(config.start_timeout_s(), lambda: None, fresh)
    except BaseException:
        job.supervisor.dismiss(fresh, grace_s=0.5)
        raise
    return fresh


def remove_shared(job_dir: str) -> None:
    """Segments, pinned windows, links and the slot table of servers that have left."""
    for name in os.listdir(job_dir):
        if name.endswith(SHARED_SUFFIXES) or name == "slots":
            os.unlink(os.path.join(job_dir, name))
