# SPDX-License-Identifier: Apache-2.0
"""`devproxy ps` and `devproxy status`: what the jobs of this user are doing."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from devproxy import records, runtime
from devproxy.cli.output import show_json
from devproxy.cli.table import show_table
from devproxy.control import client, servers
from devproxy.control import coordinator_api as api
from devproxy.control.stores import name_in, open_stores
from devproxy.errors import DevproxyError
from devproxy.machine import show_bytes, show_time


def job_facts(name: str, path: str, alive: bool) -> dict[str, Any]:
    """What devproxy-run wrote in job.json, whether the job lives, and what its coordinator says."""
    facts: dict[str, Any] = {"job": name, "alive": alive, "gpus": [], "device": "?", "command": []}
    facts |= client.job_file(path)
    # asdict would copy a list of arguments that may be long; this is the same, and flat.
    return facts | vars(client.agent_status(name, path, alive))


def _elsewhere(path: str, facts: dict[str, Any]) -> list[api.NodeServers]:
    """Of a job of several hosts, what the servers of the others count."""
    if len(facts["nodes"]) < 2 or facts["phase"] in servers.WITHOUT_SERVERS:
        return []
    try:
        return client.elsewhere(path)
    except DevproxyError as error:
        return [api.NodeServers("the other nodes", [], error.what)]


def all_jobs() -> list[dict[str, Any]]:
    """Every job of this user, with its servers' answers under "servers", and those of its other hosts under "elsewhere"."""
    abi = servers.client_abi()
    jobs = []
    for name, path, alive in runtime.list_jobs():
        facts = job_facts(name, path, alive)
        facts["servers"] = servers.ask(facts, path, abi) if alive else []
        facts["elsewhere"] = [asdict(n) for n in _elsewhere(path, facts)] if alive else []
        jobs.append(facts)
    return jobs


def everywhere(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of all its hosts' servers."""
    answers: list[dict[str, Any]] = list(job["servers"])
    for node in job.get("elsewhere", []):  # none of a job that is dead
        answers += node["servers"]
    return answers


def ps(arguments: argparse.Namespace) -> int:
    """One line per job."""
    jobs = all_jobs()
    if arguments.json:
        show_json({"jobs": jobs}, indent=2)
        return 0
    if not jobs:
        print("no jobs")
        return 0
    rows = []
    for job in jobs:
        answered = [s for s in everywhere(job) if not silent(s)]
        used = sum(s.get("memory", {}).get("used", 0) for s in answered)
        total = sum(s.get("memory", {}).get("total", 0) for s in answered)
        age_s = time.time() - job["started_unix_s"] if job["started_unix_s"] else 0
        clients = [client for s in answered for client in s.get("clients", [])]
        ranks = sum(client.get("rank") is not None for client in clients)
        rows.append(
            [
                job["job"],
                str(job.get("pid", "?")),
                state_of(job),
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


def state_of(job: dict[str, Any]) -> str:
    if not job["alive"]:
        return "dead"
    for word in ("lost", "stopped"):
        if any(word in server for server in everywhere(job)):
            return f"server {word}"
    return str(job["phase"])


def silent(server: dict[str, Any]) -> str:
    """Why there are no statistics of a server; "" where there are."""
    return str(server.get("lost") or server.get("stopped") or "")


def _looked_for(name: str) -> tuple[str, str, bool]:
    """(name, folder, alive); no folder for a job that has ended and is remembered. Raises Refused."""
    if not name:
        return *client.find_job(""), True
    jobs = runtime.list_jobs()
    found = next((job for job in jobs if job[0] == name), None)
    if not (found and found[2]) and records.read(name):
        return name, "", False  # what a dead one left is swept soon
    if found:
        return found
    raise client.no_such_job(name, [*(job for job, _, _ in jobs), *records.names()])


def _ended(name: str, as_json: bool) -> int:
    """A job whose folder is gone: how it ended, and what is left of it."""
    facts = records.read(name)
    problem = _problem_of(facts.get("image", ""), facts.get("stores", []))
    if as_json:
        more = {"alive": False, "phase": api.GONE, "image_problem": problem}
        show_json(facts | more, indent=2)
        return 0
    if "exit_code" in facts:
        ended = show_time(facts["ended_unix_s"])
        ran = facts["ended_unix_s"] - facts.get("started_unix_s", facts["ended_unix_s"])
        print(f"job {name} has ended, exit code {facts['exit_code']}, at {ended} after {ran:.0f} s")
    else:
        print(f"job {name} has ended; its supervisor was killed, so nobody knows how")
    print(f"command: {' '.join(facts.get('command', []))}")
    if facts.get("stores"):
        last = f" (the last: {facts['image']})" if facts.get("image") else ""
        print(f"it has images in store {facts['stores'][0]}{last}: devproxy restore {name}")
        if problem:
            print(problem)
        if line := _verified(name):
            print(line)
    else:
        print("it has no images")
    return 0


def _problem_of(image: str, stores: list[str]) -> str:
    """What is known to be wrong with a job's last image. A store behind a URL may take its time, and is not asked."""
    if not image or not stores or not stores[0].startswith("file://"):
        return ""
    try:
        [store] = open_stores(stores[0], looks=True)
        found = store.verify(image)
    except (DevproxyError, OSError):
        return ""
    return "" if found.whole else f"image {image} is not whole: {found.problem}"


def _verified(job: str) -> str:
    """How many of its images somebody has read whole. "" where a store behind a URL would have to say so."""
    stores = records.read(job).get("stores", [])
    if not stores or not stores[0].startswith("file://"):
        return ""
    try:
        [store] = open_stores(stores[0], looks=True)
        images = {image for image in store.image_ids() if name_in(image) == job}
        read = {image: at for image, at in store.verified().items() if image in images}
    except (DevproxyError, OSError):
        return ""
    last = f", the last one at {show_time(max(read.values()))}" if read else ""
    return f"verified by reading every chunk: {len(read)} of {len(images)} images{last}"


def status(arguments: argparse.Namespace) -> int:
    """One job, all that its servers say."""
    name, path, alive = _looked_for(arguments.job)
    if not path:
        return _ended(name, arguments.json)
    facts = job_facts(name, path, alive)
    facts["servers"] = servers.ask(facts, path, servers.client_abi()) if alive else []
    elsewhere = _elsewhere(path, facts) if alive else []
    facts["elsewhere"] = [asdict(node) for node in elsewhere]
    if arguments.json:
        show_json(facts, indent=2)
        return 0
    print(f"job {name}, {state_of(facts)}, devproxy-run is process {facts.get('pid', '?')}")
    print(f"command: {' '.join(facts['command'])}")
    here = facts["here"] or facts["gpus"]
    print(f"GPUs of this machine: {', '.join(str(gpu) for gpu in here) or 'none'}")
    for line in facts["nodes"]:
        print(line)
    if facts["checkpointable"]:
        last = f", the last one {facts['last_image']}" if facts["last_image"] else ""
        pace = f", {facts['step_s']:.3f} s each" if facts["step_s"] else ""
        print(f"images: {facts['images']}{last}; optimizer steps: {facts['steps']}{pace}")
        if facts["image_problem"]:
            print(facts["image_problem"])
        if facts["images"] and (line := _verified(name)):
            print(line)
        if facts["next_checkpoint_unix_s"]:
            print(f"next image {_until(facts['next_checkpoint_unix_s'])}")
    else:
        print(f"no checkpoints: {facts['why_not']}")
        if facts["images"]:  # node 0 takes them
            print(f"images of the job: {facts['images']}, the last one {facts['last_image']}")
    if facts["last_cut"]:
        print(f"last cut of all ranks: {facts['last_cut']}")
    if facts["last_error"]:
        print(f"last error: {facts['last_error']}")
    _print_servers(facts["servers"], "this machine")
    for node in elsewhere:
        print(f"{node.node}: {node.problem or 'its servers:'}")
        _print_servers(node.servers, node.node)
    return 0


def _until(unix_s: float) -> str:
    left_s = unix_s - time.time()
    return f"in {left_s:.0f} s" if left_s >= 1 else "now"


def _place(server: dict[str, Any], host: str) -> str:
    place = f"GPU {server.get('physical_gpu', '?')} of {host}"
    switches = server.get("switches")  # None: no other GPU of the job is there
    return place if switches is None else f"{place}, shared; {switches:,} switches"


def _splicing(counts: dict[str, int], launches: int) -> str:
    """launches: of all ranks on that GPU of the machine, as they have asked for them."""
    text = f"{counts['squashed']:,} launches squashed in {counts['validations']:,} validations"
    if launches:
        text += f", {counts['squashed'] / launches:.1%} of all ranks' launches there"
    if counts["different"] or counts["given_up"]:
        text += f" ({counts['different']:,} different, {counts['given_up']:,} given up)"
    text += f"; {counts['saved_bytes'] >> 20:,} MiB kept once"
    if counts["off"]:
        text += "; nothing more is squashed: it cost over 5 % more than it saved"
    return text


def _ledger(use: dict[str, int]) -> str:
    """Of a GPU of this machine that several of the job's share."""
    text = f"{show_bytes(use['taken'])} taken, {show_bytes(use['saved'])} of it kept once"
    text += f"; with other jobs {show_bytes(use['used'])} of {show_bytes(use['total'])}"
    if (over := use["used"] - use["total"]) > 0:
        text += f": {show_bytes(over)} over, other jobs get none"
    return text


def _print_servers(found: list[dict[str, Any]], host: str) -> None:
    launches: dict[Any, int] = {}
    for server in found:
        gpu = server.get("physical_gpu")
        launches[gpu] = launches.get(gpu, 0) + server.get("totals", {}).get("launches", 0)
    for server in found:
        if why := silent(server):
            print(f"GPU {server['gpu']}: {why}")
        else:
            _print_server(server, host, launches[server.get("physical_gpu")])


def _print_server(server: dict[str, Any], host: str, launches: int) -> None:
    memory, totals = server.get("memory", {}), server.get("totals", {})
    chaos = ", chaos mode" if server.get("chaos") else ""
    rows = [
        ["device", f"{server.get('name', '?')} ({server.get('device', '?')}{chaos})"],
        ["server", f"process {server.get('pid', '?')}, up {server.get('uptime_s', 0):.0f} s"],
        ["runs on", _place(server, host)],
        [
            "memory",
            f"{show_bytes(memory.get('used', 0))} used, {show_bytes(memory.get('peak', 0))} peak,"
            f" {show_bytes(memory.get('total', 0))} in all",
        ],
        # Nothing where no other GPU of the job is there, or it is off.
        *(
            [["splicing", _splicing(counts, launches)]]
            if (counts := server.get("splicing"))
            else []
        ),
        *([["all ranks there", _ledger(use)]] if counts and (use := server.get("ledger")) else []),
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
