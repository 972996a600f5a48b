"""S, the supervisor of one job: its servers, its process tree, its standard streams, its end.

This is devproxy-run, and the detached agent after a restore. The main thread waits here for signals and for the tree's
end; the coordinator's verbs come from other threads and change `root` and `phase` through the methods below.

Who owns what
    main thread     signals, reaping, the decision that the job has ended
    verb thread     one at a time (the coordinator's lock): servers, phase, suspend() and restored()
    _lock           root, expect_end, ended; a leaf, taken under supervisor.reaping
"""

from __future__ import annotations

import os
import signal
import threading
import time

from devproxy import config, proctree, runtime
from devproxy.control import stdio as streams
from devproxy.control import tree
from devproxy.control.spec import JobSpec
from devproxy.errors import Refused
from devproxy.log import say
from devproxy.proxy import command as cmd
from devproxy.proxy import preflight
from devproxy.proxy.janitor import Janitor
from devproxy.proxy.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from devproxy.control.agent import Agent

RESTORE_ENDS_S = 60.0
GIVEN_UP_S = 2.0  # for output that nobody takes, after a signal that ended the job
HOST_LIBRARY = "libdevproxy_host.so"


class Job:
    """One job on this host. Phases: see coordinator_api."""

    def __init__(
        self,
        spec: JobSpec,
        folder: runtime.JobFolder,
        supervisor: Supervisor,
        keeper: Janitor,
        stdio: streams.Stdio,
        lib: str,
        server: str,
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.supervisor = supervisor
        self.keeper = keeper
        self.stdio = stdio
        self.lib = lib
        self.server = server
        self.phase = "starting"
        self.root: int | None = None  # outer process id of the tree's root
        self.code: int | None = None  # how the job ended, as a shell tells it
        self.stragglers = 0
        self.started_at = time.monotonic()
        self.ended = threading.Event()
        self.agent: Agent | None = None
        self.agent_thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._expect_end = False
        self._tree_gone = threading.Event()
        self._we_stopped_it = False
        self._told_to_end = False
        self._plain: cmd.Command | None = None
        # While a restore goes on: children reaped that we did not know, and how they ended. Not always: a number
        # comes back some day, and would be taken for a root that has ended.
        self._strangers: dict[int, int] | None = None
        self._has_root = threading.Event()  # no restore goes on
        self._has_root.set()
        self._main = threading.main_thread().ident or 0

    # -- start --------------------------------------------------------------------------------------------------

    def start_plain(self, env: dict[str, str], mask: set[int]) -> None:
        """Without namespaces, as a child of ours with our own standard streams."""
        self._plain = cmd.Command(self.spec.program, self.spec.command, env, mask)
        self.root = self._plain.pid
        self.keeper.watch(self.root)
        self.phase = "running"

    def start_tree(self, env: dict[str, str], mask: set[int], mount_at: str) -> None:
        """Under devproxy-init. Raises what tree.start raises."""
        self.stdio.open()
        root = tree.start(
            os.path.join(self.lib, "devproxy-init"),
            self.spec.program,
            self.spec.command,
            env,
            job_dir=self.folder.path,
            mount_at=mount_at,
            modes=self.stdio.modes,
            mask=mask,
        )
        self.restored(root)
        self.begin_streams()
        self.phase = "running"

    def begin_streams(self) -> None:
        self.stdio.start()
        if self.stdio.terminal:
            threading.Thread(target=self._follow_events, name="events", daemon=True).start()

    # -- for the coordinator ------------------------------------------------------------------------------------

    def expect_end(self) -> None:
        """The tree is about to be ended by us (suspend): that is not the job's end."""
        with self._lock:
            self._expect_end = True
            self._tree_gone.clear()

    def expect_no_end(self) -> None:
        """It was not, after all. A tree that ended in between has ended for good: the main thread looks again."""
        with self._lock:
            self._expect_end = False
            gone = self.root is None
        if gone:
            self.end_now(137)

    def wait_tree_gone(self, timeout_s: float) -> bool:
        return self._tree_gone.wait(timeout_s)

    def await_root(self) -> None:
        """A restore begins: restored() or no_root() follows."""
        with self._lock:
            self._strangers = {}
        self._has_root.clear()

    def no_root(self) -> None:
        """The restore has failed."""
        with self._lock:
            self._strangers = None
        self._has_root.set()

    def restored(self, root: int) -> None:
        """A tree runs, and this process is its root's parent."""
        with self._lock:
            self._expect_end = False
            # It may have ended before it had a name here.
            status = self._strangers.pop(root, None) if self._strangers else None
            self._strangers = None
            self.root = None if status is not None else root
        self._has_root.set()
        if status is not None:
            self._note_end(status)
            self._wake()
            return
        self.keeper.watch(root)

    def end_now(self, code: int) -> None:
        """There is no tree, and there will be none: the main thread goes on to the job's end."""
        with self._lock:
            if self.code is None:
                self.code = code
        self._wake()

    def send(self, number: int) -> None:
        """A signal for the job's main process; SIGKILL for the whole tree. Without a tree an ending signal ends the job."""
        with self._lock:
            root = self.root
        ends = number in cmd.ENDING or number == signal.SIGKILL
        self._told_to_end |= ends
        if root is None:
            if ends:
                self.end_now(128 + number)
            return
        if self._plain or number in cmd.FORWARDED or number == signal.SIGKILL:
            tree.kill_tree(root, number)
            return
        for pid in proctree.children(root)[:1]:  # one that devproxy-init does not pass on
            tree.kill_tree(pid, number)

    def _wake(self) -> None:
        signal.pthread_kill(self._main, signal.SIGCHLD)

    # -- main thread --------------------------------------------------------------------------------------------

    def wait(self, tick: Callable[[], float | None]) -> int:
        """Until the job has ended: passes signals on, reaps, calls tick when its last answer (seconds) is over."""
        pause = tick()
        due = None if pause is None else time.monotonic() + pause
        while True:
            self._reap()
            if self.code is not None:
                self.phase = "ending"
                return self.code
            if due is None:
                self._on_signal(signal.sigwaitinfo(cmd.WATCHED))
                continue
            info = signal.sigtimedwait(cmd.WATCHED, max(0.0, due - time.monotonic()))
            if info is not None:
                self._on_signal(info)
            if time.monotonic() >= due:
                pause = tick()
                due = None if pause is None else time.monotonic() + pause

    def _reap(self) -> None:
        """Everybody's children: subprocess.Popen of another thread (CRIU's) then finds its child gone, which it copes
        with; CRIU says in its answer how it ended."""
        while True:
            # A verb's thread that looks for a server meanwhile must find it running or its status noted.
            with self.supervisor.reaping:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return
                if pid == 0:
                    return
                with self._lock:
                    is_root = pid == self.root
                    expected = self._expect_end
                    if is_root:
                        self.root = None
                    elif not self.supervisor.note_exit(pid, status) and self._strangers is not None:
                        self._strangers[pid] = status
            if not is_root:
                continue
            self._tree_gone.set()
            if not expected:
                self._note_end(status)

    def _note_end(self, status: int) -> None:
        left = None if self._plain else tree.read_status(self.folder.path)
        if left is not None:
            self.code, self.stragglers = left
        else:
            self.code = cmd.shell_status(status)

    def _on_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number == signal.SIGCHLD:
            return
        terminal = self.stdio.terminal
        if number == signal.SIGWINCH and terminal:
            terminal.note_size()
        if number == signal.SIGCONT and terminal:
            terminal.take()
        reached_it_already = self._plain and self._plain.shares_group and info.si_code == 0x80
        if not reached_it_already:
            self._we_stopped_it = number == signal.SIGTSTP
            self.send(number)
        if number == signal.SIGTSTP:
            self._stop_ourselves()

    def _stop_ourselves(self) -> None:
        """As the shell around us expects; SIGCONT is passed on."""
        if self.stdio.terminal:
            self.stdio.terminal.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _follow_events(self) -> None:
        """Ctrl-Z stops the job inside its own terminal; our shell learns it by our own stop."""
        path = os.path.join(self.folder.path, "init.events")
        with open(os.open(path, os.O_RDWR | os.O_CLOEXEC), encoding="ascii") as events:
            for line in events:
                if line.startswith("stopped") and not self._we_stopped_it:
                    self._stop_ourselves()
                self._we_stopped_it = False

    def end(self, ours: frozenset[int]) -> int:
        """After wait(): what the command left running ends with it. Returns how many processes had to be told."""
        if self._plain:
            return self._plain.end_stragglers(ours, self.supervisor.note_exit)
        # Killed while it was being restored: the tree that is about to run belongs to nobody.
        self._has_root.wait(RESTORE_ENDS_S)
        with self._lock:
            root = self.root
        if root is not None:
            tree.kill_tree(root)
            try:
                os.waitpid(root, 0)
            except ChildProcessError:
                pass
        # Who was told to end must not wait for a reader that does not read.
        self.stdio.finish(GIVEN_UP_S if self._told_to_end else None)
        return self.stragglers


def job_environment(spec: JobSpec, lib: str, pylib: str, job_dir: str) -> dict[str, str]:
    """What the command gets on top of our own environment. job_dir: as the job sees its folder."""
    env = dict(os.environ)
    refused, compiler = preflight.cuda_wheel(spec.device, spec.program)
    names = (HOST_LIBRARY, *preflight.shims(spec.device), *refused)
    preload = [p for p in (os.path.join(lib, name) for name in names) if os.path.exists(p)]
    around = env.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    env["LD_PRELOAD"] = ":".join(preload + [p for p in around if p and p not in preload])
    env[config.JOB_DIR] = job_dir
    env[config.JOB_ID] = spec.job_id
    env[config.GPUS] = str(len(spec.gpus))
    env[config.DEVICE] = spec.device
    env[config.LIB] = lib
    env["DEVPROXY_FILES_MAX"] = str(spec.files_max_bytes)
    # Triton links -l:libcuda.so.1 and a dropped LD_PRELOAD still finds ours (facts: driver shim).
    env["TRITON_LIBCUDA_PATH"] = lib
    if compiler:
        # Behind the user's own folders.
        given = env.get("LD_LIBRARY_PATH", "")
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (given, compiler)))
    _prepend(env, "LD_LIBRARY_PATH", lib)
    if spec.device in ("soft", "cuda"):  # a recording device runs no operators
        _prepend(env, "PYTHONPATH", pylib)
    return env


def _prepend(env: dict[str, str], variable: str, folder: str) -> None:
    rest = [p for p in env.get(variable, "").split(":") if p and p != folder]
    env[variable] = ":".join([folder, *rest])


def check_gpus(text: str, most: int) -> list[int]:
    """ "0,2" -> [0, 2]. Raises Refused."""
    found = []
    for part in text.split(","):
        if not part.isascii() or not part.isdigit() or int(part) >= most:
            raise Refused(
                f"{text!r} is no list of GPUs", f"write numbers below {most}, as 0 or 0,1"
            )
        found.append(int(part))
    if len(set(found)) != len(found):
        raise Refused(f"{text!r} names a GPU twice")
    return found


AGENT_DELAY_S = 0.4


def start_agent(job: Job) -> None:
    """Serves the job's verbs, from a thread and a little later: a short command must not pay for what that imports."""
    job.agent_thread = threading.Thread(target=_serve, args=(job,), name="agent", daemon=True)
    job.agent_thread.start()


def _serve(job: Job) -> None:
    if job.ended.wait(AGENT_DELAY_S):
        return
    try:
        from devproxy.control import agent

        job.agent = agent.serve(job)
    except Exception as error:
        say(f"no checkpoints for this job: its control service cannot start: {error}")


def stop_agent(job: Job) -> None:
    """Ends the service; a verb that runs is told that the job is gone. May be called more than once."""
    job.ended.set()
    if job.agent_thread:
        job.agent_thread.join()  # at most the time of an import
    if job.agent:
        job.agent.stop()
        job.agent = None
