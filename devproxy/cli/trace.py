# SPDX-License-Identifier: Apache-2.0
"""`devproxy trace`: what a job's streams and threads did over some seconds, for Perfetto; `devproxy explain`: the same in words."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from devproxy import machine, state
from devproxy.cli.ask import named_job
from devproxy.cli.output import show_json
from devproxy.cli.perfetto import Writer
from devproxy.control import client, servers
from devproxy.control.coordinator_api import JobStatus
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node.history import Span
from devproxy.proxy import tracing

LONGEST_S = 600.0
LOOK_S = 0.25
ASK_S = 1.0  # between two questions to the supervisor
KINDS = ("phase", "verb", "stage")  # the order of their tracks


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt. A shell without job control starts what it puts in the background with SIGINT
    ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _collect(
    path: str, seconds: float, begins: str = ""
) -> tuple[list[tracing.OfClient], list[Span], float]:
    """Until the time is over, the job has ended, or somebody ends it. begins: what to say when recording has begun.

    (events; phases, verbs and stages; how long it was)
    """
    status = _status(path)
    gpus = len(status.here or status.gpus)
    collector = tracing.Collector(path, gpus, servers.client_abi())
    collector.look()
    if len(collector.silent) == gpus:
        raise Refused(
            f"no server of job {status.job} tells what it does: {collector.silent[0]}",
            "a suspended job has none; a job of an older devproxy cannot be traced",
        )
    spans: dict[tuple[str, str, int], Span] = {}  # one that is under way comes again, longer
    began = asked = time.monotonic()
    from_ns = int(began * 1e9)

    def ask() -> None:
        try:
            found = client.history(path, from_ns)
        except DevproxyError:
            return  # the job has ended, or its supervisor stands: the servers say what they did
        spans.update(((span.kind, span.name, span.begin_ns), span) for span in found)

    try:
        with _ended_by_signals():
            if begins:
                say(begins, "devproxy")
            while os.path.exists(path) and (left := began + seconds - time.monotonic()) > 0:
                time.sleep(min(LOOK_S, left))
                collector.look()
                if time.monotonic() > asked + ASK_S:  # a job that ends takes its spans along
                    asked = time.monotonic()
                    ask()
    except KeyboardInterrupt:  # that is enough
        collector.look()
    ask()
    took = time.monotonic() - began
    # What began before is shown from the trace's begin on, as the servers' events are.
    cut = [replace(span, begin_ns=max(span.begin_ns, from_ns)) for span in spans.values()]
    return collector.clients(), cut, took


def _status(path: str) -> JobStatus:
    client.wait_for_agent(path)  # of a job that has just been started
    return client.ask_agent(path)


def trace(arguments: argparse.Namespace) -> int:
    """Writes the file."""
    job, path = named_job(arguments)
    seconds = _seconds(arguments)
    if not arguments.output:
        arguments.output = f"{job}.pftrace"
    target = os.path.join(machine.working_folder(), arguments.output)
    try:
        with open(target, "wb") as file:
            clients, spans, took = _collect(
                path, seconds, f"tracing job {job} for {seconds:g} s; Ctrl-C ends it"
            )
            events = _write(Writer(file), job, clients, spans)
    except OSError as error:
        raise Refused(
            f"--output {target}: {error.strerror}", "name a file that you may write"
        ) from None
    lost = sum(one.lost for one in clients)
    if arguments.json:
        show_json({"job": job, "file": target, "events": events, "lost": lost, "seconds": took})
        return 0
    print(f"wrote {target}: {events:,} events of job {job} over {took:.1f} s; open it in https://ui.perfetto.dev")  # fmt: skip
    if lost:
        say(f"{lost:,} events came faster than they could be fetched and are missing", "devproxy")
    return 0


def _seconds(arguments: argparse.Namespace) -> float:
    seconds = float(arguments.seconds)
    if not 0 < seconds <= LONGEST_S:
        raise Refused(f"--seconds {seconds:g} is out of range", f"give 0 to {LONGEST_S:g}")
    return seconds


def _write(
    writer: Writer,
    job: str,
    clients: Iterable[tracing.OfClient],
    spans: list[Span],
) -> int:
    of_job: dict[str, int] = {}
    # Stages go on side by side, so each has a track.
    for span in sorted(spans, key=lambda span: (KINDS.index(span.kind), span.begin_ns)):
        where = f"stage {span.name}" if span.kind == "stage" else span.kind
        if where not in of_job:
            of_job[where] = writer.track(f"job {job}: {where}")
        writer.slice(of_job[where], span.kind, span.name, span.begin_ns, span.end_ns)
    count = len(spans)
    for number, one in enumerate(clients):
        rank = "" if one.rank is None else f"rank {one.rank}, "
        # Perfetto takes processes of the same id for one; a process of the job may use several GPUs.
        name = f"{rank}process {one.pid}, GPU {one.gpu}"
        parent = writer.process(name, one.pid if number == 0 else one.pid + (one.gpu << 23))
        tracks: dict[str, int] = {}
        for event in sorted(one.events, key=lambda event: event.begin_ns):
            where = _track_name(event)
            if where not in tracks:
                tracks[where] = writer.track(where, parent)
            kind = tracing.KINDS[event.kind]
            facts = {"bytes": event.bytes} if event.bytes else {}
            if event.kind < tracing.CALL:
                facts["queued_ns"] = event.begin_ns - event.submitted_ns
            writer.slice(
                tracks[where], kind, event.name or kind, event.begin_ns, event.end_ns, facts
            )
        count += len(one.events)
    writer.flush()
    return count


def _track_name(event: tracing.Event) -> str:
    if event.kind == tracing.CALL:
        return f"thread {event.lane}: calls that wait"
    if event.kind == tracing.ROOM:
        return f"thread {event.lane}: waits for room"
    if event.kind == tracing.CUT:
        return "cuts"
    return "steps" if event.kind == tracing.STEP else f"stream {event.lane}"


# -- explain --------------------------------------------------------------------------------------------------------


def union_s(spans: Iterable[tuple[int, int]]) -> float:
    """Seconds that at least one of them covers. ns."""
    covered, reached = 0, 0
    for begin, end in sorted(spans):
        begin = max(begin, reached)
        if end > begin:
            covered += end - begin
            reached = end
    return covered / 1e9


def shares(clients: Iterable[tracing.OfClient], took_s: float) -> list[dict[str, Any]]:
    """For each process: of the time, which share its GPU worked (kernel); else it waited for room in the ring, since the
    server took its messages too slowly (ring); else it waited for an answer (wait); else its own code ran (client). They
    add up to 1."""
    found = []
    for one in clients:
        spans: list[tuple[int, int]] = []
        reached: list[float] = []
        for kinds in (range(tracing.CALL), (tracing.ROOM,), (tracing.CALL,)):
            spans += [(e.begin_ns, e.end_ns) for e in one.events if e.kind in kinds]
            reached.append(min(union_s(spans) / took_s, 1.0))
        kernel, with_ring, with_wait = reached
        found.append(
            {
                "pid": one.pid,
                "gpu": one.gpu,
                "rank": one.rank,
                "kernel": round(kernel, 4),
                "ring": round(with_ring - kernel, 4),
                "wait": round(with_wait - with_ring, 4),
                "client": round(1 - with_wait, 4),
            }
        )
    return found


def refused(log: str) -> list[str]:
    """The functions that devproxy refused the job, each once, as its log has them (csrc/base/refusal.h)."""
    found: dict[str, None] = {}
    for path in (f"{log}.1", log):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    by_device = line.startswith("devproxy: refused by the device of GPU ")
                    if by_device or (line.startswith("devproxy: ") and " is refused: " in line):
                        found[line.strip().removeprefix("devproxy: ")] = None
        except OSError:
            continue  # it has said nothing so far
    return list(found)


def _totals(path: str) -> dict[int, dict[str, Any]]:
    status = client.ask_agent(path)
    answers = servers.ask(vars(status), path, servers.client_abi())
    return {answer["gpu"]: answer["totals"] for answer in answers if "totals" in answer}


def explain(arguments: argparse.Namespace) -> int:
    """Why not checkpointable, why slow."""
    job, path = client.find_job(arguments.job)
    seconds = _seconds(arguments)
    status = _status(path)
    why = "" if status.checkpointable else status.why_not
    try:
        if not why:
            client.Client().check(job, strict=arguments.strict)
    except Refused as error:
        why = str(error)
    facts: dict[str, Any] = {
        "refused": refused(state.log_path(job)),
        "job": job,
        "phase": status.phase,
        "checkpointable": not why,
        "why_not": why,
        "last_error": status.last_error,
    }
    try:
        before = _totals(path)
        clients, _, took = _collect(path, seconds)
        after = _totals(path)
        facts["processes"] = shares(clients, took)
        facts["servers"] = [
            {
                "gpu": gpu,
                "server": round((after[gpu]["busy_us"] - was["busy_us"]) / 1e6 / took, 4),
                "ring_wakes_per_s": round((after[gpu]["wakes"] - was["wakes"]) / took, 1),
                "launches_per_s": round((after[gpu]["launches"] - was["launches"]) / took, 1),
            }
            for gpu, was in before.items()
            if gpu in after
        ]
    except Refused as error:
        facts["not_measured"] = str(error)
    if arguments.json:
        show_json(facts, indent=2)
        return 0
    print(f"job {job} is {status.phase}")
    print(f"checkpoint: {why or 'nothing is in its way'}")
    if status.last_error:
        print(f"last error: {status.last_error}")
    for text in facts["refused"]:
        print(f"refused: {text}")
    for one in facts.get("processes", []):
        who = f"process {one['pid']} on GPU {one['gpu']}"
        print(
            f"{who}: {one['kernel']:.0%} its GPU worked, {one['ring']:.0%} it waited for room in the ring,"
            f" {one['wait']:.0%} for an answer,"
            f" {one['client']:.0%} its own code ran"
        )
    for one in facts.get("servers", []):
        print(
            f"server of GPU {one['gpu']}: busy {one['server']:.0%} with messages, woken at its ring"
            f" {one['ring_wakes_per_s']:,.0f} times a second, {one['launches_per_s']:,.0f} launches a second"
        )
    if "not_measured" in facts:
        print(f"not measured: {facts['not_measured']}")
    return 0
