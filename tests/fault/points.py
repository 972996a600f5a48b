# SPDX-License-Identifier: Apache-2.0
"""Every fault point there is, in every operation that passes it: an error, and a kill of the process that passes it.

Afterwards either the job goes on, or its last image brings it back; the message says stage, object, cause and state,
and the state is true; nothing is left behind; and the same operation works right after.

test_points.py runs those cases that are like no other (IN_CI); the campaign `fault-points` of scripts/soak.py all.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoint.world import ROOT
from tests.fault.scene import Scene

for module in (
    "control.coordinator",
    "control.restore",
    "node.dump",
    "checkpoint.files.tracker",
    "checkpoint.store",
):
    importlib.import_module(f"devproxy.{module}")  # they register their points

SERVER_POINTS = re.findall(
    r"^DP_FAULT_POINT\((\w+)\)", (ROOT / "devproxy/csrc/base/fault.def").read_text(), re.M
)

CHECKPOINT, SUSPEND, RESUME, MIGRATE, RESTORE = (
    "checkpoint",
    "suspend",
    "resume",
    "migrate",
    "restore",
)
IMAGE = (CHECKPOINT, SUSPEND)
BACK = (RESUME, RESTORE)

GPU = r"^GPU [01]$"
STORED = r"^image j-\S+ in store "
FETCHED = r"^image j-\S+$"
PACK = r"^packs/\w+\.\w+\.pack in store "
MANIFEST = r"^images/j-\S+/manifest\.json in store "


@dataclass(frozen=True)
class Point:
    """Which operations pass it, and the stage and the object that their errors name."""

    verbs: tuple[str, ...]
    stage: str
    about: str


# test_the_table_is_complete fails for a point that is not here.
POINTS: dict[str, Point] = {
    "refuse_early": Point(IMAGE, "refuse_early", "^job j$"),
    "agree": Point((*IMAGE, MIGRATE), "agree", "^job j$"),
    "cut": Point(IMAGE, "cut", GPU),
    "quiesced": Point(IMAGE, "cut", GPU),
    "device": Point(IMAGE, "device", GPU),
    "freeze": Point(IMAGE, "device|host", "^the processes of job j$"),
    "frozen": Point(IMAGE, "host", "^the processes of job j$"),
    "thaw": Point((CHECKPOINT,), "thaw", GPU),
    "upload": Point(IMAGE, "upload", STORED),
    "before_commit": Point(IMAGE, "commit", STORED),
    "after_commit": Point(IMAGE, "after the commit", STORED),
    "prune": Point(IMAGE, "after the commit", STORED),
    "suspend_leave": Point((SUSPEND,), "leave", GPU),
    "migrate_start": Point((MIGRATE,), "restore", GPU),
    "migrate_hand_over": Point((MIGRATE,), "hand_over", GPU),
    "restore_fetch": Point(BACK, "fetch", FETCHED),
    "restore_files": Point(BACK, "files", FETCHED),
    "restore_device": Point(BACK, "device", GPU),
    "restore_host": Point(BACK, "host", "^the processes of job j$"),
    "restore_root": Point(BACK, "host", "^the processes of job j$"),
    "restore_go_on": Point(BACK, "go on", GPU),
    "files_snapshot": Point(IMAGE, "files", "^the files of job j$"),
    "files_put_back_mid": Point((RESTORE,), "files", r"/cheap\.txt$"),
    "store_open": Point((RESTORE,), "open", "^store file://"),
    "store_pack_write": Point(IMAGE, "upload", PACK),
    "store_index_write": Point(IMAGE, "commit", r"^packs/\w+\.\w+\.idx in store "),
    "store_manifest_write": Point(IMAGE, "commit", MANIFEST),
    "store_after_manifest": Point(IMAGE, "commit", MANIFEST),
    "store_read_chunk": Point(BACK, "fetch", PACK),
    "store_prune": Point((CHECKPOINT,), "after the commit", STORED),
    "server_cut_parked": Point((*IMAGE, MIGRATE), "cut", GPU),
    "server_dump_start": Point((*IMAGE, MIGRATE), "device", GPU),
    "server_dump_mid": Point((*IMAGE, MIGRATE), "device", GPU),
    "server_dump_end": Point((*IMAGE, MIGRATE), "device", GPU),
    "server_shared_mid": Point(IMAGE, "shared", GPU),
    "server_restore_start": Point((*BACK, MIGRATE), "device", GPU),
    "server_restore_mid": Point((*BACK, MIGRATE), "device", GPU),
    "server_restore_end": Point((*BACK, MIGRATE), "device", GPU),
    "server_resume": Point((CHECKPOINT, *BACK, MIGRATE), "go on", GPU),
}

# What stands above is not so here: a migrate has names of its own, and a server that does not go on has others in each.
STAGES: dict[tuple[str, str], str] = {
    (MIGRATE, "server_restore_start"): "restore",
    (MIGRATE, "server_restore_mid"): "restore",
    (MIGRATE, "server_restore_end"): "restore",
    (MIGRATE, "server_resume"): "hand_over",
    (CHECKPOINT, "server_resume"): "thaw",
}

# Where the supervisor or agent is killed, it is the last stage that it has begun: device memory is copied beside the
# tree, chunks are written behind the one that hands them out, and the command line opens the store first.
KILLED_STAGES = {
    "device": "device|host",
    "frozen": "device|host",
    "store_pack_write": "upload|commit",
    "store_open": "start",
    "store_read_chunk": "fetch|device",
}

# Points that fail without harm: the operation succeeds, or says a warning.
SUCCEEDS = {"prune", "store_prune", "suspend_leave"}
# The image is whole when these fail.
WHOLE = {"after_commit", "store_after_manifest"}
# A server that is killed here is not the one that the job lives on.
KILL_IS_HARMLESS: dict[str, tuple[str, ...]] = {
    MIGRATE: ("server_restore_start", "server_restore_mid", "server_restore_end"),
}


@dataclass(frozen=True)
class Case:
    point: str
    verb: str
    action: str

    def __str__(self) -> str:
        return f"{self.verb}-{self.point}-{self.action}"


CASES = [
    Case(point, verb, action)
    for action in ("error", "kill")
    for point, facts in POINTS.items()
    for verb in facts.verbs
]

# Each point's kill, in one of the verbs that pass it.
_KILLS: dict[str, set[str]] = {
    CHECKPOINT: {"refuse_early", "cut", "device", "freeze", "frozen", "thaw", "upload", "before_commit", "prune",
                 "files_snapshot", "store_pack_write", "store_index_write", "store_after_manifest", "store_prune",
                 "server_cut_parked", "server_dump_mid", "server_shared_mid", "server_resume"},
    SUSPEND: {"quiesced", "after_commit", "suspend_leave", "store_manifest_write", "server_dump_start"},
    RESUME: {"restore_fetch", "restore_device", "restore_root", "server_restore_start"},
    MIGRATE: {"agree", "migrate_start", "migrate_hand_over", "server_dump_end", "server_restore_mid"},
    RESTORE: {"restore_files", "restore_host", "restore_go_on", "files_put_back_mid", "store_open",
              "store_read_chunk", "server_restore_end"},
}  # fmt: skip
# Errors: of points whose error the same lines handle, one; in each verb those that only it handles.
_ERRORS: dict[str, set[str]] = {
    CHECKPOINT: {"refuse_early", "cut", "freeze", "thaw", "after_commit", "store_pack_write",
                 "store_after_manifest", "files_snapshot", "store_prune", "server_cut_parked",
                 "server_shared_mid", "server_resume"},
    SUSPEND: {"agree", "quiesced", "frozen", "before_commit", "store_after_manifest", "suspend_leave", "server_dump_mid"},
    RESUME: {"restore_fetch", "restore_go_on", "server_resume"},
    MIGRATE: {"migrate_start", "migrate_hand_over"},
    RESTORE: {"restore_root", "files_put_back_mid", "store_open", "store_read_chunk",
              "server_restore_mid"},
}  # fmt: skip
IN_CI = [
    case
    for case in CASES
    if case.point in (_KILLS if case.action == "kill" else _ERRORS)[case.verb]
]


def words(scene: Scene, verb: str) -> list[str]:
    if verb == MIGRATE:
        return [verb, "j", "--to", "1" if scene.gpu() == 0 else "0"]
    if verb == RESTORE:
        return [verb, scene.latest(), "--store", str(scene.store), "--output", "log"]
    return [verb, "j"]


def prepare(scene: Scene, case: Case) -> list[str]:
    """The job as the operation needs it. Returns the command line."""
    if case.point == "store_prune":
        scene.ready()
        for _ in range(3):  # as many as are kept
            scene.ctl("checkpoint", "j")
    scene.ready()
    if case.verb == RESUME:
        scene.ctl("suspend", "j")
    if case.verb == RESTORE:
        scene.wait_step(scene.last_step() + 2)  # so that there is something to roll back
        scene.kill_everything()
        scene.job = None
    return words(scene, case.verb)


def run(scene: Scene, case: Case) -> None:
    """Raises AssertionError where the promise is broken."""
    (_error if case.action == "error" else _kill)(scene, case)


def _error(scene: Scene, case: Case) -> None:
    """The operation fails with a message, or copes; the job goes on; the next try works."""
    line = prepare(scene, case)
    images = {str(i["id"]) for i in scene.images()}
    gpu = scene.gpu() if case.verb == MIGRATE else None
    scene.arm(f"{case.point}:error")
    done = scene.ctl(*line, "--json", check=False)
    fired = scene.fired()
    scene.disarm()
    assert fired, f"{case.point} is not passed by {case.verb}: {done.stdout}{done.stderr}"
    now = {str(i["id"]) for i in scene.images() if i["whole"]}
    assert images & now or case.point == "store_prune", (images, now)
    if case.point in SUCCEEDS or (case.point == "server_resume" and case.verb not in BACK):
        assert done.returncode == 0, done.stderr
        if case.verb == SUSPEND:
            scene.ctl("resume", "j")
    else:
        facts = scene.failure(done)
        point = POINTS[case.point]
        scene.check_failure(
            facts,
            stage=STAGES.get((case.verb, case.point), point.stage),
            about=point.about,
            cause=case.point,  # the errors of both languages name it
            gpu=gpu,
        )
        assert bool(now - images) == (case.point in WHOLE), (images, now)
        if case.point in WHOLE:
            assert f"image {scene.latest()} is whole" in facts["state"], facts
        if case.verb == RESUME:
            assert scene.phase() == "suspended"
            scene.ctl(*line)
        elif case.verb == RESTORE:
            scene.wait(lambda: not scene.others(), 10, "the end of the agent")
            scene.ctl(*line)
    scene.check_goes_on()
    scene.check_nothing_left()
    if case.verb in (CHECKPOINT, MIGRATE):
        scene.ctl(*words(scene, case.verb))
        scene.check_goes_on()
    if case.verb == SUSPEND:
        scene.ctl("suspend", "j")
        scene.ctl("resume", "j")
        scene.check_goes_on()


def _kill(scene: Scene, case: Case) -> None:
    """Whoever passes the point is killed with -9: S, the detached agent, or a server."""
    line = prepare(scene, case)
    gpu = scene.gpu() if case.verb == MIGRATE else None
    if case.point == "store_open":
        done, fired = _kill_behind_the_command_line(scene, line)
    else:
        scene.arm(f"{case.point}:kill")
        done = scene.ctl(*line, "--json", check=False)
        fired = scene.fired()
        scene.disarm()
    assert fired, f"{case.point} is not passed by {case.verb}: {done.stdout}{done.stderr}"
    facts = scene.failure(done)
    point = POINTS[case.point]
    stage = STAGES.get((case.verb, case.point), point.stage)
    if case.point in SERVER_POINTS:
        about, cause = point.about, "server of GPU [01] (did not answer|was ended by signal 9)"
    else:
        stage = KILLED_STAGES.get(case.point, stage)
        about, cause = "job j$", "went away|killed by signal 9"
    scene.check_failure(facts, stage=stage, about=about, cause=cause, gpu=gpu)
    if case.point in KILL_IS_HARMLESS.get(case.verb, ()):
        scene.check_goes_on()
        scene.check_nothing_left()
        return
    if facts["state"] == "it is still suspended":
        scene.ctl(*line)  # the server that was restored into was killed, not S
    else:
        scene.check_restores(scene.latest())
    scene.check_goes_on()
    scene.check_nothing_left()


def _kill_behind_the_command_line(
    scene: Scene, line: list[str]
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """The command line opens the store first: its end says nothing, and harms nothing. The agent is to be killed."""
    paused = Path(f"{scene.fault}.paused")
    scene.arm("store_open:pause")
    with ThreadPoolExecutor(1) as pool:
        verb = pool.submit(scene.ctl, *line, "--json", check=False)
        scene.wait(paused.exists, 30, "the command line at store_open")
        scene.arm("store_open:kill")
        paused.unlink()
        done = verb.result()
    fired = scene.fired()
    scene.disarm()
    return done, fired
