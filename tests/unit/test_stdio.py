# SPDX-License-Identifier: Apache-2.0
"""The relay of a job's output: each byte once, also those that are in the FIFO when the job is frozen."""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devproxy.node import transcript
from devproxy.node.stdio import Stdio


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def opened(folder: Path, name: str, fds: tuple[int, int, int], earlier: object = None) -> Stdio:
    job = folder / name
    job.mkdir()
    stdio = Stdio(str(job), fds)
    stdio.open(earlier)  # type: ignore[arg-type]
    return stdio


def take(fd: int) -> bytes:
    """What arrives within 5 s; nothing is an error, not a hang."""
    assert select.select([fd], [], [], 5.0)[0], "nothing was relayed"
    return os.read(fd, 65536)


def test_bytes_in_the_fifo_at_the_freeze_are_in_the_image_and_arrive_once(folder: Path) -> None:
    """The relay read for the last time before the job was frozen, and the job wrote between the two."""
    null = os.open(os.devnull, os.O_RDWR)
    read_end, write_end = os.pipe()
    first = opened(folder, "first", (null, write_end, null))
    (output,) = first.outputs
    job = os.open(output.path, os.O_WRONLY)
    first.start()
    os.write(job, b"relayed ")
    assert take(read_end) == b"relayed "
    output.pause()  # its thread reads nothing from here on
    os.write(job, b"left in the fifo")
    facts = first.describe()
    assert facts["outputs"][0]["delivered"] == len(b"relayed ")

    second = opened(folder, "second", (null, write_end, null), facts)
    second.start()
    assert take(read_end) == b"left in the fifo"
    # What was stored is not relayed once more when the first job goes on beside its image.
    first.go_on()
    assert take(read_end) == b"left in the fifo"
    os.set_blocking(read_end, False)
    for stdio in (first, second):
        os.close(os.open(stdio.outputs[0].path, os.O_WRONLY))
        stdio.finish(2.0)
    with pytest.raises(BlockingIOError):
        os.read(read_end, 100)
    for fd in (null, read_end, write_end, job):
        os.close(fd)


def test_a_stream_that_nobody_reads_is_stored_whole(folder: Path) -> None:
    """Our side takes nothing: what the relay had read and what is in the FIFO are both in the image, in order."""
    null = os.open(os.devnull, os.O_RDWR)
    read_end, write_end = os.pipe()
    first = opened(folder, "first", (null, write_end, null))
    (output,) = first.outputs
    job = os.open(output.path, os.O_WRONLY | os.O_NONBLOCK)
    first.start()
    text = b"".join(b"%07d\n" % n for n in range(60_000))
    sent = 0
    while sent < len(text):
        try:
            sent += os.write(job, text[sent : sent + 65536])
        except BlockingIOError:
            break
    facts = first.describe()
    second = opened(folder, "second", (null, write_end, null), facts)
    second.start()
    got = b""
    while len(got) < sent:
        got += take(read_end)
    assert got == text[:sent]
    for fd in (null, job):
        os.close(fd)


def test_what_a_restore_says_that_is_undone_is_said_once(folder: Path) -> None:
    """Its processes ran for a moment. The next ones write the same again."""
    null = os.open(os.devnull, os.O_RDWR)
    read_end, write_end = os.pipe()
    stdio = opened(folder, "job", (null, write_end, null))
    (output,) = stdio.outputs
    stdio.start()
    for undone in (True, False):
        stdio.hold()
        job = os.open(output.path, os.O_WRONLY)
        os.write(job, b"step 7\n")
        os.close(job)
        if undone:
            stdio.drop()
            assert not select.select([read_end], [], [], 0.2)[0]
        else:
            stdio.restored()
            assert take(read_end) == b"step 7\n"
    stdio.finish(2.0)
    assert not select.select([read_end], [], [], 0)[0]
    for fd in (null, read_end, write_end):
        os.close(fd)


def test_what_a_job_says_is_kept_beside_wherever_it_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "LIMIT_BYTES", 1000)
    log = folder / "j.log"
    log.write_text("of an earlier job")
    null = os.open(os.devnull, os.O_RDWR)
    read_end, write_end = os.pipe()
    job_dir = folder / "job"
    job_dir.mkdir()
    stdio = Stdio(str(job_dir), (null, write_end, null), str(log))
    stdio.open()
    job = os.open(stdio.outputs[0].path, os.O_WRONLY)
    stdio.start()
    os.write(job, b"a" * 1200)
    assert take(read_end) == b"a" * 1200
    os.write(job, b"and more")
    assert take(read_end) == b"and more"
    os.close(job)
    stdio.finish(2.0)
    assert (log.with_suffix(".log.1")).read_bytes() == b"a" * 1200
    assert log.read_bytes() == b"and more"
    assert log.stat().st_mode & 0o777 == 0o600


def test_output_that_goes_to_the_log_itself_is_not_written_twice(folder: Path) -> None:
    log = folder / "j.log"
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    job_dir = folder / "job"
    job_dir.mkdir()
    stdio = Stdio(str(job_dir), (null, out, null), str(log))
    earlier = {"modes": ["null", "fifo:stdout.fifo", "null"], "outputs": []}
    stdio.open(earlier)  # a restored job, whose agent's stdout is the log
    job = os.open(stdio.outputs[0].path, os.O_WRONLY)
    stdio.start()
    os.write(job, b"once")
    os.close(job)
    stdio.finish(2.0)
    assert log.read_bytes() == b"once"


def test_the_transcript_goes_on_where_the_image_was_taken(folder: Path) -> None:
    path = folder / "j.log"
    first = transcript.Transcript(str(path), fresh=True)
    first.write(b"1 2 3 ")
    place = first.place()
    assert place is not None
    first.write(b"4 5 ")
    again = transcript.Transcript(str(path), fresh=False)
    with open(path, "ab") as agent:  # its stdout, where nobody named a file
        agent.write(b"[restored] ")
    again.cut_back(place)
    again.write(b"4 5 6")
    assert path.read_bytes() == b"1 2 3 [restored] 4 5 6"
    again.cut_back({"inode": 0, "bytes": 1})  # of another file
    assert path.read_bytes() == b"1 2 3 [restored] 4 5 6"
