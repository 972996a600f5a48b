"""devproxy-run: servers up, the unmodified command beside them, its exit code out, nothing left behind.

Its imports are light on purpose: what it takes is added to every job's start.
"""

from __future__ import annotations

import os
import sys
import time

from devproxy import config, machine, proctree, runtime
from devproxy.cli import command as cmd
from devproxy.errors import EXIT_REFUSED, EXIT_SERVER_LOST, DevproxyError, Refused
from devproxy.log import say
from devproxy.proxy import janitor, preflight
from devproxy.proxy.proof import Proof
from devproxy.proxy.supervisor import Supervisor

TYPE_CHECKING = False  # typing itself costs every start 10 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

USAGE = """usage: devproxy-run [options] -- COMMAND [ARGUMENT...]

Runs an unmodified command behind a device proxy: its GPU work happens in a server process.

  --device auto|soft|cuda  auto (the default) takes the software GPU where no NVIDIA device is
  --gpus N                 number of GPUs, one server each (1)
  --gpu-memory SIZE        memory of each software GPU, as 512MiB or 4GiB (4GiB, or what can be spared)
  --name JOB               the job's name in `devproxy ps` (made from the command)
  --chaos SEED             software GPU: delay and reorder legally, to show ordering bugs
  --summary                at the end, say on stderr what ran where
  --json                   the summary, or the error, as one line of JSON on stderr
  --version, --help

Exit code: the command's; 128+N when signal N ended it; 126, 127 as a shell gives them; 2 when nothing was started;
3 when the command ended well but a server had died under it.
"""
MOST_GPUS = 64


class Options:
    """The command line, checked one by one; what goes together is checked in preflight."""

    def __init__(self) -> None:
        self.device = "auto"
        self.gpus = 1
        self.gpu_memory_bytes: int | None = None
        self.name = ""
        self.chaos: int | None = None
        self.summary = False
        self.json = False
        self.command: list[str] = []


def parse(argv: list[str]) -> Options:
    """Raises Refused for what it does not know. By hand: argparse costs a third of our start-up."""
    options = Options()
    options.json = "--json" in argv[: argv.index("--") if "--" in argv else len(argv)]
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            options.command = rest
            break
        name, equals, value = word.partition("=")
        if name in ("--summary", "--json") and not equals:
            setattr(options, name[2:], True)
        elif name in ("--device", "--gpus", "--gpu-memory", "--name", "--chaos"):
            if not equals:
                if not rest or rest[0] == "--":
                    raise Refused(f"{name} needs a value", "see: devproxy-run --help")
                value = rest.pop(0)
            _set(options, name, value)
        elif name.startswith("-"):
            raise Refused(f"unknown option {word!r}", "see: devproxy-run --help")
        else:
            raise Refused(
                f"{word!r} stands before --",
                f"write: devproxy-run [options] -- {' '.join([word, *rest])[:200]}",
            )
    if not options.command:
        raise Refused("no command given", "write it after --: devproxy-run -- python train.py")
    return options


def _set(options: Options, name: str, value: str) -> None:
    if name == "--device":
        if value not in ("auto", "soft", "cuda"):
            raise Refused(f"unknown device {value!r}", "use --device auto, soft or cuda")
        options.device = value
    elif name == "--gpus":
        options.gpus = _number(name, value, 1, MOST_GPUS)
    elif name == "--chaos":
        options.chaos = _number(name, value, 0, (1 << 64) - 1)
    elif name == "--gpu-memory":
        options.gpu_memory_bytes = machine.parse_size(value)
    else:
        options.name = runtime.check_job_name(value)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise Refused(f"{name} {text!r} is not a number from {least} to {most}")
    return int(text)


def job_environment(
    job: runtime.JobFolder, options: Options, device: str, lib: str
) -> dict[str, str]:
    """What the command gets on top of our own environment."""
    env = dict(os.environ)
    shims = [os.path.join(lib, name) for name in preflight.SHIMS]
    preload = [path for path in shims if os.path.exists(path)]
    around = env.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    env["LD_PRELOAD"] = ":".join(preload + [p for p in around if p and p not in preload])
    env[config.JOB_DIR] = job.path
    env[config.GPUS] = str(options.gpus)
    env[config.DEVICE] = device
    env[config.LIB] = lib
    # Triton links -l:libcuda.so.1 and a dropped LD_PRELOAD still finds ours (facts: driver shim).
    env["TRITON_LIBCUDA_PATH"] = lib
    _prepend(env, "LD_LIBRARY_PATH", lib)
    if device == "soft":
        _prepend(
            env, "PYTHONPATH", os.path.join(config.PACKAGE_DIR, "hal", "soft", "torch", "pylib")
        )
    return env


def _prepend(env: dict[str, str], variable: str, folder: str) -> None:
    rest = [p for p in env.get(variable, "").split(":") if p and p != folder]
    env[variable] = ":".join([folder, *rest])


def write_job_file(
    job: runtime.JobFolder, options: Options, device: str, memory_bytes: int
) -> None:
    """job.json, for `devproxy ps`: written under another name first, so that nobody reads half of it."""
    import json

    facts = {
        "job": job.name,
        "pid": os.getpid(),
        "command": options.command,
        "device": device,
        "gpus": options.gpus,
        "gpu_memory_bytes": memory_bytes,
        "chaos": options.chaos,
        "started_unix_s": round(time.time(), 3),
    }
    path = os.path.join(job.path, "job.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(facts, file)
    os.rename(path + ".new", path)


def run(options: Options) -> int:
    """Refuse early, servers, command, end. Returns the exit code; raises DevproxyError when nothing was started."""
    program = cmd.find_program(options.command[0])
    plan = preflight.check(
        options.device, options.gpus, options.gpu_memory_bytes, program, options.command
    )
    mask = cmd.block_signals()
    job = runtime.create_job(options.name or runtime.default_job_name(options.command[0]))
    keeper = janitor.start(job)
    supervisor = Supervisor()
    try:
        supervisor.start_all(
            plan.server, job, options.gpus, plan.device, plan.gpu_memory_bytes, options.chaos
        )
        cmd.become_subreaper()
        write_job_file(job, options, plan.device, plan.gpu_memory_bytes)
        supervisor.wait_ready(plan.start_timeout_s, cmd.check_interrupted)
        for line in plan.note.splitlines():
            say(line)
        return _run_command(options, plan, job, supervisor, keeper, program, mask)
    finally:
        supervisor.stop()
        keeper.dismiss()
        runtime.remove_job(job)


def _run_command(
    options: Options,
    plan: preflight.Plan,
    job: runtime.JobFolder,
    supervisor: Supervisor,
    keeper: janitor.Janitor,
    program: str,
    mask: set[int],
) -> int:
    ours = frozenset([keeper.pid, *(server.pid for server in supervisor.servers)])
    proof = Proof([server.pid for server in supervisor.servers])

    def look() -> float | None:
        if not options.summary:
            return None
        if command is not None:
            proof.look(proctree.descendants(os.getpid(), ours))
        return proof.pause_s()

    command: cmd.Command | None = None
    env = job_environment(job, options, plan.device, plan.lib)
    command = cmd.Command(program, options.command, env, mask)
    keeper.watch(command.pid)
    code = command.wait(look, supervisor.note_exit)
    wall_s = time.monotonic() - command.started_at
    lost = supervisor.lost(job)
    stragglers = command.end_stragglers(ours, supervisor.note_exit)
    if stragglers:
        say(f"ended {stragglers} process(es) that the command had left running")
    for server in lost:
        words = server.last_words()
        say(
            f"the server of GPU {server.gpu} {server.how_it_ended()} while the job ran"
            + (f"; its last words: {words}" if words else "; it said nothing")
        )
    if lost and code == 0:
        code = EXIT_SERVER_LOST
    if options.summary:
        _say_summary(options, plan, job, supervisor, proof, wall_s, code)
    return code


def _say_summary(
    options: Options,
    plan: preflight.Plan,
    job: runtime.JobFolder,
    supervisor: Supervisor,
    proof: Proof,
    wall_s: float,
    code: int,
) -> None:
    import json

    from devproxy.cli import summary
    from devproxy.errors import ServerUnreachable
    from devproxy.proxy import stats

    gpus: list[dict[str, Any]] = []
    for server in supervisor.servers:
        try:
            gpus.append(stats.query(job.path, server.gpu, bytes.fromhex(plan.abi)))
        except ServerUnreachable as error:
            gpus.append({"gpu": server.gpu, "lost": str(error)})
    facts = summary.build(job.name, plan.device, wall_s, code, gpus, proof.as_json())
    if options.json:
        sys.stderr.write(json.dumps(facts) + "\n")
        return
    for line in summary.lines(facts):
        say(line)


def _fail(error: DevproxyError, as_json: bool) -> int:
    if as_json:
        import json

        facts = {"error": error.what, "remedy": error.remedy, "exit_code": error.exit_code}
        sys.stderr.write(json.dumps(facts) + "\n")
    else:
        say(str(error))
    return error.exit_code


def _main(argv: list[str]) -> int:
    own = argv[: argv.index("--")] if "--" in argv else argv
    if "--help" in own or "-h" in own:
        sys.stdout.write(USAGE)
        return 0
    if "--version" in own:
        from devproxy import __version__

        sys.stdout.write(f"devproxy {__version__}\n")
        return 0
    as_json = "--json" in own
    try:
        return run(parse(argv))
    except DevproxyError as error:
        return _fail(error, as_json)
    except cmd.Interrupted as interruption:
        return 128 + interruption.number
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(Refused(f"{where}{error.strerror or error}"), as_json)


def main() -> NoReturn:
    """Entry point of devproxy-run."""
    try:
        code = _main(sys.argv[1:])
    except KeyboardInterrupt:  # before the signals were blocked: nothing runs yet
        code = 130
    except MemoryError:
        say("out of memory")
        code = EXIT_REFUSED
    sys.exit(code)


if __name__ == "__main__":
    main()
