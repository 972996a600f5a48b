# SPDX-License-Identifier: Apache-2.0
"""devproxyd and `devproxy` from the outside, over unix sockets, with supervisors that pretend (tests/fake_agent.py)."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from devproxy import __version__
from devproxy.control import client
from devproxy.errors import Refused
from tests import fake_agent

ROOT = Path(__file__).resolve().parent.parent.parent


def wait_for(condition: Callable[[], object], timeout_s: float = 15) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def env(shm_dir: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where sitecustomize.py makes every agent that devproxyd starts a fake one. At the end nothing has stayed."""
    (tmp_path / "sitecustomize.py").write_text(
        fake_agent.FINDER.replace("{path!r}", repr(fake_agent.__file__))
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
    env |= {
        "DEVPROXY_SHM_DIR": str(shm_dir),
        "DEVPROXY_STATE_DIR": str(tmp_path / "state"),
        "DEVPROXY_KEY_FILE": str(tmp_path / "key"),
        "DEVPROXY_DAEMON_IDLE_S": "0.5",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
    }
    yield env
    for process in ours(shm_dir):
        if "fake_agent" in cmdline(process) or "control.agent" in cmdline(process):
            process.kill()
    assert wait_for(lambda: not ours(shm_dir)), [cmdline(p) for p in ours(shm_dir)]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ours(shm_dir: Path) -> list[psutil.Process]:
    """Processes of this test, by the runtime folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DEVPROXY_SHM_DIR") == str(shm_dir):
                found.append(process)
        except psutil.Error:
            continue
    return [p for p in found if p.pid != os.getpid() and p.is_running()]


def daemons(shm_dir: Path) -> list[psutil.Process]:
    return [p for p in ours(shm_dir) if "devproxy.control.daemon" in cmdline(p)]


@pytest.fixture
def job(env: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """job("name", pace_s=0.1): a supervisor that serves its socket."""
    started: list[subprocess.Popen[str]] = []

    def begin(name: str = "j", pace_s: float = 0.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_agent", name],
            env=env | {"PACE_S": str(pace_s)},
            stdout=-1,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield begin
    for process in started:
        process.terminate()
        process.communicate(timeout=20)


def line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "devproxy.cli.ctl", *arguments]


def ctl(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line(*arguments), env=env, capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def done(shm_dir: Path, name: str = "j") -> list[str]:
    path = shm_dir / f"devproxy-{os.getuid()}" / name / "done"
    return path.read_text().splitlines() if path.exists() else []


def one_line_error(result: subprocess.CompletedProcess[str], code: int, says: str) -> None:
    assert (result.returncode, result.stdout) == (code, ""), result
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


# --- verbs, all the way: command, daemon, agent ---


def test_the_life_of_a_job(job, env: dict[str, str], shm_dir: Path) -> None:
    job()
    result = ctl(env, "checkpoint", "j", "--json", "--cut-wait", "500ms", "--progress", "json")
    assert result.returncode == 0, result.stderr
    image = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert (image["id"], image["phase"], image["still_s"]) == ("j-1", "running", 0.25)
    news = [json.loads(text) for text in result.stderr.splitlines()]
    assert list(dict.fromkeys(n["stage"] for n in news)) == ["cut", "device", "upload", "commit"]
    assert done(shm_dir) == ["checkpoint 500"]

    assert json.loads(ctl(env, "suspend", "j", "--json").stdout)["phase"] == "suspended"
    one_line_error(ctl(env, "migrate", "x", "--to", "1"), 2, "there is no job 'x'")
    assert json.loads(ctl(env, "resume", "j", "--gpu", "4", "--json").stdout)["gpus"] == [4]
    moved = json.loads(ctl(env, "migrate", "j", "--to", "1,2", "--json").stdout)
    assert (moved["gpus"], moved["device_bytes"]) == ([1, 2], 1 << 20)
    jobs = json.loads(ctl(env, "ps", "--json").stdout)["jobs"]
    assert [(j["job"], j["phase"], j["images"], j["gpus"]) for j in jobs] == [
        ("j", "running", 2, [1, 2])
    ]
    assert "j-2" in ctl(env, "status").stdout
    assert len(daemons(shm_dir)) == 1  # for all of them, while the job lives
    result = ctl(env, "kill", "j", "--signal", "USR1", "--json")
    assert json.loads(result.stdout) == {"schema": 1, "job": "j", "signal": int(signal.SIGUSR1)}
    # The job has ended, and with it the daemon.
    assert wait_for(lambda: not list(shm_dir.iterdir())), list(shm_dir.rglob("*"))


def test_the_summary_for_people(job, env: dict[str, str]) -> None:
    job()
    result = ctl(env, "checkpoint", "j")
    assert result.returncode == 0
    assert result.stdout.count("\n") == 5
    for text in ("image j-1 of job j", "5.0 GiB", "were there already", "stood still 0.250 s"):
        assert text in result.stdout, result.stdout
    assert "devproxy: checkpoint: upload: upload of j\n" in result.stderr
    assert "warning: a TCP connection to outside was closed" in result.stderr
    more = ctl(env, "checkpoint", "j", "--verbose").stdout
    assert "stage device" in more
    assert "deduplicated" in more
    moved = ctl(env, "migrate", "j", "--to", "1", "--verbose").stdout
    assert "job j has moved from GPU 0 to GPU 1; it stood still 0.500 s\n" in moved
    assert "1.0 MiB" in moved
    again = ctl(env, "migrate", "j", "--to", "1").stdout
    assert "job j is on GPU 1 already; nothing was done" in again
    assert "job j is suspended, and GPU 1 is free" in ctl(env, "suspend", "j").stdout
    ctl(env, "resume", "j")
    assert "sent SIGUSR1 to job j" in ctl(env, "kill", "j", "--signal", "USR1").stdout


def test_bars_on_a_terminal(job, env: dict[str, str]) -> None:
    job(pace_s=0.1)
    main, side = pty.openpty()
    process = subprocess.Popen(line("checkpoint", "j"), env=env, stdout=side, stderr=side, cwd=ROOT)
    os.close(side)
    shown = b""
    while True:
        try:
            shown += os.read(main, 65536)
        except OSError:
            break
    os.close(main)
    assert process.wait(20) == 0
    assert "━".encode() in shown
    assert b"device of j" in shown
    assert b"2.0 KiB of 3.0 KiB" in shown


def test_top_on_a_terminal(job, env: dict[str, str]) -> None:
    job()
    main, side = pty.openpty()
    process = subprocess.Popen(
        line("top", "--interval", "0.3"), env=env, stdout=side, stderr=side, cwd=ROOT
    )
    os.close(side)
    shown = b""
    while shown.count(b"\x1b[H\x1b[J") < 3 or b"server lost" not in shown:
        shown += os.read(main, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert os.read(main, 65536).endswith(b"\x1b[?1049l")  # the screen is as it was
    os.close(main)
    once = json.loads(ctl(env, "top", "--once", "--json", "--interval", "0.3").stdout)
    assert [(j["job"], j["state"], j["steps"]) for j in once["jobs"]] == [
        ("j", "server lost", 7)
    ]  # it has none


def test_failures_and_refusals(job, env: dict[str, str]) -> None:
    job()
    result = ctl(env, "checkpoint", "j", "--cut-wait", f"{fake_agent.FAIL}ms", "--progress", "none")
    one_line_error(result, 1, "checkpoint failed at device: the server of GPU 0 ended [gpu0]")
    assert "(the job: running)" in result.stderr
    result = ctl(env, "checkpoint", "j", "--cut-wait", f"{fake_agent.FAIL}ms", "--json")
    error = json.loads(result.stderr)
    assert (error["stage"], error["object"], error["state"]) == ("device", "gpu0", "running")
    one_line_error(ctl(env, "checkpoint", "j", "--strict"), 2, "fd 7, a TCP connection: close it")
    one_line_error(
        ctl(env, "checkpoint", "j", "--cut-wait", f"{fake_agent.BUG}ms", "--progress", "none"),
        1,
        "ValueError: a bug",
    )
    one_line_error(ctl(env, "resume"), 2, "resume needs the name of a job")
    one_line_error(ctl(env, "resume", "j"), 2, "suspend it first")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["checkpoint"], "no job lives"),
        (["checkpoint", "j"], "there is no job 'j'"),
        (["checkpoint", "j", "--cut-wait", "soon"], "not a time"),
        (["migrate", "j"], "--to"),
        (["migrate", "j", "--to", "a"], "not a GPU"),
        (["migrate", "j", "--to", "99"], "'99' is not a GPU: give numbers below 64"),
        (["restore", "x", "--gpu", "1,b"], "not a GPU"),
        (["resize", "j"], "--gpus"),
        (["resize", "j", "--gpus", "0,-1"], "not a GPU"),
        (["kill", "j", "--signal", "X"], "no signal"),
        (["restore", "x"], "no images yet"),
        (["restore", "x", "--store", "/nowhere"], "there is no store /nowhere"),
        (["restore", "x", "--name", "../y"], "not a job name"),
        (["restore", "x", "--attach", "--wait"], "--attach"),
        (["images", "--store", "/nowhere"], "there is no store"),
        (["logs", "j"], "there is no job 'j'"),
        (["logs", "../j"], "not a job name"),
        (["images", "what"], "invalid choice"),
        (["what"], "there is no verb 'what'"),
        (["kil", "j"], "did you mean kill?"),
        (["help", "migrte"], "did you mean migrate?"),
        (
            ["checkpoint", "j", "--vebose"],
            "unrecognized arguments: --vebose: did you mean --verbose? see:",
        ),
        (["images", "rm"], "needs an image"),
        (["images", "rm", "x"], "there is no image 'x'"),
        (["images", "gc", "x"], "takes no image"),
    ],
)
def test_bad_input(env: dict[str, str], shm_dir: Path, arguments: list[str], says: str) -> None:
    one_line_error(ctl(env, *arguments), 2, says)
    assert daemons(shm_dir) == []  # nothing was started for it


CHANGE_A_JOB = (
    ["checkpoint"],
    ["suspend"],
    ["migrate", "--to", "1"],
    ["resize", "--gpus", "1"],
    ["kill"],
)


@pytest.mark.every
def test_what_changes_a_job_names_it(job, env: dict[str, str], shm_dir: Path) -> None:
    job("other-job")
    for verb in CHANGE_A_JOB:
        one_line_error(ctl(env, *verb), 2, f"{verb[0]} needs the name of a job")
        result = ctl(env, "--json", *verb)
        assert (result.returncode, result.stdout) == (2, "")
        error = json.loads(result.stderr)
        assert (error["schema"], error["exit_code"]) == (1, 2)
        assert f"devproxy {verb[0]} JOB, of: other-job" in error["remedy"]
    one_line_error(ctl(env, "kill", "othr-job"), 2, "did you mean other-job?")
    assert done(shm_dir, "other-job") == []
    assert json.loads(ctl(env, "status", "other-job", "--json").stdout)["phase"] == "running"


def test_the_daemon_picks_no_job_either(job, env: dict[str, str], monkeypatch) -> None:
    job()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match="kill needs the name"):
        client.Client().kill("", 15)
    with pytest.raises(Refused, match="checkpoint needs the name"):
        client.Client().checkpoint("", cut_wait_ms=None, strict=False, report=lambda _: None)


def test_a_terminal_is_asked(job, env: dict[str, str]) -> None:
    other, this = job("other"), job("this")
    for answer, code in ((b"\n", 2), (b"this\n", 0)):
        main, side = pty.openpty()
        process = subprocess.Popen(
            line("kill"), env=env, stdin=side, stdout=side, stderr=side, cwd=ROOT
        )
        os.close(side)
        shown = b""
        while b"kill which job? " not in shown:
            shown += os.read(main, 4096)
        assert b"  other" in shown
        os.write(main, answer)
        assert process.wait(20) == code
        os.close(main)
    assert this.wait(20) == 0
    assert other.poll() is None


@pytest.mark.parametrize(
    "words",
    [["ps"], ["status"], ["images"], ["images", "gc"], ["doctor"], ["checkpoint", "j"], ["watch", "j"],
     ["suspend", "j"], ["resume", "j"], ["migrate", "j", "--to", "2"], ["kill", "j", "--signal", "CONT"]],
)  # fmt: skip
def test_json_stands_before_the_verb_or_behind_it(
    job, env: dict[str, str], words: list[str]
) -> None:
    job()
    if words[0] == "watch":
        ctl(env, "checkpoint", "j")
    if words[0] == "resume":
        ctl(env, "suspend", "j")
    first = ctl(env, "--json", *words)
    assert json.loads(first.stdout)["schema"] == 1, first
    if words[0] not in (
        "suspend",
        "resume",
        "migrate",
        "kill",
    ):  # the second time it is done already
        assert (
            json.loads(ctl(env, *words, "--json").stdout).keys() == json.loads(first.stdout).keys()
        )


@pytest.mark.every
def test_a_supervisor_that_is_stopped_is_not_called_gone(
    job, env: dict[str, str], shm_dir: Path
) -> None:
    """In the middle of a verb. A restore beside it would make a twin, so nobody advises one."""
    process = job(pace_s=0.2)
    folder = shm_dir / f"devproxy-{os.getuid()}" / "j"
    (folder / "job.json").write_text(json.dumps({"pid": process.pid}))
    verb = subprocess.Popen(
        line("checkpoint", "j"), env=env, stdout=-1, stderr=-1, text=True, cwd=ROOT
    )
    try:
        assert verb.stderr is not None
        assert "cut" in verb.stderr.readline()
        process.send_signal(signal.SIGSTOP)
        _, said = verb.communicate(timeout=15)
        assert verb.returncode == 1
        error = said.splitlines()[-1]
        assert f"the supervisor of job 'j' (process {process.pid}) is stopped" in error
        assert f"kill -CONT {process.pid}" in error
        assert "devproxy restore" not in error
        one_line_error(ctl(env, "kill", "j"), 2, f"kill -CONT {process.pid}")
        assert json.loads(ctl(env, "status", "j", "--json").stdout)["phase"] == "stopped"
    finally:
        process.send_signal(signal.SIGCONT)
        verb.kill()
    assert wait_for(lambda: done(shm_dir)), "the checkpoint goes on with it"


def test_a_daemon_that_is_stopped_is_named(job, env: dict[str, str], shm_dir: Path) -> None:
    job()
    assert ctl(env, "checkpoint", "j").returncode == 0  # the daemon comes by this
    told = done(shm_dir)
    (daemon,) = daemons(shm_dir)
    daemon.suspend()
    try:
        for verb in ("checkpoint", "kill"):
            one_line_error(ctl(env, verb, "j"), 1, f"devproxyd (process {daemon.pid}) is stopped")
    finally:
        daemon.resume()
    assert done(shm_dir) == told


def test_help_and_run(env: dict[str, str]) -> None:
    assert ctl(env, "--version").stdout == f"devproxy {__version__}\n"
    assert "checkpoint" in ctl(env, "help").stdout
    assert ctl(env, "help", "kill").stdout == ctl(env, "kill", "--help").stdout
    assert "--checkpoint-every" in ctl(env, "help", "run").stdout
    bare = {k: v for k, v in env.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT)}
    result = ctl(bare, "run", "--device", "soft", "--", "sh", "-c", "echo $0 said; exit 7", "it")
    assert (result.returncode, result.stdout) == (7, "it said\n"), result.stderr
    assert "there is no command" not in result.stderr
    error = ctl(bare, "run", "--json", "--gpus", "x", "--", "true")
    assert (error.returncode, json.loads(error.stderr)["schema"]) == (2, 1)


def test_logs_are_followed(job, env: dict[str, str], tmp_path: Path, shm_dir: Path) -> None:
    process = job()
    (tmp_path / "state" / "logs").mkdir(parents=True)
    (tmp_path / "state" / "logs" / "j.log").write_text("one\n")
    assert ctl(env, "logs").stdout == "one\n"
    reader = subprocess.Popen(line("logs", "-f"), env=env, stdout=-1, text=True, cwd=ROOT)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "one\n"  # from the file; what follows, from the agent
    assert reader.stdout.readline() == "two\n"
    process.terminate()
    assert reader.communicate(timeout=20)[0] == "three\n"
    assert reader.returncode == 0


# --- restore ---


@pytest.fixture
def store(env: dict[str, str], tmp_path: Path) -> str:
    """A store with whole images; their names say what the fake agent does with them."""
    body = """
import sys
from devproxy.checkpoint.store import Store
store = Store.open(sys.argv[1])
for job in ("good", "silent", "refused", "broken"):
    with store.writer(job + "-1") as writer:
        refs = writer.put_bytes(job.encode() * 99, kind="host")
        writer.commit({"job": job, "job_id": "id-" + job, "epoch": store.take_epoch("id-" + job)})
"""
    url = str(tmp_path / "images")
    subprocess.run([sys.executable, "-c", body, url], env=env, check=True, cwd=ROOT)
    return url


def test_images(env: dict[str, str], store: str) -> None:
    listed = json.loads(ctl(env, "images", "--store", store, "--json").stdout)["images"]
    assert {i["id"] for i in listed} == {"good-1", "silent-1", "refused-1", "broken-1"}
    assert all(i["whole"] for i in listed)
    result = ctl(env, "images", "--store", f"file://{store}", "--verify")
    assert (result.returncode, result.stdout.count("yes")) == (0, 4)
    assert ctl(env, "images", "gc", "--store", store).returncode == 0
    (report,) = json.loads(ctl(env, "images", "gc", "--store", store, "--json").stdout)["stores"]
    assert (report["removed_packs"], report["store"]) == (0, f"file://{store}")
    assert ctl(env, "images").stdout == "no images\n"
    manifest = Path(store, "images", "good-1", "manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    result = ctl(env, "images", "--store", store, "--verify")
    assert (result.returncode, result.stdout.count("no: ")) == (1, 1)
    one_line_error(ctl(env, "restore", "good-1", "--store", store), 2, "image good-1 is not whole")


@pytest.mark.every
def test_images_are_removed_by_name(job, env: dict[str, str], store: str, shm_dir: Path) -> None:
    at = ["--store", store]
    result = ctl(env, "images", "rm", "silent-1", "brok", *at)
    assert result.stdout.splitlines()[:2] == [
        f"removed image silent-1 of job silent from store file://{store}",
        f"removed image broken-1 of job broken from store file://{store}",
    ]
    assert "freed" in result.stdout
    one_line_error(ctl(env, "images", "rm", "silent-1", *at), 2, "there is no image 'silent-1'")
    job("good")
    folder = shm_dir / f"devproxy-{os.getuid()}" / "good"
    (folder / "job.json").write_text('{"job_id": "id-good"}')
    one_line_error(
        ctl(env, "images", "rm", "good-1", *at), 2, "the only whole image of job good, which lives"
    )
    left = json.loads(ctl(env, "images", *at, "--verify", "--json").stdout)["images"]
    assert [(i["id"], i["whole"]) for i in left] == [("good-1", True), ("refused-1", True)]
    removed = json.loads(ctl(env, "images", "rm", "good-1", "--force", *at, "--json").stdout)
    assert removed["removed"] == [{"image": "good-1", "job": "good", "store": f"file://{store}"}]
    assert removed["freed_bytes"] == 0  # these manifests name no chunks


@pytest.mark.parametrize("image", ["good", "good-1", "silent-"])
def test_restore(
    env: dict[str, str], store: str, shm_dir: Path, image: str, tmp_path: Path
) -> None:
    result = ctl(
        env, "restore", image, "--store", store, "--gpu", "3", "--name", "again",
        "--output", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    if image.startswith("good"):
        (words,) = done(shm_dir, "again")
        spec = json.loads(words.removeprefix("restored "))
        assert (spec["image"], spec["gpus"], spec["name"]) == ("good-1", [3], "again")
        assert (spec["store"].removeprefix("file://"), spec["output"]) == (
            store,
            str(tmp_path / "out"),
        )
    else:  # an agent that says nothing while it restores
        assert answer["phase"] == "running"
    one_line_error(
        ctl(env, "restore", image, "--store", store, "--name", "again"), 2, "job 'again' lives"
    )
    (agent,) = [p for p in ours(shm_dir) if "control.agent" in cmdline(p)]
    (keeper,) = daemons(shm_dir)
    keeper.kill()  # its agents are their own masters
    assert wait_for(lambda: not keeper.is_running())
    assert json.loads(ctl(env, "checkpoint", "again", "--json").stdout)["id"] == "again-1"
    agent.terminate()
    assert wait_for(lambda: not agent.is_running())


def test_restore_shows_its_stages_and_waits(env: dict[str, str], store: str, shm_dir: Path) -> None:
    process = subprocess.Popen(
        line("restore", "good-1", "--store", store, "--wait"),
        env=env | {"PACE_S": "0.05"}, stdout=-1, stderr=-1, text=True, cwd=ROOT,
    )  # fmt: skip
    assert wait_for(lambda: done(shm_dir, "good"))
    time.sleep(0.3)
    assert process.poll() is None
    ctl(env, "kill", "good")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 7, err  # the job's
    assert "restore: fetch: fetch of good" in err


def test_restore_that_fails(env: dict[str, str], store: str, tmp_path: Path) -> None:
    none = ["--progress", "none", "--store", store]
    one_line_error(ctl(env, "restore", "refused-1", *none), 2, "no CRIU: install it")
    result = ctl(env, "restore", "broken-1", *none)
    one_line_error(result, 1, "its last words: Traceback: something broke")
    assert "nothing of it runs" in result.stderr
    assert wait_for(lambda: not list((tmp_path / "state" / "restores").iterdir()))


# --- the daemon's own life ---


def test_it_comes_once_and_leaves(job, env: dict[str, str], shm_dir: Path) -> None:
    process = job()
    callers = [
        subprocess.Popen(line("kill", "j", "--signal", "CONT"), env=env, cwd=ROOT) for _ in range(1)
    ]
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "devproxy.control.daemon", "--foreground"], env=env, stderr=-1
        )
        for _ in range(3)
    ]
    assert [c.wait(30) for c in callers] == [0]
    ended = [r.communicate(timeout=30)[1] for r in racers]
    assert [r.returncode for r in racers] == [0, 0, 0]
    assert sum(b"serves version" in e for e in ended) <= 1
    assert sum(b"another devproxyd serves" in e for e in ended) >= 2
    process.wait(20)
    assert wait_for(lambda: not list(shm_dir.iterdir())), list(shm_dir.rglob("*"))
    assert daemons(shm_dir) == []


def test_it_stays_while_a_job_lives(job, env: dict[str, str], shm_dir: Path) -> None:
    process = job()
    ctl(env, "checkpoint", "j")
    time.sleep(1.5)
    assert len(daemons(shm_dir)) == 1
    (keeper,) = daemons(shm_dir)
    assert keeper.ppid() != os.getpid()
    assert keeper.terminal() is None
    root = shm_dir / f"devproxy-{os.getuid()}"
    assert (root / ".devproxyd.sock").stat().st_mode & 0o777 == 0o600
    assert root.stat().st_mode & 0o777 == 0o700
    process.terminate()
    assert wait_for(lambda: not daemons(shm_dir))
    log = Path(env["DEVPROXY_STATE_DIR"], "logs", "devproxyd.log").read_text()
    assert "leaves: nothing to do for 0.5 s" in log
    assert "checkpoint job=j" in log


def test_it_left_right_before_the_call(
    job, env: dict[str, str], shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command found it, and was slow to say what it wants. A signal ends it as idleness does, only now."""
    job()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    caller = client.Client()
    (first,) = daemons(shm_dir)
    first.terminate()
    assert wait_for(lambda: first not in daemons(shm_dir))
    assert [status.job for status in caller.list_jobs()] == ["j"]
    (second,) = daemons(shm_dir)
    second.terminate()
    assert wait_for(lambda: second not in daemons(shm_dir))
    done_by_next = caller.checkpoint("j", cut_wait_ms=5, strict=False, report=lambda _: None)
    assert done_by_next.image is not None
    assert done(shm_dir) == ["checkpoint 5"]


def test_what_a_dead_daemon_left_is_no_obstacle(job, env: dict[str, str], shm_dir: Path) -> None:
    job()
    root = shm_dir / f"devproxy-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(root / ".devproxyd.sock"))
    (root / ".devproxyd.lock").touch()
    assert ctl(env, "checkpoint", "j").returncode == 0


def test_it_is_killed_in_the_middle(job, env: dict[str, str], shm_dir: Path) -> None:
    job(pace_s=0.25)
    command = subprocess.Popen(
        line("checkpoint", "j", "--cut-wait", "77ms"),
        env=env, stdout=-1, stderr=-1, text=True, cwd=ROOT,
    )  # fmt: skip
    assert command.stderr is not None
    assert "cut" in command.stderr.readline()
    (keeper,) = daemons(shm_dir)
    keeper.kill()
    _, err = command.communicate(timeout=20)
    assert command.returncode == 1
    assert "devproxyd went away during the call: the job and the operation go on" in err
    watched = ctl(env, "watch", "--json")  # through a new daemon
    assert json.loads(watched.stdout)["id"] == "j-1"
    assert done(shm_dir) == ["checkpoint 77"]


def test_the_command_is_interrupted(job, env: dict[str, str], shm_dir: Path) -> None:
    job(pace_s=0.1)
    command = subprocess.Popen(
        line("checkpoint", "j", "--cut-wait", "78ms"),
        env=env, stdout=-1, stderr=-1, text=True, cwd=ROOT,
    )  # fmt: skip
    assert command.stderr is not None
    assert "cut" in command.stderr.readline()
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=20)
    assert command.returncode == 130
    assert "the checkpoint of job j goes on; see: devproxy watch j" in err
    assert wait_for(lambda: done(shm_dir) == ["checkpoint 78"])


def test_the_supervisor_is_killed_in_the_middle(job, env: dict[str, str]) -> None:
    job()
    result = ctl(
        env, "checkpoint", "j", "--cut-wait", f"{fake_agent.KILLED}ms", "--progress", "none"
    )  # fmt: skip
    one_line_error(result, 1, "the supervisor of job 'j' went away during the call")
    # "is dead", or "there is no job" once somebody has swept; the way out is the same.
    one_line_error(ctl(env, "checkpoint", "j"), 2, "devproxy restore j")


def test_one_that_hangs_delays_no_other(job, env: dict[str, str]) -> None:
    process = job("stuck")
    job("fine")
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    jobs = {j["job"]: j for j in json.loads(ctl(env, "ps", "--json").stdout)["jobs"]}
    assert time.monotonic() - began < 20
    assert "does not answer" in jobs["stuck"]["why_not"]
    assert jobs["fine"]["checkpointable"]
    assert ctl(env, "checkpoint", "fine").returncode == 0
    process.send_signal(signal.SIGCONT)


def test_a_daemon_of_another_version_makes_room(job, env: dict[str, str], tmp_path: Path) -> None:
    job()
    other = (
        "import devproxy; devproxy.__version__ = '0.0.1'\n"
        "from devproxy.control import daemon; import sys; sys.argv = ['devproxyd', '--foreground']\n"
        "daemon.main()"
    )
    old = subprocess.Popen([sys.executable, "-c", other], env=env, cwd=ROOT, stderr=-1, text=True)
    assert old.stderr is not None
    assert "serves version=0.0.1" in old.stderr.readline()
    assert ctl(env, "checkpoint", "j").returncode == 0
    _, err = old.communicate(timeout=20)
    assert "leaves: asked to" in err
    log = Path(env["DEVPROXY_STATE_DIR"], "logs", "devproxyd.log").read_text()
    assert f"serves version={__version__}" in log


def test_it_cannot_start(job, env: dict[str, str], tmp_path: Path) -> None:
    job()
    (tmp_path / "file").touch()
    result = ctl(
        env | {"DEVPROXY_STATE_DIR": str(tmp_path / "file")}, "checkpoint", "j", "--progress", "none"
    )  # fmt: skip
    assert result.returncode == 1
    assert "the state folder" in result.stderr
    assert result.stderr.count("\n") == 1
