# SPDX-License-Identifier: Apache-2.0
"""devproxy-run from the outside, with the real server: exit codes, signals, stdio, ends of every kind, bad input."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft"]
# Initialises the driver, which attaches to the server, says so, and waits.
HOLD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
context = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
memory = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
assert cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(7), ctypes.c_size_t(1 << 20)) == 0
assert cuda.cuCtxSynchronize() == 0
print("up", flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_stays(
    shm_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After every test of this file: no process of ours, nothing in the runtime folder, nothing in TMPDIR."""
    temporary = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(temporary))  # job_env is made of it
    yield
    assert wait_for(lambda: not list(shm_dir.iterdir())), list(shm_dir.rglob("*"))
    mark = str(shm_dir).encode()
    assert wait_for(lambda: not processes_with(mark)), processes_with(mark)
    assert os.listdir(temporary) == []


def wait_for(condition: Callable[[], object], timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_with(mark: bytes) -> list[str]:
    """Processes whose environment or command line names the test's runtime folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if mark in text and int(process.name) != os.getpid():
            found.append(text.decode(errors="replace")[-300:])
    return found


@pytest.fixture
def start(job_env: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(arguments of devproxy-run...) -> Popen; ended with the test."""
    jobs: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **keywords: object) -> subprocess.Popen[str]:
        options: dict[str, object] = {
            "stdin": -3,
            "stdout": -1,
            "stderr": -1,
            "text": True,
            "env": job_env,
        }
        jobs.append(subprocess.Popen([*RUN, *arguments], **(options | keywords)))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.poll() is None:
            job.terminate()
        job.communicate(timeout=30)


def holding(
    start: Callable[..., subprocess.Popen[str]], *options: str, then: str = "time.sleep(1000)"
):
    """A job that has attached to its server, and its processes."""
    job = start(*options, "--", sys.executable, "-c", HOLD + then)
    line = job.stdout.readline()
    assert line == "up\n", job.communicate(timeout=30)
    return job


def children(job: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Of the job's processes those with that name; devproxy-init, whose arguments are the command's, is none of them."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if name in " ".join(line) and "devproxy-init" not in line[0]:
            found.append(process)
    return found


# --- exit codes ---


in_both = pytest.mark.parametrize("how", [[], ["--plain"]], ids=["namespaces", "plain"])


@in_both
@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
def test_exit_code(run_job, script: str, code: int, how: list[str]) -> None:
    assert run_job("sh", "-c", script, options=how).returncode == code


def test_command_not_found(run_job, tmp_path: Path) -> None:
    done = run_job("no-such-command-anywhere")
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    plain = tmp_path / "plain"
    plain.write_text("echo by-sh\n")
    done = run_job(str(plain))
    assert (done.returncode, done.stderr.count("\n")) == (126, 1)
    plain.chmod(0o755)
    assert run_job(str(plain)).stdout == "by-sh\n"  # without #!, as a shell runs it
    plain.write_text("#!/no/such/interpreter\n")
    assert run_job(str(plain)).returncode == 127


# --- stdio ---


def test_pipes(run_job) -> None:
    done = run_job("sh", "-c", "cat; echo err >&2", input="through\n")
    assert (done.stdout, done.stderr) == ("through\n", "err\n")


def test_the_reader_may_leave(job_env: dict[str, str]) -> None:
    line = " ".join([*RUN, "--", "yes"])
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -1; exit ${{PIPESTATUS[0]}}"],
        env=job_env,
        capture_output=True,
    )
    assert done.stdout == b"y\n"
    assert done.returncode == 128 + signal.SIGPIPE


def test_no_descriptor_of_ours_reaches_the_command(run_job) -> None:
    done = run_job(sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))")
    assert done.stdout.split() == ["['0',", "'1',", "'2',", "'3']"]  # 3 is the listing itself


@in_both
def test_closed_stdio(job_env: dict[str, str], how: list[str]) -> None:
    line = " ".join([*RUN, *how, "--", "true"])
    assert subprocess.run(["sh", "-c", f"{line} <&- >&- 2>&-"], env=job_env).returncode == 0


class Terminal:
    """devproxy-run as the session leader's foreground job on a pseudo-terminal, through a shell with job control."""

    def __init__(self, env: dict[str, str], line: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe("bash", ["bash", "--norc", "-i"], env | {"PS1": "@", "TERM": "dumb"})
        self.text = ""
        self.expect("@")
        self.type(line + "\r")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, timeout_s: float = 30) -> None:
        """Waits for the pattern in what comes after the last match."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text)):
            readable, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"no {pattern!r} in {self.text!r}"
            self.text += os.read(self.fd, 65536).decode(errors="replace")
        self.text = self.text[found.end() :]

    def close(self) -> None:
        os.close(self.fd)
        os.waitpid(self.pid, 0)


COUNT_INT = """
import signal, sys, time
hits = []
signal.signal(signal.SIGINT, lambda *_: hits.append(1))
print("tty" if sys.stdin.isatty() and sys.stdout.isatty() else "pipe", "be" + "gun", flush=True)
while not hits: time.sleep(0.05)
time.sleep(0.5)
print("interrupted", len(hits), flush=True)
sys.exit(9)
"""


def test_terminal(job_env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNT_INT)
    terminal = Terminal(job_env, f"{' '.join(RUN)} -- {sys.executable} {script}")
    terminal.expect("tty begun")
    terminal.type("\x1a")  # Ctrl-Z stops the job, and the shell is told
    terminal.expect("Stopped")
    terminal.type("fg\r")
    time.sleep(0.5)
    terminal.type("\x03")  # Ctrl-C reaches it once
    terminal.expect("interrupted 1\r")
    terminal.expect("@")
    terminal.type("echo code=$?\r")
    terminal.expect("code=9")
    terminal.type("exit\r")
    terminal.close()


# --- signals ---


@in_both
@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_signal_is_passed_on_once(start, name: str, how: list[str]) -> None:
    body = f"""
import signal, sys, time
hits = []
signal.signal(signal.SIG{name}, lambda *_: hits.append(1))
print("up", flush=True)
while not hits: time.sleep(0.02)
time.sleep(0.2)
sys.exit(40 + len(hits))
"""
    job = start(*how, "--", sys.executable, "-c", body)
    assert job.stdout.readline() == "up\n"
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert job.wait(20) == 41


@in_both
def test_signal_to_the_whole_group_arrives_once(start, how: list[str]) -> None:
    body = COUNT_INT.replace("SIGINT", "SIGTERM")
    job = start(*how, "--", sys.executable, "-c", body, start_new_session=True)
    assert "begun" in job.stdout.readline()
    os.killpg(job.pid, signal.SIGTERM)  # what `timeout` does
    assert "interrupted 1" in job.stdout.readline()
    assert job.wait(20) == 9


@in_both
def test_stop_and_continue(start, how: list[str]) -> None:
    job = start(
        *how, "--", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"
    )
    job.stdout.readline()
    (command,) = children(job, "time.sleep(1000)")
    job.send_signal(signal.SIGTSTP)
    assert wait_for(
        lambda: command.status() == "stopped" and psutil.Process(job.pid).status() == "stopped"
    )
    job.send_signal(signal.SIGCONT)
    assert wait_for(lambda: command.status() == "sleeping")
    job.terminate()
    assert job.wait(20) == 143


def test_ignored_hangup_stays_ignored(job_env: dict[str, str]) -> None:
    body = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    line = [*RUN, "--", sys.executable, "-c", body]
    done = subprocess.run(["nohup", *line], env=job_env, stdin=-3, capture_output=True, text=True)
    assert done.stdout == "True\n"


# --- the end of each of the three ---


def test_jobs_on_one_gpu_have_their_own_limits(start, run_job) -> None:
    """The smaller one gets all of its size, while the larger one holds memory and the GPU has enough for both."""
    take = (
        "p, n, m = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()\n"
        "assert cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t({} << 20)) == 0\n"
        "assert cu.cuMemGetInfo_v2(ctypes.byref(n), ctypes.byref(m)) == 0\n"
        "print(n.value >> 20, m.value >> 20, flush=True)\n"
    )
    begin = (
        "import ctypes, time\n"
        "cu, c = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()\n"
        "assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) == 0\n"
        "assert cu.cuCtxSetCurrent(c) == 0\n"
    )
    program = begin + take.format(40) + "time.sleep(1000)"
    large = start("--gpu", "0", "--gpu-memory", "128MiB", "--", sys.executable, "-c", program)
    assert large.stdout.readline() == "88 128\n"
    small = run_job(
        sys.executable,
        "-c",
        begin + take.format(60),
        options=["--gpu", "0", "--gpu-memory", "64MiB"],
    )
    assert small.stdout == "4 64\n", small.stderr


# 40 processes look at each GPU, and use one. None ends before all have.
LOOKERS = """
import ctypes, os, sys
done, all_done = os.pipe(), os.pipe()
for number in range(40):
    if os.fork() == 0:
        os.close(all_done[1])
        cuda, name, context = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(64), ctypes.c_void_p()
        codes = [cuda.cuInit(0)] + [cuda.cuDeviceGetName(name, 64, gpu) for gpu in range(4)]
        codes.append(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number % 4))
        os.write(done[1], b"." if not any(codes) else b"x")
        os.read(all_done[0], 1)
        os._exit(0)
print("".join(os.read(done[0], 1).decode() for _ in range(40)))
"""


def test_many_processes_may_look_at_every_gpu(run_job) -> None:
    """There are 128 attachments in a job. PyTorch asks each GPU for its name and uses one."""
    done = run_job(sys.executable, "-c", LOOKERS, options=["--gpus", "4"])
    assert done.stdout == "." * 40 + "\n", (done.stdout, done.stderr)


def test_who_has_a_gpus_memory_is_named(start, run_job) -> None:
    """By devproxy_memory_holders(), and so by PyTorch's OutOfMemoryError."""
    begin = (
        "import ctypes, time\n"
        "cu, c = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()\n"
        "assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) == 0\n"
        "assert cu.cuCtxSetCurrent(c) == 0\n"
        "p, text = ctypes.c_uint64(), ctypes.create_string_buffer(200)\n"
    )
    take = "assert cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t({} << 20)) == 0\n"
    ask = "print(cu.devproxy_memory_holders(0, text, 200), text.value.decode(), flush=True)\n"
    program = begin + take.format(40) + ask + "time.sleep(1000)"
    options = ["--gpu", "0", "--gpu-memory", "64MiB"]
    large = start("--name", "large", *options, "--", sys.executable, "-c", program)
    assert large.stdout.readline() == "0 \n"
    small = run_job(sys.executable, "-c", begin + ask, options=options)
    length, text = small.stdout.split(" ", 1)
    assert text == "job large has 40.0 MiB\n", small.stderr
    assert int(length) == len(text) - 1
    program = "import torch; torch.empty(40 << 20, dtype=torch.uint8, device='cuda')"
    refused = run_job(sys.executable, "-c", program, options=options)
    assert refused.returncode == 1
    assert refused.stderr.rstrip().endswith("On this GPU job large has 40.0 MiB.")


def test_the_job_is_killed(start) -> None:
    job = holding(start)
    (command,) = children(job, "cuInit")
    command.kill()
    assert job.wait(20) == 137


def test_devproxy_run_is_killed(start) -> None:
    job = holding(start, "--gpus", "2")
    tree = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []


def test_devproxy_run_is_killed_while_servers_start(start, shm_dir: Path) -> None:
    for delay_s in (0.05, 0.1, 0.15, 0.2):
        job = start("--", "sleep", "1000")
        time.sleep(delay_s)
        tree = psutil.Process(job.pid).children(recursive=True)
        job.kill()
        job.wait()
        psutil.wait_procs(tree, timeout=10)
    assert wait_for(lambda: not list(shm_dir.iterdir()))


def test_the_server_is_killed(start) -> None:
    then = """
until = time.monotonic() + 5
while time.monotonic() < until:
    if cuda.cuCtxSynchronize() != 0: print("noticed", flush=True); break
    time.sleep(0.01)
"""
    job = holding(start, then=then)
    (server,) = children(job, "devproxy-server")
    server.kill()
    out, err = job.communicate(timeout=20)
    assert out == "noticed\n"
    assert job.returncode == 3
    assert "SIGKILL" in err
    assert "while the job ran" in err


def test_stragglers_end_with_the_command(run_job) -> None:
    for options in ([], ["--plain"]):
        done = run_job("sh", "-c", "setsid sleep 1009 >/dev/null 2>&1 &", options=options)
        assert done.returncode == 0
        assert "ended 1 process(es)" in done.stderr
        assert "sleep 1009" not in [
            " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])
        ]


def test_start_kill_cycles(start) -> None:
    for number in range(5):
        job = holding(start)
        victims = [children(job, "cuInit")[0].pid, job.pid]
        os.kill(victims[number % 2], signal.SIGKILL)
        job.communicate(timeout=20)


# --- two jobs, the CLI that looks at them, the summary ---


def ctl(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "devproxy.cli.ctl", *arguments]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)


def test_two_jobs_at_once(start, job_env: dict[str, str]) -> None:
    first = holding(start, "--name", "first")
    second = holding(start, "--name", "second")
    jobs = json.loads(ctl(job_env, "ps", "--json").stdout)["jobs"]
    assert [(j["job"], j["alive"], j["servers"][0]["clients_now"]) for j in jobs] == [
        ("first", True, 1),
        ("second", True, 1),
    ]
    (server,) = children(first, "devproxy-server")
    server.kill()  # the first crashes; the second does not notice
    detail = json.loads(ctl(job_env, "status", "second", "--json").stdout)
    client = detail["servers"][0]["clients"][0]
    assert client["live_bytes"] >= 1 << 20
    first.terminate()
    first.communicate(timeout=20)
    second.terminate()
    assert second.wait(20) == 143


def test_same_name_twice(start) -> None:
    holding(start, "--name", "same")
    other = start("--name", "same", "--", "true")
    _, err = other.communicate(timeout=20)
    assert other.returncode == 2
    assert (
        err
        == "devproxy-run: job 'same' is already running: give another --name (see: devproxy ps)\n"
    )


def test_summary_and_proof(start) -> None:
    # devproxy-run looks twice a second. Of a dozen looks a busy machine may miss some.
    job = holding(start, "--summary", "--json", then="time.sleep(6)")
    _, err = job.communicate(timeout=60)
    summary = json.loads(err.splitlines()[-1])
    assert job.returncode == 0
    assert summary["gpus"][0]["memory"]["peak"] >= 1 << 20
    assert summary["proof"]["device_ranges"] >= 1
    assert summary["proof"]["violations"] == []


def test_nested(run_job) -> None:
    done = run_job(*RUN, "--", sys.executable, "-c", HOLD)
    assert (done.returncode, done.stdout) == (0, "up\n")


def test_doctor(job_env: dict[str, str]) -> None:
    findings = json.loads(ctl(job_env, "doctor", "--json").stdout)["findings"]
    built = next(f for f in findings if f["what"] == "client and server are built")
    assert built["ok"], built
    assert all(f["remedy"] for f in findings if not f["ok"])


# --- bad input: one line, exit code 2, nothing started ---


def refused(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "tpu"], "unknown device"),
        (["--device", "cuda"], "no NVIDIA device is here"),
        (["--gpu-memory", "2000TiB"], "not a memory size"),
        (["--gpu-memory", "100TiB"], "more memory than"),
        (["--gpu-memory", "1MiB"], "too small for a GPU"),
        (["--gpu-memory", "much"], "not a memory size"),
        (["--gpus", "0"], "number from 1"),
        (["--name", "../x"], "not a job name"),
        (["--what"], "unknown option"),
        (["--store", "/dev/null/x"], "--store /dev/null/x cannot be used"),
        (["--store", "/proc/x"], "--store /proc/x cannot be used"),
    ],
)
def test_bad_option(run_job, options: list[str], says: str) -> None:
    refused(run_job("touch", "/must/not/run", options=options), says)


def test_nvidia_device_that_cannot_be_used(run_job, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    env = {"DEVPROXY_SYSROOT": str(tmp_path)}
    refused(run_job("true", options=["--device", "auto"], env=env), "/dev/nvidia0")
    assert run_job("true", options=["--device", "soft"], env=env).returncode == 0


def test_auto_says_that_the_gpu_is_simulated(run_job, tmp_path: Path) -> None:
    done = run_job("true", options=["--device", "auto"], env={"DEVPROXY_SYSROOT": str(tmp_path)})
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "simulated" in done.stderr


def test_not_built(run_job, tmp_path: Path) -> None:
    refused(
        run_job("true", env={"DEVPROXY_LIB": str(tmp_path)}),
        "is not there: build devproxy: make build",
    )


def test_server_of_another_version(run_job, tmp_path: Path) -> None:
    other = tmp_path / "devproxy-server"
    other.write_text(f"#!/bin/sh\necho {'ab' * 32}\n")
    other.chmod(0o755)
    refused(
        run_job("true", env={"DEVPROXY_SERVER": str(other)}),
        "of another version: ABI abababababababab",
    )


def test_runtime_folder_of_somebody_else(run_job, shm_dir: Path) -> None:
    root = shm_dir / f"devproxy-{os.getuid()}"
    root.symlink_to("/tmp")
    refused(run_job("true"), "is not a folder")
    root.unlink()
    if os.getuid() == 0:
        root.mkdir()
        os.chown(root, 4242, 4242)
        refused(run_job("true"), "belongs to user 4242")
        root.rmdir()


def test_shm_too_small(job_env: dict[str, str], shm_dir: Path) -> None:
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs the privilege to mount a small tmpfs in a namespace of its own")
    small = shm_dir / "small"
    small.mkdir()
    line = " ".join([*RUN, "--", "true"])
    script = f"mount -t tmpfs -o size=8m tmpfs {small} && DEVPROXY_SHM_DIR={small} exec {line}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], env=job_env, capture_output=True, text=True
    )
    small.rmdir()
    refused(done, "too small: 8.0 MiB free")


def fake_python(folder: Path, torch_version: str) -> Path:
    """A Python of its own whose torch is of that version, as far as files say."""
    torch = folder / "lib/python3.11/site-packages/torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(f"__version__ = '{torch_version}'\n")
    (torch / "lib/libtorch_cpu.so").touch()
    (folder / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), folder / "bin/python3")
    return folder / "bin/python3"


def test_torch_of_an_unsupported_version(run_job, tmp_path: Path) -> None:
    refused(run_job(str(fake_python(tmp_path, "1.13.1")), "-c", ""), "torch 1.13.1")


def test_torch_without_its_library(run_job, tmp_path: Path) -> None:
    python = fake_python(tmp_path, "2.13.0+cpu")
    (tmp_path / "lib/python3.11/site-packages/torch/lib/libtorch_cpu.so").unlink()
    refused(run_job(str(python), "-c", ""), "has no lib/libtorch_cpu.so")
