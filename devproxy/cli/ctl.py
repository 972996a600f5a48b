# SPDX-License-Identifier: Apache-2.0
"""devproxy: look at jobs, act on them, look at the machine. Every verb has --json."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from devproxy import __version__, config, state
from devproxy.cli import completion, jobs, output
from devproxy.cli import verbs as job_verbs
from devproxy.cli.near import did_you_mean
from devproxy.cli.table import show_table
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say

RUN = "run"  # has a command line of its own


def doctor(arguments: argparse.Namespace) -> int:
    """What is missing here, and the command that mends it. Exit code 1 when something needed is missing, or --fix failed."""
    from devproxy.cli import doctor as examine  # half of devproxy, for this verb alone
    from devproxy.cli import mend

    failed = mend.mend(arguments.python) if arguments.fix else []
    findings = examine.examine(arguments.python)
    if arguments.json:
        found = [finding._asdict() for finding in findings]
        output.show_json({"findings": found, "not_fixed": failed}, indent=2)
    else:
        show_table(
            "",
            ["", "WHAT", "FOUND", "TO MEND IT"],
            [[f.mark(), f.what, f.found, f.remedy if not f.ok else ""] for f in findings],
        )
    return int(bool(failed) or any(f.needed and not f.ok for f in findings))


def build_torch(arguments: argparse.Namespace) -> int:
    """Builds the software GPU's torch plugin for one Python's torch."""
    import importlib  # an installed devproxy may come without the builder

    try:
        builder = importlib.import_module("devproxy.torch.build")
    except ImportError as error:
        raise DevproxyError(
            f"the builder of the torch plugin cannot be loaded ({error})", "install devproxy again"
        ) from None
    if config.plugin_dir() != config.lib_dir():
        state.state_dir()  # made, and looked at, first
    argv = ["--out", config.plugin_dir()]
    if arguments.python:
        argv += ["--python", arguments.python]
    return int(builder.main(argv))


def make_trust(arguments: argparse.Namespace) -> int:
    """The certificate that the hosts of one owner know one another by, made once."""
    from devproxy.control import trust  # gRPC

    folder = trust.make()
    if arguments.json:
        output.show_json({"folder": folder})
    else:
        print(f"made {folder}: copy this folder, and the key of the images, to your other hosts")
    return 0


def show_top(arguments: argparse.Namespace) -> int:
    """What all jobs are doing, again and again."""
    from devproxy.cli import top  # for this verb alone

    return top.top(arguments)


def record_trace(arguments: argparse.Namespace) -> int:
    """A file for Perfetto."""
    from devproxy.cli import trace  # protobuf, for this verb alone

    return trace.trace(arguments)


def explain(arguments: argparse.Namespace) -> int:
    """Why not checkpointable, why slow."""
    from devproxy.cli import trace  # protobuf

    return trace.explain(arguments)


def complete(arguments: argparse.Namespace) -> int:
    """A script for a shell; or the names that this asks for."""
    if arguments.what == completion.JOBS:
        names = completion.job_names()
        output.show_json({"jobs": names}) if arguments.json else print("\n".join(names))
        return 0
    from devproxy.cli import run  # starts servers: not for verbs

    text = completion.script(arguments.what, *parser(), run.USAGE)
    output.show_json({"script": text}) if arguments.json else print(text, end="")
    return 0


def show_help(arguments: argparse.Namespace) -> int:
    """What devproxy can do, or one verb of it."""
    if arguments.topic == RUN:
        return _run(["--help"])
    top, verbs = parser()
    if arguments.topic:
        _check_verb(arguments.topic, verbs)
    (verbs[arguments.topic] if arguments.topic else top).print_help()
    return 0


class _Parser(argparse.ArgumentParser):
    """Bad input is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message, f"see: {self.prog} --help")


Verbs = dict[str, argparse.ArgumentParser]


def parser() -> tuple[argparse.ArgumentParser, Verbs]:
    """The command line, and that of each verb."""
    top = _Parser(prog="devproxy", description=__doc__)
    top.add_argument("--version", action="version", version=f"devproxy {__version__}")
    top.add_argument("--json", action="store_true", help="machine-readable output, of any verb")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        # Before the verb or after it: what is not given here must not undo what was given there.
        sub.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="machine-readable output"
        )
        return sub

    verb("help", show_help, "what devproxy, or one verb, can do").add_argument(
        "topic", metavar="VERB", nargs="?", default=""
    )
    verb(RUN, None, "run a command behind the device proxy, as devproxy-run does")
    verb("ps", jobs.ps, "the jobs of this user")
    verb("status", jobs.status, "one job in detail, also one that has ended").add_argument(
        "job", metavar="JOB", nargs="?", default="", help="may be left out when one job lives"
    )
    sub = verb("top", show_top, "what the jobs are doing, live")
    sub.add_argument("--once", action="store_true", help="one look, for scripts")
    sub.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds (2)")
    job_verbs.add_to(verb)
    sub = verb("trace", record_trace, "what a job's streams and threads do, for Perfetto")
    sub.add_argument("job", metavar="JOB", nargs="?", default="", help="asked for on a terminal")
    sub.add_argument("-o", "--output", metavar="FILE", default="", help="(JOB.pftrace)")
    sub.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long (5)")
    sub = verb("explain", explain, "what is in the way of an image, and where the time goes")
    sub.add_argument("job", metavar="JOB", nargs="?", default="", help="the one that lives")
    sub.add_argument("--seconds", type=float, default=2.0, metavar="S", help="how long (2)")
    sub.add_argument("--strict", action="store_true", help="as of checkpoint")
    sub = verb("doctor", doctor, "what this machine lacks, and what mends it")
    sub.add_argument("--python", default=sys.executable, help="the Python whose torch is looked at")
    sub.add_argument(
        "--fix", action="store_true", help="install system packages, CRIU and the torch plugin"
    )
    verb("completion", complete, "what a shell needs to complete devproxy's words").add_argument(
        "what",
        choices=[*completion.SHELLS, completion.JOBS],
        help='eval "$(devproxy completion bash)"',
    )
    verb("trust", make_trust, "make what your hosts know one another by")
    verb("build-torch", build_torch, "build the software GPU's plugin for a torch").add_argument(
        "--python", default="", help="the Python whose torch it is for (this one)"
    )
    return top, dict(verbs.choices)


def _check_verb(word: str, verbs: Verbs) -> None:
    """Raises Refused for a verb that there is not."""
    if word in verbs:
        return
    raise Refused(f"there is no verb {word!r}", f"{did_you_mean(word, verbs)}see: devproxy help")


def _run(argv: list[str]) -> int:
    from devproxy.cli import run  # starts servers: not for verbs

    sys.argv = ["devproxy-run", *argv]
    run.main()


def _main(argv: list[str]) -> int:
    words = [word for word in argv if not word.startswith("-")]
    if words[:1] == [RUN]:
        at = argv.index(RUN)
        return _run([*argv[:at], *argv[at + 1 :]])
    top, verbs = parser()
    if words:
        _check_verb(words[0], verbs)
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        verb = verbs[arguments.verb]
        hint = did_you_mean(unknown[0].partition("=")[0], verb._option_string_actions)
        raise Refused(
            f"unrecognized arguments: {' '.join(unknown)}", f"{hint}see: {verb.prog} --help"
        )
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def main() -> NoReturn:
    """Entry point of devproxy."""
    argv = sys.argv[1:]
    # Names may be any bytes; stderr shows them already.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        code = _main(argv)
    except DevproxyError as error:
        if "--json" in argv:
            output.error_json(error)
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
