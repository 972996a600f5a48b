# SPDX-License-Identifier: Apache-2.0
"""What devproxyd tells Prometheus, over HTTP (docs/operators.md). Each scrape asks the jobs' supervisors and servers anew.

Counters are of one supervisor or one server, and begin anew with it, as Prometheus expects of counters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from devproxy import __version__, runtime
from devproxy.control import client, servers
from devproxy.control import coordinator_api as api
from devproxy.errors import Refused

DEFAULT_HOST = "localhost"
KEPT_S = 1.0  # two scrapers at once are one question to the jobs


class Row(NamedTuple):
    """One metric: its name, help with the unit, type, and where its value is."""

    name: str
    help: str
    counts: bool
    value: Callable[[Any], float | None]


def _total(name: str, scale: float = 1.0) -> Callable[[dict[str, Any]], float]:
    return lambda server: server.get("totals", {}).get(name, 0) * scale


OF_JOBS = (
    Row("devproxy_job_images", "Whole images of the job in its store.", False, lambda j: j.images),
    Row("devproxy_job_steps", "Optimizer steps of the job.", True, lambda j: j.steps),
    Row(
        "devproxy_job_step_seconds",
        "Seconds that one optimizer step took of late.",
        False,
        lambda j: j.step_s or None,
    ),
    Row(
        "devproxy_job_still_seconds",
        "Seconds that the job stood still for checkpoints and moves.",
        True,
        lambda j: j.still_s,
    ),
    Row(
        "devproxy_job_stored_bytes",
        "Bytes that the job's images took in the store, compressed.",
        True,
        lambda j: j.stored_bytes,
    ),
    Row(
        "devproxy_job_failures",
        "Verbs of the job that failed, without refused ones.",
        True,
        lambda j: j.failures,
    ),
    Row(
        "devproxy_job_next_image_timestamp_seconds",
        "When the next periodic image is due, in seconds since 1970.",
        False,
        lambda j: j.next_checkpoint_unix_s,
    ),
)
OF_SERVERS = (
    Row(
        "devproxy_server_memory_bytes",
        "Bytes of device memory that the job uses.",
        False,
        lambda s: s.get("memory", {}).get("used", 0),
    ),
    Row(
        "devproxy_server_memory_peak_bytes",
        "Most bytes of device memory that the job used.",
        False,
        lambda s: s.get("memory", {}).get("peak", 0),
    ),
    Row(
        "devproxy_server_memory_limit_bytes",
        "Bytes of device memory that the job may use.",
        False,
        lambda s: s.get("memory", {}).get("total", 0),
    ),
    Row(
        "devproxy_server_uptime_seconds",
        "Seconds since the server started.",
        False,
        lambda s: s.get("uptime_s", 0),
    ),
    Row(
        "devproxy_server_clients",
        "Processes of the job that are attached.",
        False,
        lambda s: s.get("clients_now", 0),
    ),
    Row("devproxy_server_launches", "Kernels and operators launched.", True, _total("launches")),
    Row("devproxy_server_calls", "Messages taken from the rings.", True, _total("calls")),
    Row(
        "devproxy_server_ring_waits",
        "Times that the server slept on an empty ring until a client woke it.",
        True,
        _total("wakes"),
    ),
    Row(
        "devproxy_server_busy_seconds",
        "Seconds that the server spent on messages.",
        True,
        _total("busy_us", 1e-6),
    ),
    Row("devproxy_server_h2d_bytes", "Bytes copied to the device.", True, _total("h2d_bytes")),
    Row("devproxy_server_d2h_bytes", "Bytes copied from the device.", True, _total("d2h_bytes")),
)


class Jobs(Collector):
    """Asks at each scrape. A job or server that does not answer is left out, and counted in devproxy_silent."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._kept: list[Metric] = []
        self._kept_until_s = 0.0

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() >= self._kept_until_s:
                self._kept = list(self._look())
                self._kept_until_s = time.monotonic() + KEPT_S
            yield from self._kept

    def describe(self) -> list[Metric]:
        """Nothing: a registry then does not ask all jobs once at the start."""
        return []

    def _look(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("devproxy_daemon_uptime_seconds", "Seconds since devproxyd started.")
        up.add_metric([], time.monotonic() - self._started_s)
        yield up
        build = GaugeMetricFamily("devproxy_build_info", "1, with the version.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        found, answers, silent = self._ask()
        phases = GaugeMetricFamily("devproxy_jobs", "Jobs by phase, number.", labels=["phase"])
        for phase in api.PHASES:
            phases.add_metric([phase], sum(job.phase == phase for job in found))
        yield phases
        quiet = GaugeMetricFamily("devproxy_silent", "Servers that do not answer, number.")
        quiet.add_metric([], silent)
        yield quiet
        for row in OF_JOBS:
            yield _family(row, ["job"], [([job.job], job) for job in found])
        labelled = [([job, str(s.get("physical_gpu", ""))], s) for job, s in answers]
        for row in OF_SERVERS:
            yield _family(row, ["job", "gpu"], labelled)

    @staticmethod
    def _ask() -> tuple[list[api.JobStatus], list[tuple[str, dict[str, Any]]], int]:
        """(living jobs, (job, what a server of it says), how many servers do not answer)"""
        abi = servers.client_abi()
        found, answers, silent = [], [], 0
        for name, path, alive in runtime.list_jobs():
            status = client.agent_status(name, path, alive)
            found.append(status)
            for answer in servers.ask(vars(status), path, abi) if alive else []:
                if "lost" in answer or "stopped" in answer:
                    silent += 1
                else:
                    answers.append((name, answer))
        return found, answers, silent


def _family(row: Row, labels: list[str], found: list[tuple[list[str], Any]]) -> Metric:
    kind = CounterMetricFamily if row.counts else GaugeMetricFamily
    family = kind(row.name, row.help, labels=labels)
    for names, thing in found:
        if (value := row.value(thing)) is not None:
            family.add_metric(names, value)
    return family


def names() -> set[str]:
    """Of all metrics, as a query writes them."""
    own = {"devproxy_daemon_uptime_seconds", "devproxy_build_info", "devproxy_jobs"}
    own.add("devproxy_silent")
    return own | {row.name + "_total" * row.counts for row in (*OF_JOBS, *OF_SERVERS)}


def serve(where: str) -> str:
    """Answers HTTP on [HOST:]PORT in threads of its own; port 0 takes a free one. Returns HOST:PORT. Raises Refused."""
    host, _, port = where.rpartition(":")
    host = host.strip("[]") or DEFAULT_HOST
    if not port.isdigit() or int(port) > 65535:
        raise Refused(f"--metrics {where!r} is not [HOST:]PORT", "give a port, as 9741")
    registry = CollectorRegistry()
    registry.register(Jobs())
    try:
        server, _ = start_http_server(int(port), host, registry)
    except OSError as error:
        raise Refused(
            f"devproxyd cannot answer Prometheus on {host}:{port} ({error.strerror})",
            "give another [HOST:]PORT to --metrics",
        ) from None
    return f"{host}:{server.server_port}"
