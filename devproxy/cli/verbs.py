"""The verbs that do something to a job or an image: arguments checked here, the work is the coordinator's."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from devproxy import runtime, state
from devproxy.checkpoint.errors import StoreError
from devproxy.cli import progress
from devproxy.cli.table import show_table
from devproxy.control import client
from devproxy.control.client import Result
from devproxy.control.stage_note import MEET
from devproxy.errors import DevproxyError, Refused, RestoreError
from devproxy.log import say
from devproxy.machine import show_bytes
from devproxy.node import spec as specs

if TYPE_CHECKING:
    from devproxy.checkpoint.manifest import Image
    from devproxy.checkpoint.store import Store

EXIT_INTERRUPTED = 130
LONGEST_CUT_WAIT_MS = 24 * 3600 * 1000


# -- what is given on the command line ------------------------------------------------------------------------------


def parse_gpus(texts: list[str] | None) -> list[int]:
    """["0,2", "3"] -> [0, 2, 3]. Raises Refused."""
    found = []
    for part in ",".join(texts or []).split(",") if texts else []:
        if not part.isascii() or not part.isdigit() or int(part) >= 1024:
            raise Refused(f"{part!r} is not a GPU", "give numbers, as 0 or 0,1")
        found.append(int(part))
    return found


def parse_wait_ms(text: str | None) -> int | None:
    """ "500ms", "2s" or "0". None: the default, two periods of the allocation trace. Raises Refused."""
    if text is None:
        return None
    for unit, factor in (("ms", 1.0), ("s", 1000.0), ("", 1.0)):
        number = text.removesuffix(unit) if unit else text
        if unit and number == text:
            continue
        try:
            value = float(number) * factor
        except ValueError:
            break
        if 0 <= value <= LONGEST_CUT_WAIT_MS and (unit or value == 0):
            return round(value)
        break
    raise Refused(f"--cut-wait {text!r} is not a time", "write it like 500ms, 2s or 0")


def parse_signal(text: str) -> int:
    """ "9", "KILL" or "SIGKILL". Raises Refused."""
    if text.isascii() and text.isdigit() and int(text) in signal.valid_signals():
        return int(text)
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return int(signal.Signals[name])
    except KeyError:
        raise Refused(f"there is no signal {text!r}", "give a number or a name: kill -l") from None


# -- running a verb -------------------------------------------------------------------------------------------------


def _print_result(arguments: argparse.Namespace, title: str, result: Result) -> None:
    if arguments.json:
        line: dict[str, Any] = dict(result.facts)
        if result.image:
            line |= asdict(result.image)
        if result.job:
            line |= {"job": result.job.job, "phase": result.job.phase, "gpus": result.job.gpus}
        print(json.dumps(line), flush=True)
        return
    rows = progress.image_rows(result.image) if result.image else []
    rows += progress.fact_rows(result.facts)
    if result.job:
        rows.append(["the job is", result.job.phase])
    show_table(title, ["", ""], rows)
    for warning in result.image.warnings if result.image else []:
        say(f"warning: {warning}", "devproxy")


def _run(
    arguments: argparse.Namespace, verb: str, job: str, work: Callable[[progress.Show], Result]
) -> int:
    """Shows the progress, then the result. Ctrl-C leaves the operation alone and says so; where a restore still waits for
    the job's other nodes, it ends that (control/daemon.py)."""
    mode = arguments.progress
    if arguments.json and mode == "auto":
        mode = "none"
    show = progress.Show(mode, verb)
    try:
        with show:
            result = work(show)
    except KeyboardInterrupt:
        if show.reached == MEET:
            say(f"the {verb} of job {job} is given up; nothing of it runs here", "devproxy")
        else:
            say(f"the {verb} of job {job} goes on; see: devproxy watch {job}", "devproxy")
        return EXIT_INTERRUPTED
    _print_result(arguments, f"{verb} of job {job}", result)
    return 0


def checkpoint(arguments: argparse.Namespace) -> int:
    """An image, while the job goes on."""
    wait_ms = parse_wait_ms(arguments.cut_wait)
    job, _ = client.find_job(arguments.job)
    return _run(
        arguments,
        "checkpoint",
        job,
        lambda show: client.Client().checkpoint(
            job, cut_wait_ms=wait_ms, strict=arguments.strict, report=show
        ),
    )


def suspend(arguments: argparse.Namespace) -> int:
    """An image, and the job and its servers gone until resume."""
    wait_ms = parse_wait_ms(arguments.cut_wait)
    job, _ = client.find_job(arguments.job)
    return _run(
        arguments,
        "suspend",
        job,
        lambda show: client.Client().suspend(
            job, cut_wait_ms=wait_ms, strict=arguments.strict, report=show
        ),
    )


def resume(arguments: argparse.Namespace) -> int:
    """A suspended job goes on."""
    gpus = parse_gpus(arguments.gpu)
    job, _ = client.find_job(arguments.job)
    return _run(
        arguments,
        "resume",
        job,
        lambda show: client.Client().resume(job, gpus=gpus, report=show),
    )


def migrate(arguments: argparse.Namespace) -> int:
    """The job goes on, on other GPUs, served by other server processes."""
    to = parse_gpus(arguments.to)
    job, _ = client.find_job(arguments.job)
    return _run(
        arguments, "migrate", job, lambda show: client.Client().migrate(job, to=to, report=show)
    )


def resize(arguments: argparse.Namespace) -> int:
    """The job's ranks share fewer GPUs, or have more of them; how many it sees does not change."""
    gpus = parse_gpus(arguments.gpus)
    job, _ = client.find_job(arguments.job)
    return _run(
        arguments, "resize", job, lambda show: client.Client().resize(job, gpus=gpus, report=show)
    )


def watch(arguments: argparse.Namespace) -> int:
    """The operation under way, or how the last one ended."""
    job, _ = client.find_job(arguments.job)
    return _run(arguments, "operation", job, lambda show: client.Client().watch(job, report=show))


def kill(arguments: argparse.Namespace) -> int:
    """A signal to the job's process, as from a terminal."""
    number = parse_signal(arguments.signal)
    job, _ = client.find_job(arguments.job)
    client.Client().kill(job, number)
    if arguments.json:
        print(json.dumps({"job": job, "signal": number}))
    return 0


def logs(arguments: argparse.Namespace) -> int:
    """The output of a job that was restored without a terminal or a file."""
    name = arguments.job or client.find_job("")[0]
    path = state.log_path(runtime.check_job_name(name))
    try:
        with open(path, "rb") as file:
            size = 0
            while data := file.read(1 << 20):
                size += len(data)
                sys.stdout.buffer.write(data)
    except FileNotFoundError:
        raise Refused(
            f"job {name!r} has no log",
            "its output goes to the terminal or file that it was started with",
        ) from None
    sys.stdout.buffer.flush()
    if arguments.follow and any(n == name and alive for n, _, alive in runtime.list_jobs()):
        for data in client.Client().logs(name, offset=size, follow=True):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    return 0


# -- images ---------------------------------------------------------------------------------------------------------


def open_store(given: str | None) -> Store | None:
    """The store named, or the default one. None where the default one was never used. Raises Refused, StoreError."""
    from devproxy.checkpoint.store import (
        Store,
    )  # blake3 and zstandard: not for verbs without a store

    url = given or state.default_store()
    path = url.removeprefix("file://")
    if "://" not in path and not os.path.isdir(path):
        if given:
            raise Refused(f"there is no store {given}", "name the one that the job writes to")
        return None
    if "://" not in path:
        url = os.path.abspath(path)
    return Store.open(url)


def images(arguments: argparse.Namespace) -> int:
    """The images in a store; `images gc` removes what none of them needs."""
    store = open_store(arguments.store)
    if arguments.action == "gc":
        return _gc(arguments, store)
    found = store.images() if store else []
    if store and (strange := store.strange()):
        names = ", ".join(map(ascii, strange[:5]))
        say(
            f"{len(strange)} thing(s) among the images of {store.url} are none: {names}", "devproxy"
        )
    if store and arguments.verify:
        found = [store.verify(image.id, full=True) for image in found]
    if arguments.json:
        print(json.dumps([image.as_json() for image in found], indent=2))
    elif not found:
        print("no images")
    else:
        show_table(
            "",
            ["IMAGE", "JOB", "GPUS", "RANKS", "CREATED", "DEVICE", "HOST", "FILES", "NEW", "WHOLE"],
            [_image_row(image) for image in found],
        )
    return 1 if arguments.verify and not all(image.whole for image in found) else 0


def _image_row(image: Image) -> list[str]:
    def size(name: str) -> str:
        value = image.sizes.get(name)
        return show_bytes(value) if isinstance(value, int) else "?"

    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(image.created))
    return [
        image.id,
        image.job or "?",
        "+".join(map(str, image.gpus)),
        "+".join(map(str, image.ranks)) if any(image.ranks) else "",
        created if image.created else "?",
        size("device"),
        size("host"),
        size("file"),
        size("new"),
        "yes" if image.whole else f"no: {image.problem}",
    ]


def _gc(arguments: argparse.Namespace, store: Store | None) -> int:
    report = asdict(store.gc()) if store else {}
    if arguments.json:
        print(json.dumps(report))
    elif not report:
        print("no images")
    else:
        show_table("gc", ["", ""], progress.fact_rows({k: v for k, v in report.items() if v != []}))
        for reason in report["busy"]:
            say(f"left for the next gc: {reason}", "devproxy")
    return 0


def find_image(store: Store, text: str) -> Image:
    """By id, `latest`, job (its newest whole image) or the beginning of an id. Raises Refused."""
    found = store.images()
    exact = [image for image in found if image.id == text]
    if exact and not exact[0].whole:
        older = store.older_whole(text)
        raise Refused(
            f"image {text} is not whole: {exact[0].problem}",
            f"use an older one: devproxy restore {older}" if older else "no older one is whole",
        )
    whole = [image for image in found if image.whole]
    if text == "latest":
        matches = whole[-1:]
    else:
        matches = (
            exact
            or [image for image in whole if image.job == text][-1:]
            or [image for image in whole if image.id.startswith(text)]
        )
    if not matches:
        raise Refused(
            f"no whole image {text!r} in store {store.url}", "see: devproxy images, or --store"
        )
    if len(matches) > 1:
        names = ", ".join(image.id for image in matches[:5])
        raise Refused(f"{text!r} is the beginning of {len(matches)} images: {names}", "write more")
    return matches[0]


def restore(arguments: argparse.Namespace) -> int:
    """A job back from an image."""
    gpus = parse_gpus(arguments.gpu)
    if arguments.name:
        runtime.check_job_name(arguments.name)
    if arguments.attach and (arguments.output or arguments.wait):
        raise Refused("--attach keeps the job here", "leave out --output and --wait")
    try:
        store = open_store(arguments.store)
        if store is None:
            raise Refused(
                "there are no images yet", "take one (devproxy checkpoint), or give --store"
            )
        image = find_image(store, arguments.image)
    except StoreError as error:
        raise RestoreError(
            error.stage, error.what, error.remedy, "nothing of it was started", error.object
        ) from error
    spec = {
        "image": image.id,
        "store": store.url,
        "name": arguments.name or image.job,
        "gpus": gpus,
        "output": os.path.abspath(arguments.output) if arguments.output else None,
        "strict": arguments.strict,
        "device": arguments.device,
        "allow_other_gpu": arguments.allow_other_gpu,
        "node": arguments.node,
        "meet": arguments.meet,
        "address": arguments.address,
    }
    if arguments.attach:
        from devproxy.control import agent  # gRPC and the coordinator: the others talk to a daemon

        return agent.run_foreground(spec)
    return _restore_detached(arguments, spec)


def _restore_detached(arguments: argparse.Namespace, spec: dict[str, Any]) -> int:
    from devproxy.control._pb import (
        job_pb2 as pb,
    )  # protobuf is loaded by the first call (client.py)

    request = pb.RestoreRequest(
        **{key: value for key, value in spec.items() if value is not None},
        environment=dict(os.environ),
        cwd=os.getcwd(),
        wait=arguments.wait,
    )
    name = specs.own_name(str(spec["name"]), spec["node"] or 0)
    results: list[Iterator[Result]] = []

    def work(show: progress.Show) -> Result:
        results.append(client.Client().restore(request, show))
        return next(results[0])

    status = _run(arguments, "restore", name, work)
    if status or not arguments.wait:
        return status
    try:
        return int(next(results[0]).facts["exit_code"])
    except KeyboardInterrupt:
        say(f"job {name} goes on; see: devproxy status {name}", "devproxy")
        return EXIT_INTERRUPTED
    except DevproxyError as error:
        # The daemon went away; the job did not. Its lock says when it has ended, not how.
        say(f"{error}; waiting for the job's end", "devproxy")
        runtime.wait_until_dead(os.path.join(runtime.root_path(), name))
        raise DevproxyError(f"job {name!r} has ended, its exit code is not known") from None


# -- the parser -----------------------------------------------------------------------------------------------------


def add_to(verb: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """Adds the verbs to the command line of `devproxy`."""

    def job_verb(name: str, run: Any, text: str, shows: bool = True) -> argparse.ArgumentParser:
        sub = verb(name, run, text)
        sub.add_argument(
            "job", metavar="JOB", nargs="?", default="", help="may be left out when one job lives"
        )
        if shows:
            _add_progress(sub)
        return sub

    for name, run, text in (
        ("checkpoint", checkpoint, "take an image while the job goes on"),
        ("suspend", suspend, "take an image and free the GPU"),
    ):
        sub = job_verb(name, run, text)
        sub.add_argument(
            "--cut-wait", metavar="TIME", help="wait at most so long for least live memory; 0: now"
        )
        sub.add_argument(
            "--strict", action="store_true", help="refuse where something would be lost"
        )
    sub = job_verb("resume", resume, "let a suspended job go on")
    sub.add_argument("--gpu", action="append", metavar="ID[,ID]", help="other GPUs than before")
    sub = job_verb("migrate", migrate, "move the job to other GPUs")
    sub.add_argument("--to", action="append", metavar="GPU[,GPU]", required=True)
    sub = job_verb("resize", resize, "run the job's ranks on fewer GPUs, or on more again")
    sub.add_argument(
        "--gpus",
        action="append",
        metavar="GPU,GPU,...",
        required=True,
        help="the machine's GPU for each of the job's: 0,0,0,0 puts four on one",
    )
    job_verb("watch", watch, "the operation under way in a job")
    sub = job_verb("kill", kill, "send the job a signal", shows=False)
    sub.add_argument("--signal", default="TERM", metavar="N", help="number or name (TERM)")
    sub = job_verb("logs", logs, "output of a job restored without a terminal", shows=False)
    sub.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")

    sub = verb("restore", restore, "bring a job back from an image")
    sub.add_argument("image", metavar="IMAGE", help="id, its beginning, a job's name, or latest")
    sub.add_argument("--store", metavar="DIR", help="folder or URL (the default store)")
    sub.add_argument("--gpu", action="append", metavar="ID[,ID]", help="GPUs of this machine")
    sub.add_argument("--device", choices=["soft", "cuda"], help="another kind of GPU than before")
    sub.add_argument(
        "--allow-other-gpu",
        action="store_true",
        help="also where the job holds machine code for another GPU",
    )
    sub.add_argument("--name", metavar="NEW", help="another name for the job")
    sub.add_argument("--output", metavar="FILE", help="where its output goes (the job's log)")
    sub.add_argument("--attach", action="store_true", help="stay in the foreground, as the job")
    sub.add_argument("--wait", action="store_true", help="until the job ends; exit with its code")
    sub.add_argument("--strict", action="store_true", help="refuse where something was lost")
    sub.add_argument("--node", type=int, metavar="K", help="of a job of several nodes: which one")
    sub.add_argument("--meet", metavar="HOST:PORT", help="then: where node 0 listens")
    sub.add_argument("--address", metavar="ADDR", help="then: of this host, for the others' data")
    _add_progress(sub)

    sub = verb("images", images, "the images in a store")
    sub.add_argument(
        "action", nargs="?", choices=["list", "gc"], default="list", help="gc: free what none needs"
    )
    sub.add_argument("--store", metavar="DIR", help="folder or URL (the default store)")
    sub.add_argument("--verify", action="store_true", help="read every chunk")


def _add_progress(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--progress", choices=progress.MODES, default="auto", help="how stderr shows it (auto)"
    )
