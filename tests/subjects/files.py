"""Writes as training jobs do: an append log, sqlite, arrays by rename, event files, a mapped array, truncation, unlink.

At the end each file is read and compared with what must be in it; the digest is over their contents.
"""

import mmap
import os
import sqlite3
import struct
import zlib

import numpy
from common import Digest, Steps, check, options

RECORD_BYTES = 64


def event(step: int) -> bytes:
    """As TensorBoard's event files: length, its checksum, data, its checksum."""
    data = f"step {step} ".encode() * 5
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", zlib.crc32(head)) + data + struct.pack("<I", zlib.crc32(data))


def main() -> None:
    o = options(__doc__, folder="files-out")
    os.makedirs(o.folder, exist_ok=True)

    def at(name: str) -> str:
        return os.path.join(o.folder, name)

    log = open(at("train.log"), "a", buffering=1)
    events = open(at("events.out"), "ab")
    base = sqlite3.connect(at("runs.db"))
    base.execute("pragma journal_mode=wal")
    base.execute("create table if not exists losses (step integer primary key, loss real)")
    base.commit()
    with open(at("mapped.bin"), "w+b") as file:
        file.truncate(RECORD_BYTES * o.steps)
        mapped = mmap.mmap(file.fileno(), 0)
    state = open(at("state.txt"), "w+")
    steps = Steps(o)
    for step in steps:
        log.write(f"step {step}\n")
        events.write(event(step))
        events.flush()
        with base:
            base.execute("insert into losses values (?, ?)", (step, 1 / step))
        numpy.save(at("weights.tmp.npy"), numpy.arange(1000) * step)
        os.replace(at("weights.tmp.npy"), at("weights.npy"))
        mapped[(step - 1) * RECORD_BYTES : step * RECORD_BYTES] = f"{step:<{RECORD_BYTES}}".encode()
        state.seek(0)
        state.truncate()
        state.write(f"at step {step}, {'x' * (step % 7)}")
        state.flush()
        with open(at(f"checkpoint-{step}.txt"), "w") as file:
            file.write(str(step))
        if step > 3:
            os.unlink(at(f"checkpoint-{step - 3}.txt"))
        steps.say()
    mapped.flush()
    with open(at("train.log")) as file:
        check(file.read() == "".join(f"step {i}\n" for i in range(1, o.steps + 1)), "train.log")
    with open(at("events.out"), "rb") as file:
        check(file.read() == b"".join(event(i) for i in range(1, o.steps + 1)), "events.out")
    rows = base.execute("select step, loss from losses order by step").fetchall()
    check(rows == [(i, 1 / i) for i in range(1, o.steps + 1)], "runs.db")
    check(base.execute("pragma integrity_check").fetchone() == ("ok",), "runs.db is damaged")
    base.close()
    digest = Digest()
    for name in sorted(os.listdir(o.folder)):
        if name.startswith("runs.db"):
            continue  # its pages depend on when it was checkpointed by sqlite; the rows are compared
        with open(at(name), "rb") as file:
            digest.add(name, file.read())
    digest.add("rows", rows)
    digest.finish()


if __name__ == "__main__":
    main()
