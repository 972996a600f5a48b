# SPDX-License-Identifier: Apache-2.0
"""The whole supervisor of a job that was restored detached.

    python -m devproxy.control.agent --restore SPEC.json

SPEC.json, written by devproxyd: {"image", "store", "name" | null, "gpus" | null, "output" | null, "output_stderr" | null,
"strict", ...}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

from devproxy import records, runtime
from devproxy.checkpoint import image
from devproxy.checkpoint.store import Store
from devproxy.control import restore
from devproxy.errors import EXIT_SERVER_LOST, DevproxyError, RestoreError, object_of
from devproxy.log import say
from devproxy.node import burial
from devproxy.proxy import command as cmd
from devproxy.proxy import janitor as janitors


def run_foreground(spec: dict[str, Any]) -> int:
    """Restores a job and is its supervisor until it ends. Returns the exit code; raises DevproxyError."""
    burial.install()
    mask = cmd.block_signals()
    del mask  # the restored processes have their own
    cmd.become_subreaper()
    store = Store.open(spec["store"], reads=True)
    whole = image.load(store, spec["image"])
    folder = restore.make_folder(spec, whole)
    janitor = janitors.start(folder, "")
    try:
        restored = restore.bring_back(spec, store, whole, folder, janitor)
        tree = restored.tree
        try:
            code = tree.wait(lambda: None)
            restored.agent.finish(code)
            if restored.side is not None:
                restored.side.ended(lambda: None)
            lost = tree.servers.lost(folder)
            tree.end(frozenset())
            for process in lost:
                say(f"{process.name} {process.how_it_ended()} while the job ran")
            code = code if code or not lost else EXIT_SERVER_LOST
            records.end(folder.name, code)
            return code
        finally:
            restored.stop()
    finally:
        janitor.dismiss()
        runtime.remove_job(folder)


def main() -> NoReturn:
    """Entry point of a detached agent. Its stdout and stderr are the job's log."""
    if len(sys.argv) != 3 or sys.argv[1] != "--restore":
        say("usage: python -m devproxy.control.agent --restore SPEC.json")
        sys.exit(2)
    try:
        with open(sys.argv[2], encoding="utf-8") as file:
            spec = json.load(file)
        code = run_foreground(spec)
    except (DevproxyError, OSError) as caught:
        error = caught
        if isinstance(error, OSError):
            error = RestoreError(
                "start", f"{type(error).__name__}: {error}", object=object_of(error)
            )
        say(str(error))
        _leave_word(sys.argv[2], error)
        sys.exit(error.exit_code)
    sys.stdout.flush()
    os._exit(code)


def _leave_word(path: str, error: DevproxyError) -> None:
    """For the daemon that started us: why nothing runs."""
    facts = {"error": error.what, "remedy": error.remedy, "exit_code": error.exit_code}
    facts["stage"] = getattr(error, "stage", "restore")
    facts["object"] = object_of(error)
    with open(path + ".failed", "w", encoding="utf-8") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
