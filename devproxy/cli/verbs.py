# SPDX-License-Identifier: Apache-2.0
"""The verbs that do something to a job or an image: arguments checked here, the work is the coordinator's."""

from __future__ import annotations

import argparse
import codecs
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from devproxy import machine, records, runtime, state
from devproxy.checkpoint.errors import StoreError
from devproxy.cli import progress, told
from devproxy.cli.ask import named_job
from devproxy.cli.images import images
from devproxy.cli.output import show_json
from devproxy.cli.table import show_table
from devproxy.control import client
from devproxy.control.client import Result
from devproxy.control.stage_note import MEET
from devproxy.control.stores import find_image, open_stores
from devproxy.errors import DevproxyError, Refused, RestoreError
from devproxy.log import say
from devproxy.machine import MOST_GPUS
from devproxy.node import spec as specs

EXIT_INTERRUPTED = 130
LONGEST_CUT_WAIT_MS = 24 * 3600 * 1000


# -- what is given on the command line ------------------------------------------------------------------------------


def parse_gpus(texts: list[str] | None) -> list[int]:
    """["0,2", "3"] -> [0, 2, 3]. Raises Refused."""
    found = []
    for part in ",".join(texts or []).split(",") if texts else []:
        if not part.isascii() or not part.isdigit() or int(part) >= MOST_GPUS:
            raise Refused(f"{part!r} is not a GPU", f"give numbers below {MOST_GPUS}, as 0 or 0,1")
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


def _print_result(arguments: argparse.Namespace, verb: str, job: str, result: Result) -> None:
    if arguments.json:
        facts: dict[str, Any] = dict(result.facts)
        if result.image:
            facts |= asdict(result.image)
        if result.job:
            facts |= {"job": result.job.job, "phase": result.job.phase, "gpus": result.job.gpus}
        show_json(facts)
        return
    for text in told.lines(verb, job, result):
        print(text, flush=True)
    if arguments.verbose:
        rows = progress.image_rows(result.image) if result.image else []
        show_table("", ["", ""], rows + progress.fact_rows(result.facts))
    for warning in result.image.warnings if result.image else []:
        say(f"warning: {warning}", "devproxy")


def _run(
    arguments: argparse.Namespace, verb: str, job: str, work: Callable[[progress.Show], Result]
) -> int:
    """Shows the progress, then the result. Ctrl-C leaves the operation alone and says so; where a restore still waits for
    the job's other nodes, it ends that (control/devproxyd/restores.py)."""
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
    _print_result(arguments, verb, job, result)
    return 0


def checkpoint(arguments: argparse.Namespace) -> int:
    """An image, while the job goes on."""
    wait_ms = parse_wait_ms(arguments.cut_wait)
    job, _ = named_job(arguments)
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
    job, _ = named_job(arguments)
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
    job, _ = named_job(arguments)
    return _run(
        arguments,
        "resume",
        job,
        lambda show: client.Client().resume(job, gpus=gpus, report=show),
    )


def migrate(arguments: argparse.Namespace) -> int:
    """The job goes on, on other GPUs, served by other server processes."""
    to = parse_gpus(arguments.to)
    job, _ = named_job(arguments)
    return _run(
        arguments,
        "migrate",
        job,
        lambda show: client.Client().migrate(job, to=to, anew=arguments.anew, report=show),
    )


def resize(arguments: argparse.Namespace) -> int:
    """The job's ranks share fewer GPUs, or have more of them; how many it sees does not change."""
    gpus, onto = parse_gpus(arguments.gpus), parse_gpus(arguments.onto)
    job, _ = named_job(arguments)
    return _run(
        arguments,
        "resize",
        job,
        lambda show: client.Client().resize(job, gpus=gpus, onto=onto, report=show),
    )


def watch(arguments: argparse.Namespace) -> int:
    """The operation under way, or how the last one ended."""
    job, _ = client.find_job(arguments.job)
    return _run(arguments, "operation", job, lambda show: client.Client().watch(job, report=show))


def kill(arguments: argparse.Namespace) -> int:
    """A signal to the job's process, as from a terminal."""
    number = parse_signal(arguments.signal)
    job, path = named_job(arguments)
    client.Client().kill(job, number)
    name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
    if arguments.json:
        show_json({"job": job, "signal": number})
    else:
        print(f"sent {name} to job {job} ({' '.join(client.job_file(path).get('command', []))})")
    return 0


def logs(arguments: argparse.Namespace) -> int:
    """What a job has said so far, wherever its output goes. With --json an object; with --follow another for each piece."""
    name = arguments.job or client.find_job("")[0]
    path = state.log_path(runtime.check_job_name(name))
    parts = [part for part in (f"{path}.1", path) if os.path.exists(part)]
    living = {n: folder for n, folder, alive in runtime.list_jobs() if alive}
    if not parts or client.job_file(living.get(name, "")).get("plain"):
        raise _no_log(name, living)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be in two pieces

    def show(data: bytes) -> None:
        if arguments.json:
            return show_json({"job": name, "text": decoder.decode(data)})
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    size, said = 0, b""
    for part in parts:
        size = 0  # of the newest: what comes is behind it
        with open(part, "rb") as file:
            while data := file.read(1 << 20):
                size += len(data)
                if arguments.json:
                    said += data
                else:
                    show(data)
    if arguments.json:
        show(said)
    if arguments.follow and name in living:
        for data in client.Client().logs(name, offset=size, follow=True):
            show(data)
    return 0


def _no_log(name: str, living: dict[str, str]) -> Refused:
    if name in living:
        return Refused(
            f"job {name!r} runs without namespaces, so its output goes past devproxy",
            "see the terminal or file that it was started with",
        )
    if not records.read(name):
        return client.no_such_job(name, [*living, *records.names()])
    return Refused(f"job {name!r} has no log", "it ran without namespaces, or has said nothing")


# -- restore --------------------------------------------------------------------------------------------------------


def restore(arguments: argparse.Namespace) -> int:
    """A job back from an image."""
    gpus = parse_gpus(arguments.gpu)
    if arguments.name:
        runtime.check_job_name(arguments.name)
    files = {"output": arguments.output, "output_stderr": arguments.output_stderr}
    if arguments.attach and (any(files.values()) or arguments.wait):
        raise Refused(
            "--attach keeps the job here", "leave out --output, --output-stderr and --wait"
        )
    try:
        stores = open_stores(arguments.store)
        if not stores:
            raise Refused(
                "there are no images yet", "take one (devproxy checkpoint), or give --store"
            )
        store, image = find_image(stores, arguments.image)
    except StoreError as error:
        raise RestoreError(
            error.stage, error.what, error.remedy, "nothing of it was started", error.object
        ) from error
    spec = {
        "image": image.id,
        "store": store.url,
        "name": arguments.name or image.job,
        "gpus": gpus,
        **{
            key: os.path.abspath(path) if path else None
            for key, path in (files | {"files": arguments.files}).items()
        },
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
    from devproxy.control import messages  # protobuf is loaded by the first call (client.py)
    from devproxy.control._pb import job_pb2 as pb

    request = pb.RestoreRequest(
        **messages.packed({key: value for key, value in spec.items() if value is not None}),
        environment=messages.packed(dict(os.environ)),
        cwd=messages.packed(machine.working_folder()),
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


STORES = "folder or URL (the default store, and all that your jobs have used)"
# These name their job.
CHANGES_A_JOB = (checkpoint, suspend, migrate, resize, kill)


def add_to(verb: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """Adds the verbs to the command line of `devproxy`."""

    def job_verb(name: str, run: Any, text: str, shows: bool = True) -> argparse.ArgumentParser:
        sub = verb(name, run, text)
        text = (
            "asked for on a terminal" if run in CHANGES_A_JOB else "without it, the one that lives"
        )
        sub.add_argument("job", metavar="JOB", nargs="?", default="", help=text)
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
    sub.add_argument("--anew", action="store_true", help="fresh servers, also on the same GPUs")
    sub = job_verb("resize", resize, "run the job's ranks on fewer GPUs, or on more again")
    where = sub.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--gpus",
        action="append",
        metavar="GPU,GPU,...",
        help="the machine's GPU for each of the job's: 0,0,0,0 puts four on one",
    )
    where.add_argument(
        "--onto",
        action="append",
        metavar="GPU[,GPU]",
        help="these GPUs of the machine; ranks that hold the same go together",
    )
    job_verb("watch", watch, "the operation under way in a job")
    sub = job_verb("kill", kill, "send the job a signal", shows=False)
    sub.add_argument("--signal", default="TERM", metavar="N", help="number or name (TERM)")
    sub = job_verb("logs", logs, "what a job has said", shows=False)
    sub.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")

    sub = verb("restore", restore, "bring a job back from an image")
    sub.add_argument("image", metavar="IMAGE", help="id, its beginning, a job's name, or latest")
    sub.add_argument("--store", metavar="DIR", help=STORES)
    sub.add_argument("--gpu", action="append", metavar="ID[,ID]", help="GPUs of this machine")
    sub.add_argument("--device", choices=["soft", "cuda"], help="another kind of GPU than before")
    sub.add_argument(
        "--allow-other-gpu",
        action="store_true",
        help="also where the job holds machine code for another GPU",
    )
    sub.add_argument("--name", metavar="NEW", help="another name for the job")
    sub.add_argument(
        "--output",
        metavar="FILE",
        help="where its output goes (the files that took it, or the job's log)",
    )
    sub.add_argument("--output-stderr", metavar="FILE", help="where its stderr goes (as stdout)")
    sub.add_argument(
        "--files",
        metavar="DIR",
        help="an empty folder for the job's files, which stay as they are in their places",
    )
    sub.add_argument("--attach", action="store_true", help="stay in the foreground, as the job")
    sub.add_argument("--wait", action="store_true", help="until the job ends; exit with its code")
    sub.add_argument("--strict", action="store_true", help="refuse where something was lost")
    sub.add_argument("--node", type=int, metavar="K", help="of a job of several nodes: which one")
    sub.add_argument("--meet", metavar="HOST:PORT", help="then: where node 0 listens")
    sub.add_argument("--address", metavar="ADDR", help="then: of this host, for the others' data")
    _add_progress(sub)

    sub = verb("images", images, "the images of your jobs")
    sub.add_argument(
        "action",
        nargs="?",
        choices=["list", "gc", "rm", "verify"],
        default="list",
        help="gc: free what no image needs; rm: remove images; verify: read every chunk, and say which images are whole",
    )
    sub.add_argument(
        "names",
        metavar="IMAGE",
        nargs="*",
        help="of rm: ids, or their beginnings; of verify: a job, all jobs without it",
    )
    sub.add_argument("--store", metavar="DIR", help=STORES)
    sub.add_argument(
        "--image", metavar="ID", help="of verify: this one, by its id or the beginning of it"
    )
    sub.add_argument("--verify", action="store_true", help="of the list: read every chunk")
    sub.add_argument(
        "--for",
        dest="limit_ms",
        type=machine.parse_duration_ms,
        metavar="TIME",
        help="of verify: begin with images that nobody has verified, or longest ago, and begin no other after TIME (10m)",
    )
    sub.add_argument(
        "--force", action="store_true", help="of rm: also the only whole image of a living job"
    )


def _add_progress(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--progress", choices=progress.MODES, default="auto", help="how stderr shows it (auto)"
    )
    sub.add_argument("--verbose", action="store_true", help="at the end all sizes and times")
