# SPDX-License-Identifier: Apache-2.0
"""The job's standard streams through checkpoints: every byte once, in order, wherever the streams lead."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import pytest

from tests.checkpoint.world import CTL, RUN, SUBJECTS, World
from tests.integration.test_cli import Terminal
from tests.subjects.flood import line as flood_line

COUNT = """
import sys, time
n = 0
while True:
    n += 1
    print(n, flush=True)
    time.sleep(0.01)
"""


def start(world: World, *command: str, **keywords: object) -> subprocess.Popen[bytes]:
    """devproxy-run with the streams that are given; the others are /dev/null."""
    options = {"stdin": -3, "stdout": -3, "stderr": -3, "start_new_session": True} | keywords
    line = [*RUN, "--name", "j", "--store", str(world.store), "--", *command]
    job = subprocess.Popen(line, env=world.env, cwd=world.home, **options)
    world.jobs.append(job)
    return job


def restore(world: World, *more: str) -> None:
    world.ctl("restore", "j", "--store", str(world.store), *more)


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"^(\d+)\r?$", text, re.M)]


def check_count(text: str, least: int = 1) -> None:
    """1, 2, 3 and so on, each once; the last line may not be whole yet."""
    found = numbers(text[: text.rfind("\n") + 1])
    assert found == list(range(1, len(found) + 1)), found[:3] + found[-3:]
    assert len(found) >= least


def manifest(world: World) -> dict:
    """The newest image's."""
    from devproxy.checkpoint.store import Store

    os.environ["DEVPROXY_KEY_FILE"] = world.env["DEVPROXY_KEY_FILE"]
    try:
        return Store.open(str(world.store)).read_manifest(str(world.images()[-1]["id"]))
    finally:
        del os.environ["DEVPROXY_KEY_FILE"]


# --- a terminal ---


TTY = [sys.executable, str(SUBJECTS / "tty.py"), "--seconds-per-step", "0.1", "--steps"]


def shown(size: str, typed: str = "") -> str:
    return rf"step \d+ terminals yyy size {size} foreground y typed '{typed}'"


def resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture
def terminal(world: World) -> Iterator[Terminal]:
    made = Terminal(world.env, f"cd {world.home}")
    made.expect("@")
    resize(made.fd, 30, 100)
    yield made
    world.kill_everything()
    made.close()


def in_terminal(terminal: Terminal, world: World, *command: str) -> None:
    line = [*RUN, "--name", "j", "--store", str(world.store), "--", *command]
    terminal.type(shlex.join(line) + "\r")


def test_terminal_suspend_and_resume(world: World, terminal: Terminal) -> None:
    in_terminal(terminal, world, *TTY, "300")
    terminal.expect(shown("100x30"))
    terminal.type("hello\r")
    terminal.expect(shown("100x30", "hello"))
    world.ctl("suspend", "j")
    resize(terminal.fd, 31, 101)
    world.ctl("resume", "j")
    terminal.expect(shown("101x31", "hello"))
    terminal.type("again\r")
    terminal.expect(shown("101x31", "again"))
    resize(terminal.fd, 40, 120)
    terminal.expect(shown("120x40", "again"))
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.type("fg\r")
    terminal.expect(shown("120x40", "again"))
    terminal.type("\x03")
    terminal.expect("KeyboardInterrupt")
    terminal.expect("@")
    terminal.type("echo code=$?\r")
    terminal.expect("code=130")
    terminal.type("stty -a | tr ' ' '\\n' | grep icanon\r")
    terminal.expect("\nicanon")  # the terminal is as it was


def test_terminal_ctrl_c_while_suspended(world: World, terminal: Terminal) -> None:
    in_terminal(terminal, world, *TTY, "300")
    terminal.expect(shown("100x30"))
    world.ctl("suspend", "j")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.expect("@")
    terminal.type("echo code=$?\r")
    terminal.expect("code=130")
    world.wait(lambda: not [p for p in world.processes() if "devproxy.cli.run" in p.cmdline()])
    assert len(world.images()) == 1


def test_restore_on_another_terminal(world: World, terminal: Terminal) -> None:
    in_terminal(terminal, world, *TTY, "300")
    terminal.expect(shown("100x30"))
    terminal.type("hello\r")
    terminal.expect(shown("100x30", "hello"))
    world.ctl("checkpoint", "j")
    terminal.expect(shown("100x30", "hello"))
    world.kill_everything()
    other = Terminal(world.env, f"cd {world.home}")
    try:
        other.expect("@")
        resize(other.fd, 50, 150)
        line = [*CTL, "restore", "j", "--store", str(world.store), "--attach"]
        other.type(shlex.join(line) + "\r")
        other.expect(shown("150x50", "hello"))
        other.type("there\r")
        other.expect(shown("150x50", "there"))
        resize(other.fd, 51, 151)
        other.expect(shown("151x51", "there"))
        other.type("\x03")
        other.expect("KeyboardInterrupt")
        other.expect("@")
        other.type("echo code=$?\r")
        other.expect("code=130")
    finally:
        world.kill_everything()
        other.close()


TWICE = COUNT.replace("flush=True)", "flush=True); print(n, file=sys.stderr, flush=True)")


def killed_with_two_files(world: World) -> dict[str, str]:
    """A job with `> out 2> err`, killed behind its image. What each file held at the cut."""
    with open(world.home / "out", "wb") as out, open(world.home / "err", "wb") as err:
        start(world, sys.executable, "-c", TWICE, stdout=out, stderr=err)
    world.wait(lambda: len(numbers(world.text("err"))) > 20)
    world.ctl("checkpoint", "j")
    streams = {s["name"]: s for s in manifest(world)["trees"][0]["stdio"]["outputs"]}
    seen = len(numbers(world.text("err")))
    world.wait(lambda: len(numbers(world.text("err"))) > seen + 20)
    world.kill_everything()
    return {n: world.text(n)[: streams[f"std{n}.fifo"]["file"]["bytes"]] for n in ("out", "err")}


def test_it_goes_on_in_the_files_that_it_had(world: World) -> None:
    killed_with_two_files(world)
    seen = {name: len(numbers(world.text(name))) for name in ("out", "err")}
    said = world.ctl("restore", "j", "--store", str(world.store)).stdout
    assert f"its stdout goes on in {world.home}/out" in said, said
    assert f"its stderr goes on in {world.home}/err" in said, said
    for name in ("out", "err"):
        world.wait(lambda name=name: len(numbers(world.text(name))) > seen[name] + 20)
        check_count(world.text(name), least=seen[name])


def test_a_file_that_is_another_one_now_is_left_alone(world: World) -> None:
    """The next run has begun that file anew, or a link stands there: its words stay, and the job's go into the log."""
    killed_with_two_files(world)
    (world.home / "out").write_text("another run\n" * 100_000)
    (world.home / "err").rename(world.home / "moved")
    (world.home / "err").symlink_to(world.home / "moved")
    moved = world.text("moved")
    said = json.loads(world.ctl("restore", "j", "--store", str(world.store), "--json").stdout)
    log = said["stdout"]
    assert log == said["stderr"] == str(world.home / "state" / "logs" / "j.log"), said
    assert "no longer begins with what the job had written" in said["outputs"][0], said
    world.wait(lambda: len(numbers(world.ctl("logs", "j").stdout)) > 50)
    world.ctl("kill", "j")
    assert world.text("out") == "another run\n" * 100_000
    assert world.text("moved") == moved


def test_two_files_named_at_a_restore(world: World) -> None:
    killed_with_two_files(world)
    before = {name: world.text(name) for name in ("out", "err")}
    restore(world, "--output", "rest-out", "--output-stderr", "rest-err")
    for name in ("out", "err"):
        world.wait(lambda name=name: len(numbers(world.text(f"rest-{name}"))) > 20)
        assert world.text(name) == before[name]
        rest = numbers(world.text(f"rest-{name}"))
        assert rest == list(range(rest[0], rest[0] + len(rest))), rest


def test_one_stream_is_not_parted(world: World) -> None:
    with open(world.home / "log", "wb") as out:
        start(world, sys.executable, "-c", COUNT, stdout=out, stderr=out)
    world.wait(lambda: len(numbers(world.text())) > 20)
    world.ctl("checkpoint", "j")
    world.kill_everything()
    words = ("restore", "j", "--store", str(world.store), "--output-stderr", "err")
    refused = world.ctl(*words, check=False)
    assert refused.returncode == 2, refused
    assert "are one stream" in refused.stderr, refused


def test_the_terminal_goes_away(world: World) -> None:
    """A closed ssh connection: no terminal any more, and devproxy-run was told to survive that."""
    terminal = Terminal(world.env, f"cd {world.home}")
    terminal.expect("@")
    script = "import signal, time\n" + COUNT.replace(
        "    print", "    open('count', 'a').write(f'{n}\\n')\n    print"
    )
    (world.home / "script.py").write_text(script)
    line = [*RUN, "--name", "j", "--store", str(world.store), "--", sys.executable, "script.py"]
    terminal.type("(trap '' HUP; exec " + shlex.join(line) + ")\r")
    terminal.expect(r"\n20\r")
    before = len(world.text("count"))
    terminal.close()
    world.wait(lambda: len(world.text("count")) > before + 100, what="lines after the hangup")
    world.ctl("checkpoint", "j")
    after = len(world.text("count"))
    world.wait(lambda: len(world.text("count")) > after + 100, what="lines after the image")
    world.kill_everything()
    restore(world, "--output", "log")
    world.wait(lambda: len(numbers(world.text())) > 50, what="output of the restored job")
    check_count(world.text("count"))
    shown_now = numbers(world.text())
    assert shown_now == list(range(shown_now[0], shown_now[0] + len(shown_now)))


# --- pipes ---


def test_pipe_to_tee(world: World) -> None:
    line = [*RUN, "--name", "j", "--store", str(world.store), "--", sys.executable, "-c", COUNT]
    shell = subprocess.Popen(
        ["bash", "-c", f"{shlex.join(line)} 2>&1 | tee all >/dev/null"],
        env=world.env, cwd=world.home, stdin=-3, start_new_session=True,
    )  # fmt: skip
    world.jobs.append(shell)
    world.wait(lambda: len(numbers(world.text("all"))) > 20)
    world.ctl("suspend", "j")
    world.ctl("resume", "j")
    seen = len(numbers(world.text("all")))
    world.wait(lambda: len(numbers(world.text("all"))) > seen + 20)
    # The reader does not read while the image is taken.
    tee = next(p for p in world.processes() if p.cmdline()[:2] == ["tee", "all"])
    tee.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    world.ctl("checkpoint", "j")
    tee.send_signal(signal.SIGCONT)
    seen = len(numbers(world.text("all")))
    world.wait(lambda: len(numbers(world.text("all"))) > seen + 50)
    check_count(world.text("all"))
    (stream,) = manifest(world)["trees"][0]["stdio"]["outputs"]
    world.kill_everything()
    restore(world, "--output", "rest")
    world.wait(lambda: len(numbers(world.text("rest"))) > 20)
    check_count(world.text("all")[: stream["delivered"]] + world.text("rest"), least=100)


class FloodReader(threading.Thread):
    """Compares what comes with what the flood must write."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self.fd = fd
        self.lines = 0
        self.wrong = ""
        self.slow = threading.Event()

    def run(self) -> None:
        with os.fdopen(self.fd, "rb") as stream:
            for line in stream:
                if self.slow.is_set():
                    time.sleep(0.001)
                if line == b"end %d\n" % self.lines:
                    self.wrong = "" if not stream.read() else "more after the end"
                    return
                self.lines += 1
                if line != flood_line(self.lines):
                    self.wrong = f"line {self.lines}: {line[:40]!r} of {len(line)} bytes"
                    stream.read()  # to the end, so that nobody waits for us
                    return
        self.wrong = f"ended after line {self.lines}"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["buffered", "raw", "libc"])
def test_flood_through_a_pipe(world: World, way: str) -> None:
    """As fast as it can, images at random moments, half of them with a slow reader: no byte lost or doubled."""
    read_fd, write_fd = os.pipe()
    job = start(world, sys.executable, str(SUBJECTS / "flood.py"), way, stdout=write_fd)
    os.close(write_fd)
    reader = FloodReader(read_fd)
    reader.start()
    draw = random.Random(way)
    world.wait(lambda: reader.lines > 1000)
    for number in range(4):
        time.sleep(draw.random() / 4)
        if number % 2:
            reader.slow.set()
        world.ctl("checkpoint", "j", "--cut-wait", "0")
        reader.slow.clear()
        assert not reader.wrong, f"image {number}: {reader.wrong}"
    (world.home / "stop").touch()
    reader.join(60)
    assert not reader.is_alive()
    assert not reader.wrong
    assert job.wait(20) == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["buffered", "raw", "libc"])
def test_flood_into_a_file(world: World, way: str) -> None:
    """Killed and restored, again and again, from images at random moments."""
    script = [sys.executable, str(SUBJECTS / "flood.py"), way, "--rate", "20000000"]
    with open(world.home / "log", "wb") as out:
        start(world, *script, stdout=out, stderr=out)
    world.wait(lambda: (world.home / "log").stat().st_size > 100_000)
    draw = random.Random(way)
    for _ in range(3):
        time.sleep(draw.random() / 4)
        world.ctl("checkpoint", "j", "--cut-wait", "0")
        time.sleep(draw.random() / 4)
        world.kill_everything()
        restore(world, "--output", "log")
    (world.home / "stop").touch()
    world.wait(lambda: (world.home / "log").read_bytes()[-200:].rfind(b"\nend ") >= 0)
    lines = (world.home / "log").read_bytes().splitlines(keepends=True)
    assert lines.pop() == b"end %d\n" % len(lines)
    wrong = next((n for n, found in enumerate(lines, 1) if found != flood_line(n)), None)
    assert wrong is None, (wrong, lines[wrong - 1][:60])


def test_a_reader_that_takes_its_time_gets_everything(world: World) -> None:
    """As `| less`: the command has ended long before its output is taken."""
    read_fd, write_fd = os.pipe()
    job = start(world, "seq", "200000", stdout=write_fd)
    os.close(write_fd)
    time.sleep(7)
    with os.fdopen(read_fd) as stream:
        assert stream.read() == "".join(f"{n}\n" for n in range(1, 200001))
    assert job.wait(20) == 0


def test_a_reader_that_takes_nothing_can_be_given_up(world: World) -> None:
    read_fd, write_fd = os.pipe()
    job = start(world, "seq", "200000", stdout=write_fd)
    os.close(write_fd)
    time.sleep(1.5)
    assert job.poll() is None
    job.terminate()
    job.wait(10)
    os.close(read_fd)


# --- input ---

READS_SLOWLY = """
import os, sys, time
while True:
    data = b""
    while not data.endswith(b"\\n"):
        piece = os.read(0, 1)
        if not piece: print("end of input", flush=True); sys.exit()
        data += piece
    print(data.decode().strip(), flush=True)
    time.sleep(0.02)
"""


def test_input_from_a_file(world: World) -> None:
    (world.home / "input").write_text("".join(f"{n}\n" for n in range(1, 601)))
    with open(world.home / "input") as file, open(world.home / "log", "wb") as out:
        file.readline()
        os.lseek(file.fileno(), 2, os.SEEK_SET)  # somebody has read the first line
        start(world, sys.executable, "-c", READS_SLOWLY, stdin=file, stdout=out, stderr=out)
    world.wait(lambda: "\n20\n" in world.text())
    world.ctl("suspend", "j")
    world.ctl("resume", "j")
    world.wait(lambda: "\n40\n" in world.text())
    world.ctl("checkpoint", "j")
    world.wait(lambda: "\n60\n" in world.text())
    world.kill_everything()
    restore(world, "--output", "log", "--wait")
    assert numbers(world.text()) == list(range(2, 601))
    assert world.text().endswith("end of input\n")


def test_input_from_a_pipe(world: World) -> None:
    """Suspend and resume go on reading the same pipe, and take nothing that the job has not read."""
    read_fd, write_fd = os.pipe()
    with open(world.home / "log", "wb") as out:
        job = start(
            world, sys.executable, "-c", READS_SLOWLY, stdin=read_fd, stdout=out, stderr=out
        )
    os.write(write_fd, b"".join(b"%d\n" % n for n in range(1, 301)))
    world.wait(lambda: "\n20\n" in world.text())
    world.ctl("suspend", "j")
    unread = struct.unpack("i", fcntl.ioctl(read_fd, termios.FIONREAD, b"\0" * 4))[0]
    assert unread > 100  # the job reads 50 lines in a second: the rest is still in the pipe
    os.write(write_fd, b"".join(b"%d\n" % n for n in range(301, 351)))
    world.ctl("resume", "j")
    world.ctl("checkpoint", "j")
    os.close(write_fd)
    os.close(read_fd)
    assert job.wait(30) == 0
    assert numbers(world.text()) == list(range(1, 351))
    assert world.text().endswith("end of input\n")


def test_input_from_a_pipe_whose_writer_is_gone(world: World) -> None:
    """Restored from nothing, the pipe is not there any more: the job reads the end of it."""
    read_fd, write_fd = os.pipe()
    with open(world.home / "log", "wb") as out:
        start(world, sys.executable, "-c", READS_SLOWLY, stdin=read_fd, stdout=out, stderr=out)
    os.write(write_fd, b"".join(b"%d\n" % n for n in range(1, 31)))
    world.wait(lambda: "\n30\n" in world.text())
    world.ctl("checkpoint", "j")
    world.kill_everything()
    os.close(write_fd)
    os.close(read_fd)
    restore(world, "--output", "log", "--wait")
    assert numbers(world.text()) == list(range(1, 31))
    assert world.text().endswith("end of input\n")


@pytest.mark.parametrize("streams", ["</dev/null >/dev/null 2>&1", "<&- >&- 2>&-"])
def test_no_streams(world: World, streams: str) -> None:
    (world.home / "script.py").write_text(
        "import sys, time\n"
        "for n in range(1, 10000):\n"
        "    print('nobody reads that', flush=True)\n"
        "    open('log', 'a').write(f'{n}\\n')\n"
        "    time.sleep(0.01)\n"
    )
    line = [*RUN, "--name", "j", "--store", str(world.store), "--", sys.executable, "script.py"]
    shell = subprocess.Popen(
        ["bash", "-c", f"exec {shlex.join(line)} {streams}"],
        env=world.env, cwd=world.home, start_new_session=True,
    )  # fmt: skip
    world.jobs.append(shell)
    world.wait(lambda: len(numbers(world.text())) > 20)
    world.ctl("checkpoint", "j")
    world.kill_everything()
    seen = len(numbers(world.text()))
    restore(world)
    world.wait(lambda: len(numbers(world.text())) > seen + 20)
    check_count(world.text())


# --- files and logs ---


def test_nohup(world: World) -> None:
    line = [*RUN, "--name", "j", "--store", str(world.store), "--", sys.executable, "-c", COUNT]
    with open(world.home / "log", "wb") as out:
        job = subprocess.Popen(
            ["nohup", *line], env=world.env, cwd=world.home, stdin=-3, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    world.jobs.append(job)
    world.wait(lambda: len(numbers(world.text())) > 20)
    job.send_signal(signal.SIGHUP)
    world.ctl("checkpoint", "j")
    seen = len(numbers(world.text()))
    world.wait(lambda: len(numbers(world.text())) > seen + 20)
    world.kill_everything()
    restore(world, "--output", "log")
    world.wait(lambda: len(numbers(world.text())) > seen + 50)
    check_count(world.text())


def test_logs_of_a_restored_job(world: World) -> None:
    world.run(sys.executable, "-c", COUNT)
    world.wait(lambda: len(numbers(world.text())) > 20)
    world.ctl("checkpoint", "j")
    (stream,) = manifest(world)["trees"][0]["stdio"]["outputs"]
    world.kill_everything()
    restore(world)
    so_far = world.text()[: stream["delivered"]]
    seen = len(numbers(so_far))
    world.wait(lambda: len(numbers(world.ctl("logs", "j").stdout)) > seen + 30)
    check_count(world.ctl("logs", "j").stdout, least=50)  # what it said behind the cut, once
    follow = subprocess.Popen(
        [*CTL, "logs", "j", "-f"], env=world.env, cwd=world.home, stdout=subprocess.PIPE, text=True
    )
    time.sleep(1.5)
    world.ctl("kill", "j")
    text, _ = follow.communicate(timeout=20)
    assert follow.returncode == 0
    check_count(text, least=100)
    assert numbers(text) == numbers(world.ctl("logs", "j").stdout)  # after the job's end too


def test_both_streams_in_one_file_keep_their_order(world: World) -> None:
    script = COUNT.replace(
        "print(n, flush=True)", "print(n, flush=True, file=[sys.stdout, sys.stderr][n % 2])"
    )
    with open(world.home / "log", "wb") as out:
        start(world, sys.executable, "-c", script, stdout=out, stderr=out)
    world.wait(lambda: len(numbers(world.text())) > 20)
    world.ctl("checkpoint", "j")
    world.ctl("suspend", "j")
    world.ctl("resume", "j")
    seen = len(numbers(world.text()))
    world.wait(lambda: len(numbers(world.text())) > seen + 20)
    world.kill_everything()
    restore(world, "--output", "log")
    world.wait(lambda: len(numbers(world.text())) > seen + 50)
    check_count(world.text())


def test_two_files_are_two_streams(world: World) -> None:
    script = COUNT.replace("flush=True)", "flush=True); print(n, file=sys.stderr, flush=True)")
    with open(world.home / "out", "wb") as out, open(world.home / "err", "wb") as err:
        start(world, sys.executable, "-c", script, stdout=out, stderr=err)
    world.wait(lambda: len(numbers(world.text("err"))) > 20)
    world.ctl("checkpoint", "j")
    streams = {s["name"]: s for s in manifest(world)["trees"][0]["stdio"]["outputs"]}
    world.kill_everything()
    restore(world, "--output", "both")
    world.wait(lambda: len(numbers(world.text("both"))) > 40)
    for name in ("out", "err"):
        assert streams[f"std{name}.fifo"]["file"]["path"] == str(world.home / name)
        check_count(world.text(name)[: streams[f"std{name}.fifo"]["delivered"]], least=20)
    rest = numbers(world.text("both"))
    assert sorted(rest) == sorted([*range(rest[0], rest[-1] + 1)] * 2) or len(rest) > 40
