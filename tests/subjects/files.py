# SPDX-License-Identifier: Apache-2.0
"""Writes as training jobs do: an append log, sqlite, arrays by rename, TensorBoard's event files, a mapped array,
truncation, unlink.

At the end each file is read and compared with what must be in it; the digest is over their contents.
"""

import mmap
import os
import sqlite3
import time
import warnings

import numpy
from common import Digest, Steps, check, options

warnings.simplefilter("ignore")  # of TensorBoard's imports
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # noqa: E402
from tensorboard.compat.proto.event_pb2 import Event  # noqa: E402
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

RECORD_BYTES = 64


def scalars(folder: str) -> list[tuple[int, float]]:
    """(step, loss) of all event files, as TensorBoard's own reader gives them: it checks each record's checksum."""
    found = []
    for name in sorted(os.listdir(folder)):
        for event in EventFileLoader(os.path.join(folder, name)).Load():
            found += [(event.step, v.tensor.float_val[0]) for v in event.summary.value]
    return found


def main() -> None:
    o = options(__doc__, folder="files-out")
    os.makedirs(o.folder, exist_ok=True)

    def at(name: str) -> str:
        return os.path.join(o.folder, name)

    log = open(at("train.log"), "a", buffering=1)
    # What torch.utils.tensorboard's SummaryWriter writes through, with a thread of its own; torch itself would only be
    # a quarter of a gigabyte in each image.
    events = EventFileWriter(at("events"))
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
        loss = Summary(value=[Summary.Value(tag="loss", simple_value=step / 4)])
        events.add_event(Event(wall_time=time.time(), step=step, summary=loss))
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
    events.close()
    seen = scalars(at("events"))
    check(seen == [(i, i / 4) for i in range(1, o.steps + 1)], f"the event files hold {seen}")
    check(len(os.listdir(at("events"))) == 1, "there is another event file")
    rows = base.execute("select step, loss from losses order by step").fetchall()
    check(rows == [(i, 1 / i) for i in range(1, o.steps + 1)], "runs.db")
    check(base.execute("pragma integrity_check").fetchone() == ("ok",), "runs.db is damaged")
    base.close()
    digest = Digest()
    for name in sorted(os.listdir(o.folder)):
        if name == "events":
            continue  # names and records hold times; the scalars are compared
        if name.startswith("runs.db"):
            continue  # its pages depend on when it was checkpointed by sqlite; the rows are compared
        with open(at(name), "rb") as file:
            digest.add(name, file.read())
    digest.add("rows", rows)
    digest.add("events", seen)
    digest.finish()


if __name__ == "__main__":
    main()
