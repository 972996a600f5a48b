# SPDX-License-Identifier: Apache-2.0
"""What schedulers and operators use: the clients of docs/scheduler.md, a daemon as a service, its metrics and its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import devproxy
from devproxy import errors
from devproxy.control import messages, metrics
from devproxy.control.quiet_grpc import grpc
from tests import fake_agent
from tests.integration.test_daemon import ROOT, done, env, job, wait_for  # noqa: F401  fixtures

PROGRAMS = dict(
    re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs/scheduler.md").read_text(), re.S)
)


@pytest.fixture
def here(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:  # noqa: F811
    """The test's own process is a client."""
    for name, value in env.items():
        if name.startswith("DEVPROXY_"):
            monkeypatch.setenv(name, value)
    return env


def program(env: dict[str, str], name: str, *arguments: str) -> subprocess.CompletedProcess[str]:  # noqa: F811
    return subprocess.run(
        [sys.executable, "-c", PROGRAMS[name], *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- the programs of docs/scheduler.md ---


def test_programs_are_short() -> None:
    assert set(PROGRAMS) == {"checkpoint_all.py", "drain.py", "move.py"}
    assert all(len(text.strip().splitlines()) <= 30 for text in PROGRAMS.values())


def test_the_programs_of_the_document(job, env: dict[str, str], shm_dir: Path) -> None:  # noqa: F811
    job("a")
    job("b")
    result = program(env, "checkpoint_all.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == [f"{n}: {n}-1, stood still for 0.25 s" for n in "ab"]  # fmt: skip
    result = program(env, "move.py", "a", "2")
    assert result.returncode == 0, result
    assert result.stdout == "a is on GPU (2,), stood still for 0.50 s\n"
    assert "  cut: cut of a\n" in result.stderr
    result = program(env, "move.py", "a", "2")
    assert result.stdout == "a is on GPU (2,), stood still for 0.00 s\n"
    result = program(env, "drain.py", "0")
    assert (result.returncode, result.stdout) == (0, "b is suspended in b-2\n")
    assert done(shm_dir, "b") == ["checkpoint None", "checkpoint 0"]
    result = program(env, "checkpoint_all.py")
    assert "b: left alone, it is suspended\n" in result.stdout
    result = program(env, "move.py", "nobody", "1")
    assert result.returncode == 1
    assert result.stdout.startswith("nobody: Refused: there is no job 'nobody'")


# --- devproxy.Client ---


def test_the_life_of_a_job_from_a_program(job, here: dict[str, str], shm_dir: Path) -> None:  # noqa: F811
    job()
    with devproxy.Client() as client:
        (found,) = client.jobs()
        assert (found.name, found.phase, found.gpus) == ("j", devproxy.Phase.RUNNING, (0,))
        assert (found.steps, found.step_s, found.phase.busy) == (7, None, False)
        news: list[devproxy.Progress] = []
        image = client.checkpoint("j", cut_wait_s=0.5, watcher=news.append).image
        assert image is not None
        assert image.still_s == 0.25
        assert {"cut", "device", "upload", "commit"} == {one.stage for one in news}
        assert client.suspend("j").job.phase is devproxy.Phase.SUSPENDED
        assert client.resume("j", gpus=[3]).job.gpus == (3,)
        assert client.migrate("j", [1]).facts["from_gpus"] == [3]
        assert client.resize("j", [0]).job.gpus == (0,)
        assert client.watch("j", news.append).facts["gpus"] == [0]
        assert b"".join(client.logs("j")) == b"one\ntwo\n"
        with pytest.raises(errors.CheckpointError) as failed:
            client.checkpoint("j", cut_wait_s=fake_agent.FAIL / 1000)
        assert (failed.value.name, failed.value.stage) == ("CheckpointError", "device")
        assert (failed.value.object, failed.value.state) == ("gpu0", "running")
        with pytest.raises(errors.Refused) as refused:
            client.checkpoint("j", strict=True)
        assert refused.value.name == "Refused"
        assert client.check("j") == ["a TCP connection would be closed"]
        with pytest.raises(errors.Refused, match="fd 7"):
            client.check("j", strict=True)
        for wrong in (
            lambda: client.kill(""),
            lambda: client.resize("j"),
            lambda: client.status("x"),
            lambda: client.restore("nothing"),
            lambda: client.images(str(shm_dir / "no-store")),
        ):
            with pytest.raises(errors.Refused):
                wrong()
        assert client.images() == []
        client.kill("j", 15)
        assert wait_for(lambda: not client.jobs())
    for wrong_address in ("nowhere", "host:", ":1"):
        with pytest.raises(errors.Refused):
            devproxy.Client(wrong_address)


def test_a_phase_of_a_newer_devproxy() -> None:
    assert devproxy.Phase("dreaming") is devproxy.Phase.UNKNOWN
    from devproxy.control import coordinator_api

    assert {p.value for p in devproxy.Phase} == {*coordinator_api.PHASES, "unknown"}


# --- a daemon as a service ---


Service = Callable[..., Path]


@pytest.fixture
def service(env: dict[str, str], tmp_path: Path) -> Iterator[Service]:  # noqa: F811
    """service(options): a devproxyd as systemd starts it; returns its log."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*options: str, more: dict[str, str] | None = None) -> Path:
        log = tmp_path / "devproxyd.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "devproxy.control.daemon", "--foreground", *options],
                env=env | (more or {}),
                stderr=file,
            )
        started.append(process)
        assert wait_for(lambda: "serves " in log.read_text() or process.poll() is not None)
        return log

    yield begin
    for process in started:
        process.terminate()
        assert process.wait(20) == 0


def test_health_and_reflection(service: Service, shm_dir: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    service("--stay")
    with messages.open_channel(str(shm_dir / f"devproxy-{os.getuid()}" / ".devproxyd.sock")) as link:  # fmt: skip
        health = health_pb2_grpc.HealthStub(link)
        for name in ("", "devproxy.v1.Devproxy"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        known = ProtoReflectionDescriptorDatabase(link)
        assert "devproxy.v1.Devproxy" in known.get_services()
        methods = known.FindFileContainingSymbol("devproxy.v1.Devproxy").service[1].method
        assert "Checkpoint" in {method.name for method in methods}


def test_a_service_stays_and_takes_the_place_of_another(
    job,  # noqa: F811
    here: dict[str, str],
    service: Service,
) -> None:
    job()
    devproxy.Client()  # starts one
    log = service("--stay", "--log-format", "json")
    assert wait_for(lambda: "serves" in log.read_text())
    assert [job.name for job in devproxy.Client().jobs()] == ["j"]
    for line in log.read_text().splitlines():
        facts = json.loads(line)
        assert set(facts) == {"time", "program", "pid", "message"}
        assert facts["program"] == "devproxyd"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", facts["time"])


def test_a_client_on_another_host(
    job,  # noqa: F811
    here: dict[str, str],
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from devproxy.control import trust

    trusted = tmp_path / "trust"
    monkeypatch.setenv("DEVPROXY_TRUST_DIR", str(trusted))
    with pytest.raises(errors.Refused):  # no certificate
        devproxy.Client("localhost:1")
    trust.make()
    job()
    log = service("--stay", "--listen", "127.0.0.1:0", more={"DEVPROXY_TRUST_DIR": str(trusted)})
    port = re.findall(r"listens host=127.0.0.1 port=(\d+)", log.read_text())[0]
    with devproxy.Client(f"127.0.0.1:{port}") as client:
        assert [one.name for one in client.jobs()] == ["j"]
        assert client.checkpoint("j").image.id == "j-1"
        with pytest.raises(errors.Refused):
            client.status("nobody")
    # Somebody with another certificate, and somebody with none.
    monkeypatch.setenv("DEVPROXY_TRUST_DIR", str(tmp_path / "other"))
    trust.make()
    with pytest.raises(errors.DevproxyError):
        devproxy.Client(f"127.0.0.1:{port}").jobs()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/devproxy.v1.Devproxy/ListJobs")(b"", timeout=5)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=20) as answer:
        return answer.read().decode()


def test_metrics(job, env: dict[str, str], service: Service) -> None:  # noqa: F811
    from prometheus_client.parser import text_string_to_metric_families

    job("a")
    log = service("--stay", "--metrics", "0")
    port = int(re.findall(r"metrics on http://localhost:(\d+)/metrics", log.read_text())[0])
    families = {one.name: one for one in text_string_to_metric_families(scrape(port))}
    phases = {s.labels["phase"]: s.value for s in families["devproxy_jobs"].samples}
    assert phases["running"] == 1
    assert sum(phases.values()) == 1
    assert families["devproxy_job_steps"].samples[0].labels == {"job": "a"}
    assert families["devproxy_job_steps"].samples[0].value == 7
    assert families["devproxy_daemon_uptime_seconds"].samples[0].value > 0
    assert families["devproxy_silent"].samples[0].value == 1  # a fake job has no server
    for family in families.values():
        assert family.documentation, family.name


@pytest.mark.parametrize("options", [["--metrics", "x"], ["--metrics", "1.2.3.4:1"], ["--listen", "1.2.3.4:1"]])  # fmt: skip
def test_where_it_cannot_answer(options: list[str], env: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    result = subprocess.run(
        [sys.executable, "-m", "devproxy.control.daemon", "--foreground", *options],
        env=env | {"DEVPROXY_TRUST_DIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result
    assert "cannot serve: " in result.stderr


def test_the_supervisors_lines(env: dict[str, str]) -> None:  # noqa: F811
    """Those of devproxy-run, in JSON where that is asked for."""
    result = subprocess.run(
        [sys.executable, "-c", "from devproxy.log import say; say('a \"b\"')"],
        env=env | {"DEVPROXY_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
    )
    assert json.loads(result.stderr)["message"] == 'a "b"'
    assert json.loads(result.stderr)["program"] == "devproxy-run"


def test_metrics_are_documented() -> None:
    text = (ROOT / "docs/operators.md").read_text()
    rows = re.findall(r"^\| `(devproxy_\w+)` \|.*\| ([^|]+) \|$", text, re.M)
    assert {name for name, _ in rows} == metrics.names()
    panels = json.loads((ROOT / "devproxy/share/grafana.json").read_text())["panels"]
    shown = {n: p["title"] for p in panels for t in p["targets"] for n in re.findall(r"devproxy_\w+", t["expr"])}  # fmt: skip
    for name, reader in rows:
        assert (reader == f"panel '{shown.get(name)}'") == (name in shown)
