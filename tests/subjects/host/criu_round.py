# SPDX-License-Identifier: Apache-2.0
"""Run as pid 1 of new PID and mount namespaces by tests/integration/test_files.py: one cut and restore with CRIU.

argv: checkout, CRIU program, library, work folder, job folder. A process writes a database, a log, a mapped file and an open
temporary file; its tree is dumped, the files are taken while it stands, it goes on, is killed, the files are put back, CRIU
restores it, and it must go on where the cut was. Prints one JSON object.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

CHECKOUT, CRIU, LIBRARY, WORK, JOB_DIR = sys.argv[1:]
sys.path.insert(0, CHECKOUT)

from devproxy.checkpoint.files.records import FileEntry  # noqa: E402
from devproxy.checkpoint.files.tracker import FilesTracker  # noqa: E402

CODE = """
import itertools, mmap, os, sqlite3, tempfile, time
log = open("log", "a")
m = open("map", "w+b"); m.truncate(8192); mapped = mmap.mmap(m.fileno(), 8192)
db = sqlite3.connect("x.db", isolation_level=None)
db.execute("pragma journal_mode=wal")
db.execute("create table t(a integer primary key, s text)")
fd, name = tempfile.mkstemp(dir=".")
for i in itertools.count():
    db.execute("insert into t values(?, ?)", (i, "x" * (i % 500)))
    log.write(f"{i}\\n"); log.flush()
    os.write(fd, b"zzzzzzz")
    mapped[:8] = b"%8d" % i
    if i % 50 == 0:
        with open("ck.tmp", "w") as ck: ck.write(str(i))
        os.replace("ck.tmp", "ck")
    time.sleep(0.001)
"""


def lines() -> int:
    with open(os.path.join(WORK, "w", "log")) as file:
        return len(file.readlines())


def criu(verb: str, *options: str) -> int:
    images = os.path.join(WORK, "images")
    common = ["-D", images, "-o", f"{verb}.log", "--shell-job", "--file-locks"]
    return subprocess.run([CRIU, verb, *common, *options], capture_output=True).returncode


def fetch(entry: FileEntry, fd: int) -> None:
    with open(entry.staged, "rb") as source, open(fd, "wb", closefd=False) as target:
        shutil.copyfileobj(source, target)


def main() -> None:
    for name in ("w", "images"):
        os.mkdir(os.path.join(WORK, name))
    null = subprocess.DEVNULL
    job = subprocess.Popen(
        [sys.executable, "-c", CODE],
        cwd=os.path.join(WORK, "w"),
        env=os.environ | {"DEVPROXY_JOB_DIR": JOB_DIR, "LD_PRELOAD": LIBRARY},
        stdin=null,
        stdout=null,
        stderr=null,
        start_new_session=True,
    )
    time.sleep(1.5)
    facts: dict[str, object] = {}
    facts["dump"] = criu("dump", "-t", str(job.pid), "--network-lock", "skip", "--leave-stopped")
    tracker = FilesTracker(JOB_DIR, os.path.join(WORK, "state"))
    entries = tracker.snapshot(os.path.join(WORK, "staging"))
    cut = time.time()
    facts["at_cut"] = lines()
    os.kill(job.pid, signal.SIGCONT)
    time.sleep(0.7)
    job.kill()
    job.wait()
    tracker.note_state(ended=True)
    facts["before_put_back"] = lines()
    said: list[str] = []
    tracker.put_back(entries, fetch, said.append, image_time=cut)
    tracker.adopt(entries)
    facts["after_put_back"] = lines()
    facts["restore"] = criu("restore", "-d")
    time.sleep(1)
    os.kill(job.pid, signal.SIGKILL)
    time.sleep(0.3)
    with open(os.path.join(WORK, "w", "log")) as file:
        steps = [int(line) for line in file]
    facts["steps_in_order"] = steps == list(range(len(steps)))
    facts["at_end"] = len(steps)
    db = sqlite3.connect(os.path.join(WORK, "w", "x.db"))
    facts["integrity"] = db.execute("pragma integrity_check").fetchone()[0]
    facts["rows"], facts["last_row"] = db.execute("select count(*), max(a) from t").fetchone()
    facts["said"] = said
    facts["journal_after_restore"] = os.path.exists(os.path.join(JOB_DIR, "files.journal"))
    print(json.dumps(facts))


main()
