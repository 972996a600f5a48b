# SPDX-License-Identifier: Apache-2.0
"""What calls and steps cost, natively and through the proxy in turn."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devproxy import proctree
from gpucheck.campaign import time_left_s
from gpucheck.ends import Failed
from gpucheck.profile import profile
from gpucheck.report import Report
from gpucheck.running import Way, read
from gpucheck.setup import Setup, cannot_register
from gpucheck.stage import stage
from gpucheck.torch_sides import need_plugin, torch_line, torch_ways

# Of the native time of a step.
TORCH_TARGETS = {"resnet50": 1.01, "bert_base": 1.01, "gpt2_small": 1.01, "launch_bound": 1.0}
TORCH_STEPS = {"resnet50": 8, "bert_base": 8, "gpt2_small": 8, "launch_bound": 500}
PAIRS = 7


class Partner:
    """A program that is told by lines what to do and answers each with a line of JSON (tests/subjects/gpu/torch_cost.py)."""

    def __init__(self, way: Way, line: Sequence[str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as said:
            self.process = subprocess.Popen(
                [*way.prefix, *line], env=way.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=said, start_new_session=True,
            )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self.lines.put(line.decode(errors="replace"))
        self.lines.put("")

    def answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=max(0.1, limit_s))
        except queue.Empty:
            raise Failed(f"no answer within {limit_s:.0f} s") from None
        if not line:
            said = (read(str(self.log)) or "").splitlines()[-3:]
            raise Failed(f"the program ended: {' | '.join(said)[:500]}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def ask(self, line: str, limit_s: float) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return self.answer(limit_s)


@stage(150, 75)
def t_cost(setup: Setup, report: Report) -> None:
    """A step of ResNet-50, BERT base, GPT-2 small and of twenty small ops, natively and proxied by turns: medians and ratios."""
    need_plugin(setup)
    ways = dict(zip(("native", "proxied"), torch_ways(setup), strict=True))
    ways["proxied"].env["DEVPROXY_LOG"] = "warn,device=info"
    line = torch_line(setup, "torch_cost.py")
    partners = {title: Partner(way, line, setup.work / f"cost-{title}.log") for title, way in ways.items()}  # fmt: skip
    wrong = []
    try:
        ready = {title: one.answer(min(100, time_left_s() - 10)) for title, one in partners.items()}
        report.put("ready", {title: facts["ready"] for title, facts in ready.items()})
        cases = [c for c in TORCH_TARGETS if c in ready["native"]["cases"]]
        for number, case in enumerate(reversed(cases)):  # the launch-bound one first: it is quick
            budget = (time_left_s() - 8) / (len(cases) - number)
            if why := cost_of(case, partners, report, budget, setup.small):
                wrong.append(f"{case}: {why}")
        # mapped: hundreds are the models' first steps, thousands each step's. marked: for how many commands
        report.put("counted", counted_so_far(ways["proxied"]))
        report.put("mapped_when", mapped_when(ways["proxied"]))
        for one in partners.values():
            assert one.process.stdin
            one.process.stdin.close()
    except (BrokenPipeError, Failed) as error:
        wrong.append(str(error) or "a program ended")
    if wrong:
        raise Failed("; ".join(wrong))


def watched(partner: Partner, case: str, steps: int) -> dict[str, Any]:
    """A profile of a program and its server during the first second of another measurement."""
    seen: dict[str, Any] = {}
    watching = threading.Thread(
        target=lambda: seen.update(profile(under(partner.process.pid), 1.0))
    )
    watching.start()
    seen["took"] = partner.ask(f"time {case} {steps}", 40)
    watching.join()
    return seen


def server_says(way: Way) -> str:
    """The logs of the servers that are there."""
    logs = Path(way.env["DEVPROXY_SHM_DIR"]).glob("*/*/gpu0.log")
    return "\n".join(read(str(log)) or "" for log in logs)


def mapped_when(way: Way) -> list[str]:
    """The last lines in which the server says how often it has mapped, with their times."""
    return [line for line in server_says(way).splitlines() if "memory was mapped" in line][-40:]


def counted_so_far(way: Way) -> dict[str, Any]:
    """How often the server has mapped device memory and marked a stream, and for how many commands, to the last power of
    two; and the latter at each power of two. Empty: it did not say."""
    said = server_says(way)
    mapped = re.findall(r"memory was mapped (\d+) times", said)
    marked = re.findall(r"streams were marked (\d+) times so far, for (\d+) commands", said)
    return {
        "mapped": int(mapped[-1]) if mapped else 0,
        "marked": {int(m): int(c) for m, c in marked},
    }


def cost_of(case: str, partners: dict[str, Partner], report: Report, budget_s: float, small: bool) -> str:  # fmt: skip
    """Puts medians and ratios into the report. Returns what is wrong: not the ratios, those are only shown."""
    end = time.monotonic() + budget_s
    steps = 2 if small else TORCH_STEPS[case]
    losses = {}
    for title, partner in partners.items():
        answer = partner.ask(f"warm {case} {2 if small else 12}", end - time.monotonic() + 20)
        if "error" in answer:
            return f"{title}: {answer['error']}"
        losses[title] = answer["loss"]
    taken: dict[str, dict[str, list[float]]] = {}
    for turn in range(2 if small else PAIRS):
        began = time.monotonic()
        order = list(partners) if turn % 2 == 0 else list(reversed(partners))
        for title in order:
            answer = partners[title].ask(
                f"time {case} {steps}", max(10, end - time.monotonic() + 20)
            )
            if "error" in answer:
                return f"{title}: {answer['error']}"
            for key in ("ms", "waiting_ms"):
                taken.setdefault(key, {}).setdefault(title, []).append(answer[key])
        if time.monotonic() + (time.monotonic() - began) > end:  # another turn would not fit
            break
    if time.monotonic() < end + 5:
        for title, partner in partners.items():
            report.put(f"profile, {case}, {title}", watched(partner, case, steps))
    for partner in partners.values():
        partner.ask(f"drop {case}", 20)
    facts: dict[str, Any] = {"target": TORCH_TARGETS[case], "loss": losses}
    for key, sides in taken.items():
        pairs = [b / a for a, b in zip(sides["native"], sides["proxied"], strict=True)]
        facts[key] = {t: round(statistics.median(v), 4) for t, v in sides.items()}
        facts[key] |= {
            "ratio_of_medians": round(facts[key]["proxied"] / facts[key]["native"], 4),
            "median_of_ratios": round(statistics.median(pairs), 4),
            "pairs": [[round(a, 4), round(b, 4)] for a, b in zip(sides["native"], sides["proxied"], strict=True)],
        }  # fmt: skip
    report.say(f"{case}: {facts['ms']['ratio_of_medians']} of native, {facts['waiting_ms']['ratio_of_medians']} with each result read")  # fmt: skip
    facts["target_met"] = facts["ms"]["ratio_of_medians"] <= TORCH_TARGETS[case]
    report.put(case, facts)
    return ""


# Other values of hal/cuda's settings (DEVPROXY_CUDA_TUNE).
TUNINGS = {
    "as it is": "",
    "the watcher hardly naps": "settle_us=4,nap_us=2",
    "a mark each": "mark_every=1",
    "marks seldom": "mark_every=128,settle_us=1000",
    "the watcher naps long": "nap_us=200",
}
APART = "a processor each"  # for the client's thread, the dispatch thread, the watcher


@stage(100, 40, call=2)
def t_tune(setup: Setup, report: Report) -> None:
    """The launch-bound step with other settings of hal/cuda, and with a processor for each thread; where its threads spend their time."""
    need_plugin(setup)
    native, proxied = torch_ways(setup)
    ways = {"native": native}
    ways |= {name: Way(proxied.prefix, proxied.env | {"DEVPROXY_CUDA_TUNE": words}) for name, words in (TUNINGS | {APART: ""}).items()}  # fmt: skip
    steps = 5 if setup.small else 1500
    for name, way in ways.items():
        if time_left_s() < 15:
            report.say(f"no time for: {name}")
            break
        log = setup.work / f"tune-{name.replace(' ', '-')}.log"
        partner = Partner(way, torch_line(setup, "torch_cost.py"), log)
        try:
            partner.answer(min(60, time_left_s() - 5))
            partner.ask("warm launch_bound 100", 30)
            if name == APART:
                report.put("processors", spread(partner.process.pid))
            seen: dict[str, Any] = {}
            watching = None
            if name in ("native", "as it is"):
                watching = threading.Thread(target=lambda into=seen, pid=partner.process.pid: into.update(profile(under(pid), 0.5)))  # fmt: skip
                watching.start()
            took = partner.ask(f"time launch_bound {steps}", 40)
            if watching:
                watching.join()
                report.put(f"profile, {name}", seen)
            report.put(name, {key: round(took[key], 4) for key in ("ms", "waiting_ms")})
            report.say(f"{name}: {took['ms']:.3f} ms, {took['waiting_ms']:.3f} ms with each result read")  # fmt: skip
        finally:
            partner.process.kill()


def under(pid: int) -> list[int]:
    """The processes whose threads count: the program's own and its server's."""
    family = [pid, *proctree.descendants(pid)]
    lines = {p: (read(f"/proc/{p}/cmdline") or "").split("\0") for p in family}
    wanted = ("torch_cost.py", "devproxy-server")
    return [p for p, line in lines.items() if any(w in word for w in wanted for word in line[:3])]


def spread(pid: int) -> dict[str, int]:
    """A processor of its own for each thread that matters, two apart: neighbours may be one core's two halves."""
    free = sorted(os.sched_getaffinity(0))[::2]
    given: dict[str, int] = {}
    for process in under(pid):
        for tid in map(int, os.listdir(f"/proc/{process}/task")):
            name = read(f"/proc/{process}/task/{tid}/comm") or ""
            if free and (name.startswith("dp-") or tid == process):
                given[f"{name} {tid}"] = free.pop(0)
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(tid, {given[f"{name} {tid}"]})
    return given


@stage(130, 40, call=2, needs=("e_host_memory",))
def d_cost(setup: Setup, report: Report) -> None:
    """What calls cost at the client, in turn natively, proxied, as a job that can be checkpointed, and with pinned memory
    registered: medians of up to three runs each, and their ratios."""
    ways = {
        "native": setup.native(),
        "proxied": setup.proxied("--plain"),
        "namespaces": setup.proxied(),
        "registered": setup.proxied("--plain", registered=True),
    }
    if why := cannot_register(setup):
        report.put("registered", f"refused: {why}")
        del ways["registered"]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    # Turn by turn, so that whatever time there is, each way has had as much of it.
    for turn in range(1 if setup.small else 3):
        for title in ("cost", "cudart/cost"):
            program = setup.bundle / "programs" / title
            if not program.exists():
                continue
            for name, way in ways.items():
                if turn and not found.get((title, name)):
                    continue  # it did not run the first time
                done = way.run([str(program), *(["small"] if setup.small else [])], 30)
                if done.code:
                    report.say(f"{title}, {name}, run {turn}: {done.code}: {done.err.strip()[-800:]}")  # fmt: skip
                    if name in ("native", "proxied"):
                        raise Failed(f"{title}, {name}: it does not run: {done.brief()}")
                    continue
                found.setdefault((title, name), []).append(json.loads(done.out.splitlines()[0]))
                report.put(f"{title}, {name}, runs", found[title, name])
        table = medians_of(found)
        report.put("medians", table)
        for call in ("launch_async_us", "cudart_launch_async_us"):
            if row := table.get(call):
                report.put(f"{call}, target met", {n: row[n] <= row["native"] for n in ways if n in row and n != "native"})  # fmt: skip
    if lost := [f"{title}, {n}" for title, _ in found for n in ways if not found.get((title, n))]:
        raise Failed(f"did not run: {', '.join(sorted(set(lost)))}")


def medians_of(found: dict[tuple[str, str], list[dict[str, float]]]) -> dict[str, Any]:
    """By the call's name: the median of each way's runs, and what it is of the native one."""
    table: dict[str, Any] = {}
    for (_, way), runs in found.items():
        for call in runs[0]:
            table.setdefault(call, {})[way] = statistics.median(one[call] for one in runs)
    for row in table.values():
        if native := row.get("native"):
            row["ratio"] = {w: round(us / native, 3) for w, us in row.items() if w != "native"}
    return table
