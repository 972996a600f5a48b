"""devproxy: look at jobs and at the machine. Every verb has --json."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, NoReturn

from devproxy import __version__, config, layout, runtime
from devproxy.cli import verbs as job_verbs
from devproxy.cli.table import show_table
from devproxy.control import client
from devproxy.control import coordinator_api as api
from devproxy.errors import DevproxyError, Refused, ServerUnreachable
from devproxy.log import say
from devproxy.machine import show_bytes
from devproxy.proxy import stats


def _abi() -> bytes:
    """The ABI id to say hello with; zeros where nothing is built (then the server says so)."""
    from devproxy.proxy import preflight, server_set  # not for the verbs that ask no server

    try:
        return bytes.fromhex(
            server_set.client_abi(os.path.join(config.lib_dir(), preflight.DRIVER_SHIM))
        )
    except Refused:
        return bytes(layout.ABI_BYTES)


# Phases in which a job has no servers to ask.
WITHOUT_SERVERS = (api.STARTING, api.SUSPENDED, api.RESTORING, api.GONE)


def job_facts(name: str, path: str, alive: bool) -> dict[str, Any]:
    """What devproxy-run wrote in job.json, whether the job lives, and what its coordinator says."""
    facts: dict[str, Any] = {"job": name, "alive": alive, "gpus": [], "device": "?", "command": []}
    facts |= client.job_file(path)
    # asdict would copy a list of arguments that may be long; this is the same, and flat.
    return facts | vars(client.agent_status(name, path, alive))


def ask_servers(facts: dict[str, Any], path: str, abi: bytes) -> list[dict[str, Any]]:
    """Statistics of each GPU's server, or {"gpu", "lost"} where it does not answer."""
    answers: list[dict[str, Any]] = []
    if facts["phase"] in WITHOUT_SERVERS:
        return answers
    for gpu in range(len(facts["here"] or facts["gpus"])):
        try:
            answers.append(stats.query(path, gpu, abi))
        except ServerUnreachable as error:
            answers.append({"gpu": gpu, "lost": str(error)})
    return answers


def all_jobs() -> list[dict[str, Any]]:
    """Every job of this user, with its servers' answers under "servers"."""
    abi = _abi()
    jobs = []
    for name, path, alive in runtime.list_jobs():
        facts = job_facts(name, path, alive)
        facts["servers"] = ask_servers(facts, path, abi) if alive else []
        jobs.append(facts)
    return jobs


def _dump(value: object) -> int:
    print(json.dumps(value, indent=2))
    return 0


def ps(arguments: argparse.Namespace) -> int:
    """One line per job."""
    jobs = all_jobs()
    if arguments.json:
        return _dump(jobs)
    if not jobs:
        print("no jobs")
        return 0
    rows = []
    for job in jobs:
        answered = [s for s in job["servers"] if "lost" not in s]
        used = sum(s.get("memory", {}).get("used", 0) for s in answered)
        total = sum(s.get("memory", {}).get("total", 0) for s in answered)
        age_s = time.time() - job["started_unix_s"] if job["started_unix_s"] else 0
        clients = [client for s in answered for client in s.get("clients", [])]
        ranks = sum(client.get("rank") is not None for client in clients)
        rows.append(
            [
                job["job"],
                str(job.get("pid", "?")),
                _state(job),
                f"{len(job['gpus'])} {job['device']}",
                str(sum(s.get("clients_now", 0) for s in answered)),
                str(ranks or ""),
                f"{show_bytes(used)} / {show_bytes(total)}",
                str(job["images"]),
                f"{age_s:.0f} s",
                " ".join(job["command"])[:60],
            ]
        )
    show_table(
        "",
        ["JOB", "PID", "STATE", "GPUS", "CLIENTS", "RANKS", "MEMORY", "IMAGES", "AGE", "COMMAND"],
        rows,
    )
    return 0


def _state(job: dict[str, Any]) -> str:
    if not job["alive"]:
        return "dead"
    lost = any("lost" in s for s in job["servers"])
    return "server lost" if lost else str(job["phase"])


def status(arguments: argparse.Namespace) -> int:
    """One job, all that its servers say."""
    if arguments.job:
        found = next((j for j in runtime.list_jobs() if j[0] == arguments.job), None)
        if found is None:
            raise Refused(f"there is no job {arguments.job!r}", "see: devproxy ps")
        name, path, alive = found
    else:
        name, path = client.find_job("")
        alive = True
    facts = job_facts(name, path, alive)
    facts["servers"] = ask_servers(facts, path, _abi()) if alive else []
    if arguments.json:
        return _dump(facts)
    print(f"job {name}, {_state(facts)}, devproxy-run is process {facts.get('pid', '?')}")
    print(f"command: {' '.join(facts['command'])}")
    here = facts["here"] or facts["gpus"]
    print(f"GPUs of this machine: {', '.join(str(gpu) for gpu in here) or 'none'}")
    for line in facts["nodes"]:
        print(line)
    if facts["checkpointable"]:
        last = f", the last one {facts['last_image']}" if facts["last_image"] else ""
        print(f"images: {facts['images']}{last}; optimizer steps: {facts['steps']}")
        if facts["next_checkpoint_unix_s"]:
            print(f"next image in {facts['next_checkpoint_unix_s'] - time.time():.0f} s")
    else:
        print(f"no checkpoints: {facts['why_not']}")
    if facts["last_cut"]:
        print(f"last cut of all ranks: {facts['last_cut']}")
    if facts["last_error"]:
        print(f"last error: {facts['last_error']}")
    for server in facts["servers"]:
        if "lost" in server:
            print(f"GPU {server['gpu']}: {server['lost']}")
            continue
        _print_server(server)
    return 0


def _place(server: dict[str, Any]) -> str:
    place = f"GPU {server.get('physical_gpu', '?')} of this machine"
    switches = server.get("switches")  # None: no other GPU of the job is there
    return place if switches is None else f"{place}, shared; {switches:,} switches"


def _splicing(counts: dict[str, int]) -> str:
    text = f"{counts['squashed']:,} launches squashed in {counts['validations']:,} validations"
    if counts["different"] or counts["given_up"]:
        text += f" ({counts['different']:,} different, {counts['given_up']:,} given up)"
    return f"{text}; {counts['saved_bytes'] >> 20:,} MiB kept once"


def _print_server(server: dict[str, Any]) -> None:
    memory, totals = server.get("memory", {}), server.get("totals", {})
    chaos = ", chaos mode" if server.get("chaos") else ""
    rows = [
        ["device", f"{server.get('name', '?')} ({server.get('device', '?')}{chaos})"],
        ["server", f"process {server.get('pid', '?')}, up {server.get('uptime_s', 0):.0f} s"],
        ["runs on", _place(server)],
        [
            "memory",
            f"{show_bytes(memory.get('used', 0))} used, {show_bytes(memory.get('peak', 0))} peak,"
            f" {show_bytes(memory.get('total', 0))} in all",
        ],
        # Nothing where no other GPU of the job is there, or it is off.
        *([["splicing", _splicing(counts)]] if (counts := server.get("splicing")) else []),
        ["clients", str(server.get("clients_now", 0))],
    ]
    for key, value in totals.items():
        shown = show_bytes(value) if key.endswith("_bytes") else f"{value:,}"
        rows.append([key, shown])
    if server.get("sticky"):
        rows.append(["sticky error", str(server["sticky"])])
    show_table(f"GPU {server.get('gpu', '?')}", ["", ""], rows)
    clients = server.get("clients", [])
    if clients:
        show_table(
            "",
            ["CLIENT", "RANK", "SLOT", "CALLS", "LAUNCHES", "LIVE", "PEAK"],
            [
                [
                    str(c.get("pid", "?")),
                    "" if c.get("rank") is None else str(c["rank"]),
                    str(c.get("slot", "?")),
                    f"{c.get('calls', 0):,}",
                    f"{c.get('launches', 0):,}",
                    show_bytes(c.get("live_bytes", 0)),
                    show_bytes(c.get("peak_bytes", 0)),
                ]
                for c in clients
            ],
        )


def doctor(arguments: argparse.Namespace) -> int:
    """What is missing here, and the command that mends it. Exit code 1 when something needed is missing."""
    from devproxy.cli import doctor as examine  # half of devproxy, for this verb alone

    findings = examine.examine(arguments.python)
    if arguments.json:
        _dump([finding._asdict() for finding in findings])
    else:
        show_table(
            "",
            ["", "WHAT", "FOUND", "TO MEND IT"],
            [[f.mark(), f.what, f.found, f.remedy if not f.ok else ""] for f in findings],
        )
    return int(any(f.needed and not f.ok for f in findings))


def build_torch(arguments: argparse.Namespace) -> int:
    """Builds the software GPU's torch plugin for one Python's torch."""
    import importlib  # an installed devproxy may come without the builder

    try:
        builder = importlib.import_module("devproxy.torch.build")
    except ImportError as error:
        raise DevproxyError(
            f"the builder of the torch plugin cannot be loaded ({error})", "install devproxy again"
        ) from None
    argv = ["--out", config.lib_dir()]
    if arguments.python:
        argv += ["--python", arguments.python]
    return int(builder.main(argv))


def make_trust(arguments: argparse.Namespace) -> int:
    """The certificate that the hosts of one owner know one another by, made once."""
    from devproxy.control import trust  # gRPC

    folder = trust.make()
    if arguments.json:
        _dump({"folder": folder})
    else:
        print(f"made {folder}: copy this folder, and the key of the images, to your other hosts")
    return 0


class _Parser(argparse.ArgumentParser):
    """Bad input is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        say(f"{message}: see {self.prog} --help", "devproxy")
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="devproxy", description=__doc__)
    top.add_argument("--version", action="version", version=f"devproxy {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="machine-readable output")
        return sub

    verb("ps", ps, "the jobs of this user")
    verb("status", status, "one job in detail").add_argument(
        "job", metavar="JOB", nargs="?", default="", help="may be left out when one job lives"
    )
    job_verbs.add_to(verb)
    verb("doctor", doctor, "what this machine lacks, and what mends it").add_argument(
        "--python", default=sys.executable, help="the Python whose torch is looked at"
    )
    verb("trust", make_trust, "make what your hosts know one another by")
    verb("build-torch", build_torch, "build the software GPU's plugin for a torch").add_argument(
        "--python", default="", help="the Python whose torch it is for (this one)"
    )
    return top


def main() -> NoReturn:
    """Entry point of devproxy."""
    arguments = parser().parse_args()
    try:
        code = int(arguments.run(arguments))
    except DevproxyError as error:
        if arguments.json:
            facts = {"error": error.what, "remedy": error.remedy}
            facts |= {n: v for n in ("stage", "object", "state") if (v := getattr(error, n, ""))}
            print(json.dumps(facts), file=sys.stderr)
        else:
            say(str(error), "devproxy")
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
