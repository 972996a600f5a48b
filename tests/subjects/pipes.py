# SPDX-License-Identifier: Apache-2.0
"""Pipes, socket pairs, deleted-but-open files, POSIX shared memory, a memfd, a child at a pipe, multiprocessing, FIFOs."""

import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory

from common import Digest, Steps, check, options

CHILD = """
import sys
total = 0
for line in sys.stdin:
    total += int(line)
    print(total, flush=True)
"""


def squares(questions, answers) -> None:
    while (number := questions.get()) is not None:
        answers.put((os.getpid(), number * number))


def main() -> None:
    o = options(__doc__)
    read_end, write_end = os.pipe()
    near, far = socket.socketpair()
    packets_in, packets_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    deleted = tempfile.TemporaryFile()
    shm = shared_memory.SharedMemory(create=True, size=4096)
    memfd = os.memfd_create("subject")
    os.ftruncate(memfd, 4096)
    mapped = mmap.mmap(memfd, 4096)
    folder = tempfile.mkdtemp()
    fifo_path = os.path.join(folder, "fifo")
    os.mkfifo(fifo_path)
    fifo = os.open(fifo_path, os.O_RDWR)
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout
    fork = multiprocessing.get_context("fork")
    questions, answers = fork.Queue(), fork.Queue()
    worker = fork.Process(target=squares, args=(questions, answers))
    worker.start()
    # One record stays in each channel from step to step, so that there is something inside at any moment.
    os.write(write_end, b"%8d" % 0)
    far.sendall(b"%8d" % 0)
    packets_out.send(b"%8d" % 0)
    os.write(fifo, b"%8d" % 0)
    total, seen = 0, []
    steps = Steps(o)
    for step in steps:
        record, before = b"%8d" % step, b"%8d" % (step - 1)
        os.write(write_end, record)
        check(os.read(read_end, 8) == before, "pipe")
        far.sendall(record)
        check(near.recv(8) == before, "socketpair")
        packets_out.send(record)
        check(packets_in.recv(100) == before, "datagram pair")
        os.write(fifo, record)
        check(os.read(fifo, 8) == before, "FIFO")
        deleted.write(record)
        deleted.flush()
        check(os.pread(deleted.fileno(), 8, 8 * (step - 1)) == record, "deleted file")
        check(step == 1 or bytes(shm.buf[:8]) == before, "shared memory")
        shm.buf[:8] = record
        check(step == 1 or mapped[:8] == before, "memfd")
        mapped[:8] = record
        total += step
        print(step, file=child.stdin, flush=True)
        check(child.stdout.readline() == f"{total}\n", "child at a pipe")
        check(child.poll() is None, "child has ended")
        questions.put(step)
        check(answers.get(timeout=600) == (worker.pid, step * step), "multiprocessing")
        seen.append(total)
        steps.say(f"total {total}")
    questions.put(None)
    worker.join()
    child.stdin.close()
    check(child.wait() == 0 and worker.exitcode == 0, "exit codes of the children")
    deleted.seek(0)
    digest = Digest()
    digest.add("deleted", deleted.read())
    digest.add("seen", seen)
    digest.add("shm", bytes(shm.buf[:4096]))
    shm.close()
    shm.unlink()
    os.unlink(fifo_path)
    os.rmdir(folder)
    digest.finish()


if __name__ == "__main__":
    main()
