# SPDX-License-Identifier: Apache-2.0
"""devproxy-run: servers up, the unmodified command beside them, its exit code out, nothing left behind.

Its imports are light on purpose: what it takes is added to every job's start.
"""

from __future__ import annotations

import os
import sys
import time

from devproxy import __version__, config, machine, proctree, records, runtime, state
from devproxy.cli.near import did_you_mean
from devproxy.control.late_agent import LateAgent
from devproxy.errors import EXIT_REFUSED, EXIT_SERVER_LOST, DevproxyError, Refused
from devproxy.log import say
from devproxy.node import burial, environment, init, stdio
from devproxy.node import spec as specs
from devproxy.node.tree import Tree
from devproxy.proxy import command as cmd
from devproxy.proxy import janitor as janitors
from devproxy.proxy import preflight
from devproxy.proxy import starter as starters
from devproxy.proxy.server_set import ServerSet
from devproxy.proxy.starter import Starter

TYPE_CHECKING = False  # typing itself costs every start 10 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from devproxy.control.side import First, Other
    from devproxy.proxy.proof import Proof

USAGE = """usage: devproxy-run [options] -- COMMAND [ARGUMENT...]

Runs an unmodified command behind a device proxy: its GPU work happens in a server process.

  --device auto|soft|cuda  auto (the default) takes the software GPU where no NVIDIA device is
  --device record          executes no kernel; writes what the command asks of a GPU into DEVPROXY_RECORD=FILE
  --gpus N                 number of GPUs, one server each (1)
  --gpu ID[,ID...]         which GPUs of the machine, instead of the first N
  --gpu-memory SIZE        memory of each software GPU, as 512MiB or 4GiB (4GiB, or what can be spared)
  --name JOB               the job's name in `devproxy ps` (made from the command)
  --chaos SEED             software GPU: delay and reorder legally, to show ordering bugs
  --summary                at the end, say on stderr what ran where
  --json                   the summary, or the error, as one line of JSON on stderr
  --version, --help

Checkpoints (devproxy checkpoint, suspend, restore, migrate):
  --store URL              where images go: a folder, or file:// or s3:// (a folder of yours under /var/tmp)
  --checkpoint-every T     an image every 30s, 10m or 50steps (of the optimizer)
  --keep N                 how many images of this job to keep (3)
  --cut-wait TIME          how long an image waits for the moment of least device memory, as 500ms; 0 takes it at once
  --freeze-limit TIME      a job that an image holds frozen for longer is let go, and the image given up (300s)
  --files-max SIZE         larger files that the job writes are listed in images, not kept (1GiB)
  --barrier auto|meta|agree|takeback
                           how many ranks come to a cut: at a common point, beside their own collectives (meta:
                           data-parallel jobs) or by agreement; or wherever they are (takeback: what waits for other
                           ranks is kept with the job); auto, the default, takes whichever fits
  --strict                 no image while a connection to the outside would be lost by it
  --plain                  no namespaces around the job; then it cannot be checkpointed

A job on several nodes (the same command line on each, but for --node):
  --nodes N                how many nodes the job has
  --node K                 which of them this is, from 0 on; the verbs are given to node 0
  --meet HOST:PORT         where node 0 listens, by a name or address that all nodes reach
  --address ADDR           of this host, where its servers take the other nodes' data (the one that leads to --meet)
  --encrypt-data           what servers of different nodes send each other, with TLS 1.3 (as it is, as NCCL's)
  --network A.B.C.D/N      addresses for the job's processes: node K has the K+1st (10.213.0.0/24)

Exit code: the command's; 128+N when signal N ended it; 126, 127 as a shell gives them; 2 when nothing was started;
3 when the command ended well but a server had died under it.
"""
MOST_NODES = 32
FLAGS = ("--summary", "--json", "--strict", "--plain", "--encrypt-data")
VALUED = (
    "--device",
    "--gpus",
    "--gpu",
    "--gpu-memory",
    "--name",
    "--chaos",
    "--store",
    "--checkpoint-every",
    "--keep",
    "--files-max",
    "--cut-wait",
    "--freeze-limit",
    "--nodes",
    "--node",
    "--meet",
    "--address",
    "--network",
    "--barrier",
)


class Options:
    """The command line, checked one by one; what goes together is checked in preflight."""

    def __init__(self) -> None:
        self.device = "auto"
        self.gpus = 1
        self.on: list[int] = []
        self.gpu_memory_bytes: int | None = None
        self.name = ""
        self.chaos: int | None = None
        self.summary = False
        self.json = False
        self.store = ""
        self.every = ""
        self.keep = 3
        self.files_max_bytes = machine.GIB
        self.cut_wait_ms: int | None = None
        self.freeze_limit_s = specs.FREEZE_LIMIT_S
        self.barrier = "auto"
        self.strict = False
        self.plain = False
        self.nodes = 1
        self.node: int | None = None
        self.meet = ""
        self.address = ""
        self.network = ""
        self.encrypt_data = False
        self.command: list[str] = []

    def machine_gpus(self) -> list[int]:
        return self.on or list(range(self.gpus))


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
        if name in FLAGS and not equals:
            setattr(options, name[2:].replace("-", "_"), True)
        elif name in VALUED:
            if not equals:
                if not rest or rest[0] == "--":
                    raise Refused(f"{name} needs a value", "see: devproxy-run --help")
                value = rest.pop(0)
            _set(options, name, value)
        elif name.startswith("-"):
            hint = did_you_mean(name, [*VALUED, *FLAGS])
            raise Refused(f"unknown option {word!r}", f"{hint}see: devproxy-run --help")
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
        if value not in ("auto", "soft", "record", "cuda"):
            raise Refused(f"unknown device {value!r}", "use --device auto, soft, record or cuda")
        options.device = value
    elif name == "--gpus":
        options.gpus = _number(name, value, 1, machine.MOST_GPUS)
    elif name == "--nodes":
        options.nodes = _number(name, value, 1, MOST_NODES)
    elif name == "--node":
        options.node = _number(name, value, 0, MOST_NODES - 1)
    elif name == "--meet":
        options.meet = value
    elif name == "--address":
        options.address = value
    elif name == "--network":
        options.network = value
    elif name == "--chaos":
        options.chaos = _number(name, value, 0, (1 << 64) - 1)
    elif name == "--gpu":
        options.on = specs.check_gpus(value, machine.MOST_GPUS)
        options.gpus = len(options.on)
    elif name == "--store":
        options.store = value
    elif name == "--checkpoint-every":
        specs.parse_every(value)
        options.every = value
    elif name == "--keep":
        options.keep = _number(name, value, 1, 1 << 20)
    elif name == "--files-max":
        options.files_max_bytes = machine.parse_size(value)
    elif name == "--cut-wait":
        options.cut_wait_ms = machine.parse_duration_ms(value)
    elif name == "--freeze-limit":
        options.freeze_limit_s = machine.parse_duration_ms(value) / 1000
        if options.freeze_limit_s < 1:
            raise Refused(f"--freeze-limit {value} is too short for any image", "give 1s or more")
    elif name == "--barrier":
        if value not in ("auto", "meta", "agree", "takeback"):
            raise Refused(
                f"unknown barrier {value!r}", "use --barrier auto, meta, agree or takeback"
            )
        options.barrier = value
    elif name == "--gpu-memory":
        options.gpu_memory_bytes = machine.parse_size(value)
    else:
        options.name = runtime.check_job_name(value)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise Refused(f"{name} {text!r} is not a number from {least} to {most}")
    return int(text)


def _check_nodes(options: Options, plain: bool) -> None:
    """Raises Refused for what does not go together in a job of several nodes."""
    given = {
        "--node": options.node is not None, "--meet": options.meet, "--address": options.address,
        "--network": options.network, "--encrypt-data": options.encrypt_data,
    }  # fmt: skip
    if options.nodes == 1:
        if alone := next((name for name, value in given.items() if value), ""):
            raise Refused(f"{alone} is for a job of several nodes", "give --nodes N as well")
        return
    if options.node is None or not options.meet or not options.name:
        raise Refused(
            "a job of several nodes needs --node K, --meet HOST:PORT and --name JOB",
            "the same on each node, but for --node",
        )
    if options.node >= options.nodes:
        raise Refused(
            f"there is no node {options.node} in a job of {options.nodes}", "number them from 0"
        )
    if plain:
        raise Refused("a job of several nodes needs namespaces of its own", "see: devproxy doctor")


def _meet(options: Options, plan: preflight.Plan, job_dir: str) -> First | Other | None:
    """The other nodes are found, or will be. Raises Refused."""
    if options.nodes == 1:
        return None
    # gRPC and the store: only such a job waits for them before its command begins.
    from devproxy.control import side
    from devproxy.control.meeting import Hello
    from devproxy.control.stage_note import note_that_it_waits

    note_that_it_waits(job_dir, True)
    assert options.node is not None
    hello = Hello(
        job=options.name, node=options.node, nodes=options.nodes, device=plan.device, abi=plan.abi,
        host=os.uname().nodename, encrypt_data=options.encrypt_data,
    )  # fmt: skip
    if options.node == 0:
        store = options.store or state.default_store()
        return side.First(
            options.meet, hello, job_id=side.new_job_id(), store=store,
            network=options.network, address=options.address,
        )  # fmt: skip
    if options.network or options.store:
        raise Refused("--network and --store are node 0's to say", "leave them out here")
    return side.Other(
        options.meet, hello, timeout_s=side.MEET_S, interrupted=cmd.check_interrupted, address=options.address
    )  # fmt: skip


def run(options: Options) -> int:
    """Returns the exit code; raises DevproxyError when nothing was started."""
    try:
        return _run(options)
    except DevproxyError as error:
        if options.node and options.meet and options.name:
            from devproxy.control.meeting import tell_node_0  # late, as in _meet

            tell_node_0(options.meet, options.name, options.node, error)
        raise


def _run(options: Options) -> int:
    """Refuse early, servers, command, end."""
    burial.install()
    machine.working_folder()
    program = cmd.find_program(options.command[0])
    plan = preflight.check(
        options.device, options.machine_gpus(), options.gpu_memory_bytes, program, options.command
    )
    plain = options.plain or not init.may_make_namespaces()
    if plain and options.every:
        raise Refused(
            "--checkpoint-every needs the job in namespaces of its own, and "
            + ("--plain was given" if options.plain else "this user may not make them"),
            "see: devproxy doctor",
        )
    _check_nodes(options, plain)
    if options.encrypt_data:
        specs.check_encryption(plan.device)
    if options.store and not plain:
        _try_store(options.store)
    build = state.ensure_build(plan.lib, config.pylib_dir(), config.plugin_dir())
    mask = cmd.block_signals()
    name = options.name or runtime.default_job_name(options.command[0])
    folder = runtime.create_job(f"{name}.{options.node}" if options.node else name)
    try:
        side = _meet(options, plan, folder.path)
    except BaseException:
        runtime.remove_job(folder)
        raise
    spec = make_spec(options, plan, folder.name, program, build, plain)
    if side is not None:
        spec.nodes, spec.network = side.place.trees, side.place.network
        spec.job_id, spec.store = side.job_id, side.store
    janitor = janitors.start(folder, spec.job_id)
    servers = ServerSet()
    lib = state.build_path(build)
    server = config.server_path(lib)
    gpus = options.machine_gpus()
    try:
        more = side.place.server_arguments() if side else ()
        servers.start_all(
            server,
            folder,
            gpus,
            spec.device,
            spec.gpu_memory_bytes,
            spec.chaos,
            spec.carries_metas,
            more,
        )
        cmd.become_subreaper()
        specs.write_job_file(folder.path, spec, gpus, os.getpid())
        servers.wait_ready(plan.start_timeout_s, cmd.check_interrupted)
        for line in plan.note.splitlines():
            say(line)
        streams = stdio.Stdio(folder.path, log=state.log_path(folder.name))
        place = side.place if side else None
        tree = Tree(spec, gpus, folder, servers, janitor, streams, lib, server, place)
        if side is not None:
            side.attach(tree)
        code = _run_command(options, tree, mask, side)
        records.end(folder.name, code)
        return code
    finally:
        if side is not None:
            side.stop()
        servers.stop()
        janitor.dismiss()
        runtime.remove_job(folder)


def _try_store(url: str) -> None:
    """Better now than at the first image, an hour into the job. Raises Refused."""
    from devproxy.checkpoint.backends import (
        try_to_write,  # a folder's is quick; s3fs takes a second: for jobs that name a store
    )

    try:
        try_to_write(url)
    except (DevproxyError, OSError) as error:
        raise Refused(
            f"--store {url} cannot be used ({error})", "name one that you may write to"
        ) from None


def make_spec(
    options: Options, plan: preflight.Plan, name: str, program: str, build: str, plain: bool
) -> specs.JobSpec:
    """What the job is, for job.json and for images."""
    return specs.JobSpec(
        job=name,
        job_id=os.urandom(8).hex(),
        command=options.command,
        program=program,
        cwd=machine.working_folder(),
        device=plan.device,
        gpu_memory_bytes=plan.gpu_memory_bytes,
        chaos=options.chaos,
        build=build,
        abi=plan.abi,
        store=options.store or state.default_store(),
        every=options.every,
        keep=options.keep,
        files_max_bytes=options.files_max_bytes,
        cut_wait_ms=options.cut_wait_ms,
        freeze_limit_s=options.freeze_limit_s,
        barrier=options.barrier,
        strict=options.strict,
        plain=plain,
        encrypt_data=options.encrypt_data,
        started_unix_s=round(time.time(), 3),
    )


def _run_command(options: Options, tree: Tree, mask: set[int], side: First | Other | None) -> int:
    servers = tree.servers
    if side is not None:
        side.before_command(cmd.check_interrupted)

    def ours() -> frozenset[int]:
        return frozenset([tree.janitor.pid, *(server.pid for server in servers.members)])

    proof: Proof | None = None
    if options.summary:
        from devproxy.proxy import proof as proofs  # its reader of /proc is for these jobs alone

        proof = proofs.Proof([server.pid for server in servers.members])

    starter = Starter(environment.JUPYTER, tree.send)

    def look() -> float | None:
        starter.look()
        pauses = [starters.LOOK_S] if starter.is_watched else []
        if (proof_s := look_for_proof()) is not None:
            pauses.append(proof_s)
        return min(pauses, default=None)

    def look_for_proof() -> float | None:
        if proof is None:
            return None
        if tree.root is not None:
            proof.server_pids = [server.pid for server in servers.members]
            proof.look([tree.root, *proctree.descendants(tree.root)])
        return proof.pause_s()

    mount_at = tree.folder.path
    if not tree.spec.plain:
        mount_at = init.make_mount_point()
    pylib = config.job_pylib_dir(tree.lib)
    env = environment.job_environment(tree.spec, len(tree.gpus), tree.lib, pylib, mount_at)
    if tree.place is not None:
        env |= tree.place.environment()
    if tree.spec.plain:
        tree.start_plain(env, mask)
    else:
        tree.start_tree(env, mask, mount_at)
        tree.release_network()
    spec = tree.spec
    records.begin(tree.folder.name, spec.job_id, spec.command, spec.started_unix_s)
    agent = LateAgent(tree, side)
    agent.start()
    code = tree.wait(look)
    agent.finish(code)
    if side is not None:
        side.ended(cmd.check_interrupted)
    wall_s = time.monotonic() - tree.started_at
    lost = servers.lost(tree.folder)
    stragglers = tree.end(ours())
    if stragglers:
        say(f"ended {stragglers} process(es) that the command had left running")
    for process in lost:
        words = process.last_words()
        say(
            f"{process.name} {process.how_it_ended()} while the job ran"
            + (f"; its last words: {words}" if words else "; it said nothing")
        )
    if lost and code == 0:
        code = EXIT_SERVER_LOST
    if proof is not None:
        _say_summary(options, tree, proof, wall_s, code)
    agent.stop()
    return code


def _say_summary(options: Options, tree: Tree, proof: Proof, wall_s: float, code: int) -> None:
    # For these jobs alone, and at their end.
    from devproxy.cli import output, summary
    from devproxy.errors import ServerUnreachable
    from devproxy.proxy import stats

    gpus: list[dict[str, Any]] = []
    for server in tree.servers.members:
        try:
            gpus.append(stats.query(tree.folder.path, server.gpu, bytes.fromhex(tree.spec.abi)))
        except ServerUnreachable as error:
            gpus.append({"gpu": server.gpu, "lost": str(error)})
    facts = summary.build(tree.spec.job, tree.spec.device, wall_s, code, gpus, proof.as_json())
    if options.json:
        sys.stderr.write(output.as_json(facts) + "\n")
        return
    for line in summary.lines(facts):
        say(line)


def _fail(error: DevproxyError, as_json: bool) -> int:
    if as_json:
        from devproxy.cli import output  # nothing is started

        output.error_json(error)
    else:
        say(str(error))
    return error.exit_code


def _main(argv: list[str]) -> int:
    own = argv[: argv.index("--")] if "--" in argv else argv
    if "--help" in own or "-h" in own:
        sys.stdout.write(USAGE)
        return 0
    if "--version" in own:
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
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # a closed standard stream: its number must not become one of our own files
    os.close(fd)
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
