"""Every fault point there is, in every operation that passes it: an error, and a kill of the process that passes it.

Afterwards either the job goes on, or its last image brings it back; the message says stage, cause and state; nothing
is left behind; and the same operation works right after.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

import pytest

from devproxy import fault
from tests.checkpoint.world import ROOT
from tests.fault.scene import Scene

for module in ("control.coordinator", "control.restore", "checkpoint.files", "checkpoint.store"):
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

# Which operations pass each point. test_the_table_is_complete fails for a point that is not here.
PASSED_BY: dict[str, tuple[str, ...]] = {
    "refuse_early": IMAGE,
    "cut": IMAGE,
    "quiesced": IMAGE,
    "device": IMAGE,
    "frozen": IMAGE,
    "thaw": (CHECKPOINT,),
    "upload": IMAGE,
    "before_commit": IMAGE,
    "after_commit": IMAGE,
    "prune": IMAGE,
    "suspend_leave": (SUSPEND,),
    "migrate_start": (MIGRATE,),
    "migrate_hand_over": (MIGRATE,),
    "restore_fetch": BACK,
    "restore_files": BACK,
    "restore_device": BACK,
    "restore_host": BACK,
    "restore_go_on": BACK,
    "files_snapshot": IMAGE,
    "files_put_back_mid": (RESTORE,),
    "store_open": (RESTORE,),
    "store_pack_write": IMAGE,
    "store_index_write": IMAGE,
    "store_manifest_write": IMAGE,
    "store_after_manifest": IMAGE,
    "store_read_chunk": BACK,
    "store_prune": (CHECKPOINT,),
    "server_cut_parked": (*IMAGE, MIGRATE),
    "server_dump_start": (*IMAGE, MIGRATE),
    "server_dump_mid": (*IMAGE, MIGRATE),
    "server_dump_end": (*IMAGE, MIGRATE),
    "server_shared_mid": IMAGE,
    "server_restore_start": (*BACK, MIGRATE),
    "server_restore_mid": (*BACK, MIGRATE),
    "server_restore_end": (*BACK, MIGRATE),
    "server_resume": (CHECKPOINT, *BACK, MIGRATE),
}

# Points that fail without harm: the operation succeeds, or says a warning.
SUCCEEDS = {"prune", "store_prune", "suspend_leave"}
# The image is whole when these fail.
WHOLE = {"after_commit", "store_after_manifest"}


@dataclass(frozen=True)
class Case:
    point: str
    verb: str
    action: str

    def __str__(self) -> str:
        return f"{self.verb}-{self.point}-{self.action}"


def seldom(point: str, verb: str, action: str) -> bool:
    """Rare combinations, only as soak: what they hit is what the others hit."""
    if action == "error":
        return verb in (SUSPEND, RESUME) and point not in ERRORS_NOW
    return point not in KILLS_NOW.get(verb, ())


# A suspend passes what a checkpoint passes, while the tree is frozen; a resume passes what a restore does.
ERRORS_NOW = {"quiesced", "frozen", "before_commit", "after_commit", "suspend_leave", "store_after_manifest",
              "server_dump_mid", "restore_fetch", "restore_host", "restore_go_on", "server_restore_mid"}  # fmt: skip
KILLS_NOW: dict[str, set[str]] = {
    CHECKPOINT: {"cut", "device", "frozen", "thaw", "before_commit", "store_index_write",
                 "store_after_manifest", "server_cut_parked", "server_dump_mid", "server_shared_mid",
                 "server_resume"},
    SUSPEND: {"after_commit", "suspend_leave"},
    RESUME: {"restore_host"},
    MIGRATE: {"migrate_hand_over", "server_dump_end", "server_restore_mid", "server_resume"},
    RESTORE: {"store_open", "restore_host", "restore_go_on", "server_restore_end"},
}  # fmt: skip


def cases(action: str) -> list[object]:
    return [
        pytest.param(
            Case(point, verb, action),
            id=str(Case(point, verb, action)),
            marks=[pytest.mark.soak] if seldom(point, verb, action) else [],
        )
        for point, verbs in PASSED_BY.items()
        for verb in verbs
    ]


def test_the_table_is_complete() -> None:
    assert set(PASSED_BY) == set(fault.FAULTS) | set(SERVER_POINTS)


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


@pytest.mark.parametrize("case", cases("error"))
def test_error(shared_scene: Scene, case: Case) -> None:
    """The operation fails with a message, or copes; the job goes on; the next try works."""
    scene = shared_scene
    line = prepare(scene, case)
    images = {str(i["id"]) for i in scene.images()}
    scene.arm(f"{case.point}:error")
    done = scene.ctl(*line, check=False)
    fired = scene.fired()
    scene.disarm()
    assert fired, f"{case.point} is not passed by {case.verb}: {done.stdout}{done.stderr}"
    now = {str(i["id"]) for i in scene.images() if i["whole"]}
    assert images & now or case.point == "store_prune"
    if case.point in SUCCEEDS or (case.point == "server_resume" and case.verb not in BACK):
        assert done.returncode == 0, done.stderr
        if case.verb == SUSPEND:
            scene.ctl("resume", "j")
    else:
        assert done.returncode != 0, done.stdout
        scene.check_message(
            done.stderr,
            names=rf"{case.point}|Input/output|EIO",
            state=r"job|nothing of it runs|images that",
        )
        assert bool(now - images) == (case.point in WHOLE), (images, now)
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


@pytest.mark.parametrize("case", cases("kill"))
def test_kill(shared_scene: Scene, case: Case) -> None:
    """Whoever passes the point is killed with -9: S, the detached agent, or a server."""
    scene = shared_scene
    line = prepare(scene, case)
    # A store is opened by the command line first: its end says nothing, and harms nothing.
    nth = ":2" if case.point == "store_open" else ""
    scene.arm(f"{case.point}{nth}:kill")
    done = scene.ctl(*line, check=False)
    fired = scene.fired()
    scene.disarm()
    assert fired, f"{case.point} is not passed by {case.verb}: {done.stdout}{done.stderr}"
    survived = case.verb == RESTORE or scene.phase() != "gone"
    if case.point in KILL_IS_HARMLESS.get(case.verb, ()):
        scene.check_goes_on()
        scene.check_nothing_left()
        return
    assert done.returncode != 0, done.stdout
    scene.check_message(done.stderr, state=r"job|nothing of it runs")
    if survived and case.verb == RESUME and scene.phase() == "suspended":
        scene.ctl(*line)  # the server that was restored into was killed, not S
    else:
        scene.check_restores(scene.latest())
    scene.check_goes_on()
    scene.check_nothing_left()


# A server that is killed here is not the one that the job lives on.
KILL_IS_HARMLESS: dict[str, tuple[str, ...]] = {
    MIGRATE: ("server_restore_start", "server_restore_mid", "server_restore_end"),
}
