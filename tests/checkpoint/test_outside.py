# SPDX-License-Identifier: Apache-2.0
"""What a job has to do with the world outside of it, jobs of several processes and GPUs, and verbs in every order."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.world import RUN, SUBJECTS, World
from tests.living import matching

COUNT = """
import time
for n in range(1, 100000):
    print(n, flush=True)
    time.sleep(0.02)
"""
PLAIN_COUNT = (sys.executable, "-c", COUNT)


def count(world: World, log: str = "log") -> list[int]:
    return [int(n) for n in re.findall(r"^(\d+)$", world.text(log), re.M)]


def wait_count(world: World, number: int, log: str = "log") -> None:
    world.near(number)
    world.wait(lambda: max(count(world, log), default=0) >= number, what=f"{number} in {log}")


def goes_on(world: World, log: str = "log") -> None:
    """It counts further, and has left out and repeated nothing."""
    wait_count(world, count(world, log)[-1] + 10, log)
    found = count(world, log)
    assert found == list(range(1, len(found) + 1)), found


def refused(world: World, *words: str) -> str:
    """What it says: one line, the last one."""
    more = () if words[0] == "kill" else ("--progress", "none")
    done = world.ctl(*words, *more, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def restore(world: World, image: str = "j", *more: str, log: str = "log") -> None:
    world.ctl("restore", image, "--store", str(world.store), "--output", log, *more)


# --- connections ---


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a server outside of any job."""
    line = [sys.executable, str(SUBJECTS / "tcp.py"), "--listen", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    yield int(process.stdout.readline().split()[1])
    process.kill()
    process.communicate()


def tcp(port: int, steps: int = 60) -> list[str]:
    command = [sys.executable, str(SUBJECTS / "tcp.py"), "--server", f"127.0.0.1:{port}"]
    return [*command, "--steps", str(steps), "--seconds-per-step", "0.1"]


def test_connection_to_outside(world: World, server: int) -> None:
    world.run(*tcp(server))
    world.wait_step(5)
    text = refused(world, "checkpoint", "j", "--strict")
    for part in (f"127.0.0.1:{server}", "python", "fd ", "the job continues"):
        assert part in text
    assert not world.images()
    facts = world.ctl_json("checkpoint", "j")
    (warning,) = facts["warnings"]
    for part in (f"127.0.0.1:{server}", "python", "fd ", "closed at restore"):
        assert part in warning
    step = world.steps()[-1]
    world.wait_step(step + 3)
    assert "connection lost" not in world.text()  # the running job keeps it
    world.kill_everything()
    restore(world, "j", "--wait")
    assert world.steps() == list(range(1, 61))
    assert world.text().count("connection lost") == 1
    assert "step 60 connects 2" in world.text()


BOTH = """
import socket, sys, time
ours, there = socket.create_server(("127.0.0.1", 0)), int(sys.argv[1])
inside = socket.create_connection(ours.getsockname()); other, _ = ours.accept()
outside = socket.create_connection(("127.0.0.1", there))
lost = 0
for n in range(1, 1000):
    inside.sendall(b"x"); assert other.recv(1) == b"x"
    try:
        outside.sendall(b"y\\n")
        if outside.recv(10) != b"y\\n": raise OSError("closed")
    except OSError as error:
        lost += 1
        print("lost", error, flush=True)
        outside = socket.create_connection(("127.0.0.1", there))
    print(n, flush=True)
    time.sleep(0.02)
"""


def test_connections_inside_and_outside(world: World, server: int) -> None:
    """Those inside live on, those that lead outside are closed."""
    world.run(sys.executable, "-c", BOTH, str(server))
    wait_count(world, 10)
    assert str(server) in str(world.ctl_json("checkpoint", "j")["warnings"])
    goes_on(world)
    text = refused(world, "restore", "j", "--store", str(world.store), "--name", "twin")
    assert "of a running job" in text
    goes_on(world)
    assert "lost" not in world.text()
    world.kill_everything()
    restore(world)
    goes_on(world)
    assert world.text().count("lost") == 1


LISTENS = """
import socket
ours = socket.create_server(("127.0.0.1", 0))
print("port", ours.getsockname()[1], flush=True)
"""


def test_a_port_that_another_process_took_is_named_before_files_are_put_back(world: World) -> None:
    writes = "open('written', 'w').write('before')\n"
    world.run(sys.executable, "-c", LISTENS + writes + COUNT)
    wait_count(world, 5)
    world.ctl("checkpoint", "j")
    world.kill_everything()
    (world.home / "written").write_text("after")
    port = int(world.text().split("port ")[1].split()[0])
    with socket.create_server(("127.0.0.1", port)):
        text = refused(world, "restore", "j", "--store", str(world.store), "--output", "log")
        assert f"the job listens on 127.0.0.1:{port}" in text
        assert (world.home / "written").read_text() == "after"
    restore(world)
    goes_on(world)
    assert (world.home / "written").read_text() == "before"


def test_unix_socket_to_outside(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(world.home / "outsider"))
        listener.listen()
        script = "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('outsider')\n" + COUNT
        world.run(sys.executable, "-c", script)
        wait_count(world, 5)
        text = refused(world, "checkpoint", "j")
        assert "unix socket" in text
        assert "outsider" in text
        goes_on(world)
        listener.accept()[0].close()


def test_io_uring(world: World, tmp_path: Path) -> None:
    """A static program that made one: the interposer does not see it, the check does."""
    (tmp_path / "ring.c").write_text(
        "#include <sys/syscall.h>\n#include <unistd.h>\n#include <stdio.h>\n"
        'int main() { static char p[256]; if (syscall(425, 8, p) < 0) { perror("ring"); return 9; }\n'
        '  for (int n = 1; n < 1000; ++n) { printf("%d\\n", n); fflush(stdout); usleep(20000); } }\n'
    )
    subprocess.run(
        ["gcc", "-static", "-o", str(tmp_path / "ring"), str(tmp_path / "ring.c")], check=True
    )
    world.run(str(tmp_path / "ring"))
    world.wait(lambda: world.text().count("\n") >= 2)
    assert "ring:" not in world.text(), "this kernel has no io_uring"
    assert "io_uring" in refused(world, "checkpoint", "j")
    goes_on(world)


TRACED = """
import ctypes, os, time
child = os.fork()
if not child:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
    while True: time.sleep(1)
for n in range(1, 1000):
    print(n, flush=True)
    time.sleep(0.02)
"""


def test_a_traced_process(world: World) -> None:
    world.run(sys.executable, "-c", TRACED)
    wait_count(world, 5)
    assert "traces it" in refused(world, "checkpoint", "j")
    goes_on(world)


# --- jobs of several kinds ---


def test_a_job_without_a_gpu(world: World) -> None:
    world.run("sh", "-c", "n=0; while true; do n=$((n+1)); echo $n; sleep 0.05; done")
    wait_count(world, 5)
    world.ctl("checkpoint", "j")  # sleep comes and goes all the time
    goes_on(world)
    world.kill_everything()
    restore(world)
    goes_on(world)


def test_a_job_that_forks_all_the_time(world: World) -> None:
    script = """
import os, time
for n in range(1, 100000):
    for _ in range(5):
        child = os.fork()
        if not child: os._exit(n % 7)
        assert os.waitpid(child, 0)[1] >> 8 == n % 7
    print(n, flush=True)
"""
    world.run(sys.executable, "-c", script)
    wait_count(world, 5)
    for _ in range(3):
        world.ctl("checkpoint", "j")
        goes_on(world)
    world.kill_everything()
    restore(world)
    goes_on(world)


def test_a_job_that_execs(world: World) -> None:
    script = """
import os, sys, time
n = int(sys.argv[1])
print(n, flush=True)
time.sleep(0.02)
os.execv(sys.executable, [sys.executable, sys.argv[0], str(n + 1)])
"""
    (world.home / "again.py").write_text(script)
    world.run(sys.executable, "again.py", "1")
    wait_count(world, 3)
    world.ctl("checkpoint", "j")
    goes_on(world)
    world.kill_everything()
    restore(world)
    goes_on(world)


TWO_GPUS = """
import sys, torch
from tests.subjects import gate
torch.manual_seed(3)
assert torch.cuda.device_count() == 2
a = torch.zeros(256, 256, device="cuda:0")
b = torch.eye(256, device="cuda:1")
for n in range(1, 151):
    a += torch.rand(256, 256, device="cuda:0")
    b += a.to("cuda:1")
    print(n, flush=True)
    gate.before(n + 1, 150, float(sys.argv[1]))
print("digest", float(a.double().sum()), float(b.double().sum()), flush=True)
"""


def test_two_gpus(world: World) -> None:
    command = (sys.executable, "-c", TWO_GPUS)
    world.run(*command, "0.08", options=("--gpu", "6,7"))
    wait_count(world, 10)
    world.ctl("migrate", "j", "--to", "3,4")
    assert world.ctl_json("status", "j")["gpus"] == [3, 4]
    goes_on(world)
    world.ctl("checkpoint", "j")
    goes_on(world)
    world.kill_everything()
    restore(world, "j", "--gpu", "5,2", "--wait")
    assert count(world) == list(range(1, 151))
    again = world.run(*command, "0", name="alone", log="again", options=("--gpus", "2"))
    assert again.wait(60) == 0
    assert world.digest() == world.digest("again")
    assert len(world.digest()) == 1
    assert "2 GPU(s)" in refused(world, "restore", "j", "--store", str(world.store), "--gpu", "1")


def test_plain(world: World) -> None:
    world.run(*PLAIN_COUNT, options=("--plain",))
    wait_count(world, 3)
    assert "--plain" in refused(world, "checkpoint", "j")
    goes_on(world)


def test_nested(world: World) -> None:
    """A devproxy-run inside of a job: the outer job's image is refused by name, or whole; either way both go on."""
    world.run(*RUN, "--name", "inner", "--", *PLAIN_COUNT)
    wait_count(world, 5)
    done = world.ctl("checkpoint", "j", check=False)
    assert done.returncode in (0, 2), done.stderr
    goes_on(world)
    if done.returncode == 0:
        world.kill_everything()
        restore(world)
        goes_on(world)


# --- verbs in every order ---


def test_suspended(world: World) -> None:
    job = world.run(*PLAIN_COUNT)
    wait_count(world, 10)
    world.ctl("suspend", "j")
    assert "suspended" in refused(world, "checkpoint", "j")
    assert "suspended" in refused(world, "suspend", "j")
    other = world.run("true", log="other")
    assert other.wait(20) == 2
    assert "'j' is already running" in world.text("other")
    world.ctl("resume", "j", "--gpu", "3")
    assert world.ctl_json("status", "j")["gpus"] == [3]
    goes_on(world)
    world.ctl("suspend", "j")
    world.ctl("kill", "j")
    assert job.wait(20) == 143
    world.wait(lambda: not matching(world.shm, "devproxy-*/j"))
    restore(world)
    goes_on(world)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_devproxy_run_is_told_to_end_while_suspended(world: World, number: int) -> None:
    job = world.run(*PLAIN_COUNT)
    wait_count(world, 10)
    world.ctl("suspend", "j")
    job.send_signal(number)
    assert job.wait(20) == 128 + number
    world.wait(lambda: not world.processes(), what="nothing left")
    assert len(world.images()) == 1
    restore(world)
    goes_on(world)


def test_restore_after_the_job_has_ended(world: World) -> None:
    """Its files are as they were at the cut, and then as at its end."""
    script = """
from tests.subjects import gate
open("mine", "w").write("begun")
for n in range(1, 61):
    print(n, flush=True)
    with open("mine", "a") as file: file.write(f" {n}")
    gate.before(n + 1, 60, 0.15)
"""
    job = world.run(sys.executable, "-c", script)
    wait_count(world, 10)
    world.ctl("checkpoint", "j")
    assert world.end_of(job) == 0
    whole = world.text("mine")
    restore(world, "j", "--wait")
    assert count(world) == list(range(1, 61))
    assert world.text("mine") == whole


def test_two_jobs_into_one_store_at_once(world: World) -> None:
    world.run(*PLAIN_COUNT)
    world.run(*PLAIN_COUNT, name="k", log="k")
    wait_count(world, 10)
    wait_count(world, 10, "k")
    for _ in range(2):
        line = [sys.executable, "-m", "devproxy.cli.ctl", "checkpoint"]
        both = [subprocess.Popen([*line, n], env=world.env, cwd=world.home) for n in "jk"]
        assert [p.wait(60) for p in both] == [0, 0]
    assert sorted((i["job"], i["whole"]) for i in world.images()) == [
        ("j", True), ("j", True), ("k", True), ("k", True),
    ]  # fmt: skip
    world.kill_everything()
    restore(world)
    restore(world, "k", log="k")
    goes_on(world)
    goes_on(world, "k")


def test_periodic_and_its_next(world: World) -> None:
    world.run(*PLAIN_COUNT, options=("--checkpoint-every", "3s"))
    wait_count(world, 10)
    world.wait(lambda: world.ctl_json("status", "j").get("next_checkpoint_unix_s"))
    asked = time.time()
    due = float(str(world.ctl_json("status", "j")["next_checkpoint_unix_s"]))
    # It may come while we are told of it; and on a loaded machine it comes late.
    assert asked - 30 < due < time.time() + 3.5
    world.wait(lambda: world.store.exists() and world.images(), 15)
    goes_on(world)


def test_no_image_is_tried_after_the_death_of_a_server(world: World) -> None:
    """The job may go on without its GPU, but no image of it can be whole any more."""
    world.run(*PLAIN_COUNT, options=("--checkpoint-every", "1s"))
    world.committed(1)
    for server in world.processes():
        if server.name() == "devproxy-server":
            server.kill()
    wait_count(world, max(count(world)) + 100)  # 5 s
    said = re.findall(r"^.*no (?:more )?images?\b.*$", world.text(), re.M)
    # One attempt may have been under way.
    assert said, world.tail()
    assert len([line for line in said if "no image now" in line]) <= 1, said
    (last,) = [line for line in said if "no more images of job j" in line]
    assert "the server of GPU 0 was ended by signal 9" in last, said
    assert "devproxy restore j" in last, said
    assert not world.ctl_json("status", "j").get("next_checkpoint_unix_s")


HOLDS = """
import time, torch
held = torch.ones(200 << 20, dtype=torch.uint8, device="cuda")
for n in range(1, 10000):
    assert int(held[:10].sum()) == 10
    print(n, flush=True)
    time.sleep(0.05)
"""


def test_the_memory_of_a_suspended_job_is_free(world: World) -> None:
    small = ("--gpu-memory", "400MiB")
    world.run(sys.executable, "-c", HOLDS, options=(*small, "--gpu", "1"))
    wait_count(world, 3)
    world.ctl("suspend", "j")
    other = world.run(
        sys.executable, "-c", HOLDS, name="other", log="other", options=(*small, "--gpu", "1")
    )
    wait_count(world, 3, "other")
    done = world.ctl("resume", "j", check=False)
    if done.returncode:  # both fit only where each has a memory of its own
        assert "MiB" in done.stderr or "bytes" in done.stderr, done.stderr
        assert json.loads(world.ctl("status", "j", "--json").stdout)["phase"] == "suspended"
        other.terminate()
        other.wait(20)
        world.ctl("resume", "j")
    goes_on(world)
