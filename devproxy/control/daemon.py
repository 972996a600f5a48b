# SPDX-License-Identifier: Apache-2.0
"""devproxyd: one per user and host. Finds jobs through their folders, forwards verbs to their agents, starts agents.

It keeps no state: killed at any moment it harms no job, and the next one finds the same jobs. It leaves when no job has
lived and no call has run for IDLE_S.

Threads: one per call, daemon threads; the main thread looks for the end. Locks: Calls._lock, a leaf. What it does when it
serves stands in devproxyd/.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from devproxy import __version__, config, runtime, share, state
from devproxy import log as log_module
from devproxy.control import client
from devproxy.control.client import BUSY, READY
from devproxy.control.devproxyd.log import log
from devproxy.errors import DevproxyError, Refused
from devproxy.node import burial

# Late imports: of daemons that start at once, all but one only say BUSY, and load no gRPC.
if TYPE_CHECKING:
    from devproxy.control.devproxyd.service import Service
    from devproxy.control.quiet_grpc import grpc

IDLE_S = 10.0
LOOK_S = 0.2
LOOK_FOR_JOBS_S = 1.0
LOG_LIMIT_BYTES = 1 << 20
MOST_CALLS = 256


def idle_s() -> float:
    """Seconds with neither job nor call after which the daemon leaves."""
    try:
        return max(0.0, float(os.environ.get(config.DAEMON_IDLE_S) or IDLE_S))
    except ValueError:
        return IDLE_S


@dataclass(frozen=True)
class Wishes:
    """stay: serve until a signal, also without jobs. listen: HOST:PORT for clients on other hosts, by mTLS. metrics: HOST:PORT
    for Prometheus, without any authentication. "": not."""

    stay: bool = False
    listen: str = ""
    metrics: str = ""


def _lock_in_place_of_another() -> int | None:
    """Asks a daemon that a command has started to leave once its calls have ended, so that a service takes its place."""
    deadline = time.monotonic() + client.START_TIMEOUT_S
    while (lock := runtime.take_daemon_lock()) is None and time.monotonic() < deadline:
        client.leave(runtime.daemon_socket())
        time.sleep(0.05)
    return lock


def run(tell: Callable[[bytes], None], wishes: Wishes = Wishes()) -> int:
    """Serves until there is nothing left to do. tell(READY) when it serves, tell(BUSY) when another one does."""
    burial.install()
    lock = _lock_in_place_of_another() if wishes.stay else runtime.take_daemon_lock()
    if lock is None:
        tell(BUSY)
        return 0
    # A plain list: a handler that sets an Event may find its lock held by the wait that it interrupts.
    told_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told_to_end.append(number))
    try:
        from devproxy.control import agent_service
        from devproxy.control._pb import job_pb2_grpc
        from devproxy.control.devproxyd.service import Service

        service = Service()

        def add(server: grpc.Server) -> None:
            job_pb2_grpc.add_DevproxyServicer_to_server(service, server)
            _add_standard_services(server)
            if wishes.listen:
                _listen(server, wishes.listen)

        server = agent_service.make_server(runtime.daemon_socket(), add, MOST_CALLS)
        if wishes.metrics:
            from devproxy.control import metrics  # prometheus_client: for this option alone

            log(f"metrics on http://{metrics.serve(wishes.metrics)}/metrics")
        log(f"serves version={__version__} root={runtime.root_path()}")
        tell(READY)
        why = _serve(service, told_to_end, wishes.stay)
        log(f"leaves: {why}")
        server.stop(1.0).wait(3.0)
    finally:
        runtime.give_daemon_lock_back(lock)
    return 0


def _add_standard_services(server: grpc.Server) -> None:
    """gRPC's own health and reflection, for probes and grpcurl."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    from devproxy.control import quiet_grpc  # noqa: F401  gRPC with our settings, before the two below
    from devproxy.control._pb import job_pb2 as pb

    ours = pb.DESCRIPTOR.services_by_name["Devproxy"].full_name
    probe = health.HealthServicer()
    for name in ("", ours):
        probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    names = (ours, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _listen(server: grpc.Server, where: str) -> None:
    """Raises Refused."""
    from devproxy.control import trust

    credentials = trust.load().server()
    try:
        port = server.add_secure_port(where, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise Refused(f"devproxyd cannot listen on {where}", "give another HOST:PORT to --listen")
    log(f"listens host={where.rpartition(':')[0]} port={port}")


def _serve(service: Service, told_to_end: list[int], stay: bool) -> str:
    """Returns why it ends."""
    idle = float("inf") if stay else idle_s()
    next_look = 0.0
    while not told_to_end:
        time.sleep(min(LOOK_S, idle or LOOK_S))
        if time.monotonic() >= next_look:
            service.agents.reap()
            if any(alive for _, _, alive in runtime.list_jobs()):
                service.calls.busy()
            next_look = time.monotonic() + min(LOOK_FOR_JOBS_S, idle)
        if service.calls.should_leave(idle):
            return "asked to" if service.calls.leave_asked else f"nothing to do for {idle:g} s"
    service.calls.take_no_more()
    return f"signal {told_to_end[0]}"


def _open_log() -> int:
    """The log, begun anew when it is long."""
    path = os.path.join(state.subfolder("logs"), "devproxyd.log")
    try:
        if os.path.getsize(path) > LOG_LIMIT_BYTES:
            os.replace(path, path + ".1")
    except FileNotFoundError:
        pass
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _teller(told_fd: int) -> Callable[[bytes], None]:
    """The way to tell our starter how it goes, once."""
    os.set_inheritable(told_fd, False)
    told = False

    def tell(text: bytes) -> None:
        nonlocal told
        if not told:
            told = True
            os.write(told_fd, text)
            os.close(told_fd)

    return tell


def _detach() -> None:
    """Takes the log for stdout and stderr. The rest client.start_daemon has done."""
    # What a supervisor blocks is handed down to us.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    log_fd = _open_log()
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)


def main() -> NoReturn:
    """Entry point of devproxyd."""
    parser = argparse.ArgumentParser(prog="devproxyd", description="Serves this user's jobs.")
    parser.add_argument("--version", action="version", version=f"devproxy {__version__}")
    parser.add_argument("--foreground", action="store_true", help="stay here, say on stderr")
    parser.add_argument(
        "--stay", action="store_true", help="serve until a signal, also without jobs: for a service"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="",
        help="also serve other hosts there, that have the certificate of devproxy trust",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        default="",
        help="answer Prometheus there (HOST: localhost); anybody who gets there may read",
    )
    parser.add_argument(
        "--log-format", choices=log_module.FORMATS, help="how its log and its agents' is written"
    )
    parser.add_argument(
        "--print",
        choices=share.NAMES,
        help="print a file for operators, and end (docs/operators.md)",
    )
    parser.add_argument("--told", type=int, help=argparse.SUPPRESS)  # by client.start_daemon
    arguments = parser.parse_args()
    if arguments.print:
        print(share.text(arguments.print), end="")
        sys.exit(0)
    if arguments.log_format:
        os.environ[log_module.FORMAT] = arguments.log_format
    wishes = Wishes(arguments.stay, arguments.listen, arguments.metrics)
    code = 0
    tell: Callable[[bytes], None] = _say_foreground
    try:
        if arguments.told is not None:
            tell = _teller(arguments.told)
            _detach()
        elif not arguments.foreground:
            if wishes != Wishes():
                raise Refused(
                    "--stay, --listen and --metrics are for a daemon in the foreground",
                    "give --foreground, or run it as a service (docs/operators.md)",
                )
            client.ensure_daemon()
            sys.exit(0)
        code = run(tell, wishes)
    except (DevproxyError, OSError) as error:
        log(f"cannot serve: {error}")
        tell(str(error).encode())
        code = error.exit_code if isinstance(error, DevproxyError) else 1
    sys.stdout.flush()
    os._exit(code)  # threads of calls that were cut off may hang about


def _say_foreground(text: bytes) -> None:
    if text == BUSY:
        log("another devproxyd serves this user")


if __name__ == "__main__":
    main()
