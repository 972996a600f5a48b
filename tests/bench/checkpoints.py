# SPDX-License-Identifier: Apache-2.0
"""What images cost: their size, the time a job stands still, the way back, and being ready for it all the time.

Each job is a user's: started by devproxy-run, dumped and restored through the command line, in a store on the disk.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from devproxy.node.spec import read_job_file
from devproxy.proxy.control_channel import ControlChannel
from tests.bench.table import Row, interval
from tests.checkpoint.world import CTL, World
from tests.living import matching

JOB = Path(__file__).with_name("job.py")
STEPS = Path(__file__).with_name("steps.py")
RUN = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft", "--gpu-memory", "1GiB"]
# 7.1 million parameters, 28 MB: what the least-live moment holds besides them (one batch, one loss) is nothing to that.
GPT = ("--width", "384", "--layers", "4")
TRACE_KEPT_S = 5  # csrc/wire/attach.h
Raw = dict[str, Any]


@contextmanager
def job(*arguments: str, memory: str = "1GiB", steps: int = 14) -> Iterator[World]:
    """A job that trains, past the steps that a server needs to learn its rhythm."""
    world = World()
    try:
        world.run(sys.executable, str(JOB), *arguments, options=("--gpu-memory", memory))
        world.wait_step(steps, timeout_s=300)
        yield world
    finally:
        world.close()


def checkpoint(world: World, *more: str) -> dict[str, Any]:
    return dict(world.ctl_json("checkpoint", "j", *more))


def kinds(world: World) -> list[dict[str, Any]]:
    """Bytes per kind of each image, oldest first."""
    return [dict(image["sizes"])["per_kind"] for image in world.images()]  # type: ignore[call-overload]


def saved_bytes(*arguments: str) -> int:
    """Size of torch.save((model, optimizer)) after a step, in a process without devproxy."""
    world = World()
    try:
        path = world.home / "saved.pt"
        command = [sys.executable, str(JOB), *arguments, "--save", str(path)]
        subprocess.run(command, env=world.env, check=True, capture_output=True)
        return path.stat().st_size
    finally:
        world.close()


def device_bytes(name: str, arguments: tuple[str, ...], cuts: int, raw: Raw) -> Row:
    """Device memory in an image that waited for the least, beside torch.save; and in one that did not wait."""
    saved = saved_bytes(*arguments)
    rng = random.Random(1)
    with job(*arguments) as world:
        least = [checkpoint(world)["device_bytes"] for _ in range(3)]
        now = []
        for _ in range(cuts):
            time.sleep(rng.random() / 2)
            now.append(checkpoint(world, "--cut-wait", "0")["device_bytes"])
    raw[f"device_bytes_{name}"] = {"saved": saved, "least": least, "immediate": now}
    ratios = sorted(n / saved for n in now)
    note = f"cut at once: {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f} ({cuts} cuts)"
    if name == "gpt":
        with job(*arguments, "--late", "1") as world:
            late = checkpoint(world)["device_bytes"]
        raw["device_bytes_gpt"]["least_late_zero_grad"] = late
        note += f"; zero_grad after the forward: {late / saved:.3f}"
    value = statistics.median(least)
    what = {"gpt": "image of GPT + AdamW", "resnet": "image of ResNet-18 + SGD"}[name]
    return Row(what, value / 1e6, "MB", saved / 1e6, "torch.save", value / saved, 1.02, note=note)


def host_bytes(workers: int, target: float | None, raw: Raw) -> Row:
    """New host bytes of the second image, beside those of the first. Five seconds of training lie between them."""
    with job(*GPT, "--workers", str(workers)) as world:
        for _ in range(3):
            checkpoint(world)
            time.sleep(5)
        images = [sizes["host"] for sizes in kinds(world)]
    raw[f"host_bytes_{workers}_workers"] = images
    first, second, third = (image["new"] for image in images)
    note = f"third {third / 1e6:.1f} MB; second in the store, compressed: {images[1]['stored'] / 1e6:.1f} MB"
    what = f"host, 2nd image, {workers} workers" if workers else "host, 2nd image"
    return Row(
        what, second / 1e6, "MB", first / 1e6, "first image", second / first, target, note=note
    )


def copy_alone(world: World) -> float:
    """Seconds in which the server writes its device memory, with nothing beside it."""
    folder = str(matching(world.shm, "**/j/job.json")[0].parent)
    to = world.shm / "copy"
    to.mkdir()
    try:
        abi = bytes.fromhex(read_job_file(folder)["abi"])
        with ControlChannel(folder, 0, abi) as channel:
            channel.cut(0)
            seconds = float(channel.dump(str(to))["seconds"])
            channel.resume()
        return seconds
    finally:
        shutil.rmtree(to)


def wall(action: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.monotonic()
    done = action()
    return time.monotonic() - begin, done


def restored(world: World, image: str, number: int) -> dict[str, float]:
    """Seconds from the command to the first step, and what the agent says of the parts. The daemon is down."""
    log = f"restored{number}"
    begin = time.monotonic()
    command = ["restore", image, "--store", str(world.store), "--output", str(world.home / log)]
    done = world.ctl(*command, "--json")
    answered = time.monotonic() - begin
    world.wait(lambda: world.steps(log), what="the first step")
    facts: dict[str, float] = json.loads(done.stdout)
    return facts | {"first_step_s": time.monotonic() - begin, "answered_s": answered}


def stand_still(mib: int, rounds: int, raw: Raw) -> list[Row]:
    """As much device memory as host memory: how long the job stands, and how long it takes to come back."""
    sizes = ("--device-mib", str(mib), "--host-mib", str(mib))
    memory = f"{2 * mib + 512}MiB"
    first: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    back: list[dict[str, float]] = []
    beside: list[float] = []
    moves: list[dict[str, Any]] = []
    copies: list[float] = []
    for _ in range(rounds):
        with job(*sizes, memory=memory) as world:
            first.append(checkpoint(world))
            for _ in range(4):
                copies.append(copy_alone(world))
                took, facts = wall(lambda: checkpoint(world))
                beside.append(took - facts["total_s"])
                images.append(facts)
            for to in ("1", "0"):
                took, done = wall(lambda to=to: world.ctl_json("migrate", "j", "--to", to))  # type: ignore[misc]
                moves.append(dict(done) | {"wall_s": took})
            image = str(world.images()[0]["id"])
            for number in range(3):
                world.kill_everything()
                back.append(restored(world, image, number))
    raw |= {"stand_still": {"first": first, "images": images, "copies_s": copies}}
    raw |= {"restores": back, "migrations": moves, "beside_image_s": beside}

    def middle(rows: list[dict[str, Any]], *keys: str) -> float:
        def look(row: Any) -> float:
            for key in keys:
                row = row[key]
            return float(row)

        return statistics.median(look(row) for row in rows)

    def criu(row: dict[str, Any]) -> float:
        return float(row["freeze_s"] - row["stages"]["while_frozen"])

    still, copy = middle(images, "still_s"), statistics.median(copies)
    own = statistics.median(map(criu, images))
    parts = ", ".join(
        f"{name} {1e3 * middle(images, 'stages', name):.0f}"
        for name in ("device", "while_frozen", "shared", "files")
    )
    dump = middle(first, "total_s")
    to_step = middle(back, "first_step_s")
    named = ", ".join(
        f"{name} {1e3 * middle(back, name + '_s'):.0f}"
        for name in ("fetch_device", "fetch_host", "servers", "processes")
    )
    moved = middle(moves, "wall_s")
    return [
        Row(
            f"standing still, 2 x {mib} MiB", still, "s", copy + own, "device copy alone + CRIU's own", still / (copy + own),
            1.3, note=f"ms: copy alone {1e3 * copy:.0f}, CRIU {1e3 * own:.0f}; beside CRIU: {parts}",
        ),
        Row(
            "restore to first step", to_step, "s", dump, "first image, command to commit", to_step / dump, 2.0,
            note=f"ms: {named}; before the agent begins {1e3 * (to_step - middle(back, 'restore_s')):.0f};"
            f" a later image takes {middle(images, 'total_s'):.2f} s",
        ),
        Row(
            "`devproxy checkpoint` itself", statistics.median(beside), "s", None, "", statistics.median(beside), None,
            note="command line, daemon, removal of the oldest image and of the staged copy",
        ),
        Row(
            "migrate, same memory", moved, "s", None, "", moved, None,
            note=f"the job stands still {middle(moves, 'still_s'):.2f} s",
        ),
    ]  # fmt: skip


class Side:
    """steps.py under devproxy-run, told when to go."""

    def __init__(self, model: str, env: dict[str, str], name: str, ready: bool) -> None:
        command = [sys.executable, str(STEPS), model, "cuda"]
        if (
            not ready
        ):  # without namespaces, without the library that notes the files (the first of the list)
            command = ["sh", "-c", 'LD_PRELOAD=${LD_PRELOAD#*:}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            [*RUN, "--name", name, *([] if ready else ["--plain"]), "--", *command],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        if self.stdout.readline().strip() != "ready":
            self.close()
            raise RuntimeError(f"{model} does not run")

    def train(self, steps: int) -> float:
        """Seconds per step."""
        self.stdin.write(f"{steps}\n")
        self.stdin.flush()
        return float(self.stdout.readline())

    def agent_s(self) -> float:
        """CPU time of devproxy-run so far: it looks at the job's files, and stands between it and its streams."""
        spent = psutil.Process(self.process.pid).cpu_times()
        return float(spent.user + spent.system)

    def close(self) -> None:
        self.stdin.close()
        self.process.wait(timeout=60)


class Turns:
    """Step times of several sides, one of which trains at a time: turns, each `turn_s` long; who begins changes. The last
    side is as the one named plain: what its ratio is away from 1 is what this machine makes of nothing."""

    def __init__(self, sides: dict[str, Side], turn_s: float) -> None:
        self.steps = max(1, int(turn_s / min(side.train(10) for side in sides.values())))
        self.times: dict[str, list[float]] = {name: [] for name in sides}

    def take(self, sides: dict[str, Side], count: int) -> None:
        order = list(sides)
        for _ in range(count):
            order = [*order[1:], order[0]]
            for name in order:
                self.times[name].append(sides[name].train(self.steps))

    def figures(self) -> dict[str, Any]:
        return {f"{name}_s": row for name, row in self.times.items()} | {"steps": self.steps}

    def row(self, what: str, side: str, limit_is: str, note: str) -> Row:
        def against_plain(name: str) -> list[float]:
            return [b / a for a, b in zip(self.times["plain"], self.times[name], strict=True)]

        ratios, nothing = against_plain(side), against_plain("again")
        (low, high), (least, most) = interval(ratios), interval(nothing)
        value, limit = (1e3 * statistics.median(self.times[name]) for name in (side, "plain"))
        # The interval only in words: by it alone a machine that is noisy enough would meet a target of 1 %.
        spread = f"95 % interval {low:.3f} to {high:.3f}"
        control = f"plain against plain {statistics.median(nothing):.3f}, {least:.3f} to {most:.3f}"
        said = f"{spread}; {control}; {len(nothing)} turns of {self.steps} steps; {note}"
        return Row(what, value, "ms", limit, limit_is, statistics.median(ratios), 1.01, note=said)


def steady(model: str, pairs: int, turn_s: float, raw: Raw) -> Row:
    """Step time of a job that can be checkpointed at any moment, beside ones that cannot. Turns are longer than the period
    in which the agent looks at the job's files."""
    world = World(MKL_NUM_THREADS="1")
    sides: dict[str, Side] = {}
    try:
        for name in ("ready", "plain", "again"):
            sides[name] = Side(model, world.env, name, name == "ready")
        begin, agent = time.monotonic(), sides["ready"].agent_s()
        turns = Turns(sides, turn_s)
        turns.take(sides, pairs)
        share = (sides["ready"].agent_s() - agent) / (time.monotonic() - begin)
    finally:
        for side in sides.values():
            side.close()
        world.close()
    raw[f"steady_{model}"] = turns.figures()
    note = f"devproxy-run takes {100 * share:.2f} % of a core"
    return turns.row(f"checkpointable, step of {model}", "ready", "--plain, no host library", note)


def traced(model: str, pairs: int, turn_s: float, raw: Raw) -> Row:
    """Step time of a job that `devproxy trace` records all the while, beside ones that nobody looks at. Each of three jobs
    is the traced one for a third of the turns: by themselves they may differ by more than what is measured."""
    world = World(MKL_NUM_THREADS="1")
    jobs: dict[str, Side] = {}
    names = ["one", "two", "three"]
    events = lost = 0
    try:
        for name in names:
            jobs[name] = Side(model, world.env, name, True)
        roles = ("traced", "plain", "again")
        turns = Turns(dict(zip(roles, jobs.values(), strict=True)), turn_s)
        for _ in names:
            words = ["trace", names[0], "--seconds", "600", "-o", str(world.home / "it"), "--json"]
            tracer = subprocess.Popen(
                [*CTL, *words], env=world.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )  # fmt: skip
            assert tracer.stderr
            tracer.stderr.readline()  # it has begun
            turns.take({role: jobs[name] for role, name in zip(roles, names, strict=True)}, -(-pairs // 3))  # fmt: skip
            tracer.send_signal(signal.SIGINT)
            facts = json.loads(tracer.communicate(timeout=600)[0])
            events, lost = events + facts["events"], lost + facts["lost"]
            time.sleep(TRACE_KEPT_S + 1)  # it is recorded until then
            names = [*names[1:], names[0]]
    finally:
        for side in jobs.values():
            side.close()
        world.close()
    raw[f"traced_{model}"] = turns.figures()
    note = f"{events:,} events, {lost:,} lost"
    return turns.row(f"traced, step of {model}", "traced", "nobody looks", note)


def checkpoints(quick: bool, raw: Raw) -> list[Callable[[], Iterable[Row]]]:
    """What measures all rows; figures behind them go into raw."""
    cuts, pairs, turn_s = (3, 4, 1.0) if quick else (9, 20, 2.5)
    return [
        lambda: [device_bytes("gpt", GPT, cuts, raw)],
        lambda: [device_bytes("resnet", ("--model", "resnet"), cuts, raw)],
        lambda: [host_bytes(0, 0.05, raw)],
        lambda: [host_bytes(2, 0.1, raw)],
        lambda: stand_still(64 if quick else 1024, 1 if quick else 2, raw),
        lambda: [steady("gpt", pairs, turn_s, raw)],
        lambda: [steady("mlp", pairs, turn_s, raw)],
        lambda: [traced("gpt", pairs, turn_s, raw)],
        lambda: [traced("mlp", pairs, turn_s, raw)],
    ]


if __name__ == "__main__":
    sys.exit("run it as: python -m tests.bench --only checkpoints")
