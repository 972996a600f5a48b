# SPDX-License-Identifier: Apache-2.0
"""Reading: from the chunks of an image to files and buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import IO, NamedTuple

from devproxy import fault
from devproxy.checkpoint import packs
from devproxy.checkpoint.backend import named
from devproxy.checkpoint.chunker import MIB, ZERO, ChunkRef, decompress, digest
from devproxy.checkpoint.errors import ChunkError, DamagedChunk, MissingChunk, StoreError
from devproxy.checkpoint.packs import Location
from devproxy.checkpoint.shelf import Shelf

_READERS = 4  # two that compute while two wait for the disk
_READ_BYTES = 4 * MIB  # one request: neighbours in a pack are read together
_Put = Callable[[int, bytes | memoryview], None]


class _Wanted(NamedTuple):
    """A chunk on its way to its place. name: of the part that it belongs to, for errors."""

    digest: bytes
    bytes: int
    offset: int
    put: _Put
    name: str


@dataclass
class Examined:
    """What a look at chunks has found. packs: those that they were read from."""

    stored_bytes: dict[str, int] = field(default_factory=dict)  # by chunk; 0 where it has no place
    wrong: dict[str, ChunkError] = field(default_factory=dict)  # by chunk
    packs: set[str] = field(default_factory=set)


class Reader(Shelf):
    """Every chunk's hash is checked before its bytes are used."""

    def fetch_file(
        self,
        refs: Iterable[ChunkRef],
        to: str | int | IO[bytes],
        *,
        name: str = "",
        older: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes the chunks one after another to a path (made 0600, or truncated), a descriptor of an empty file, or a
        file object; the bytes.

        Every chunk's hash is checked before its bytes are used. Raises MissingChunk and DamagedChunk with `name` as
        the object and `older` as the image to use instead, StoreError, and OSError of the target. What was written
        until then stays: the caller's file is no good.
        """
        wanted = list(refs)
        if isinstance(to, str | int):
            return self.fetch_files([(wanted, to, name)], older=older, progress=progress)
        self._fetch_in_order(wanted, to, name, older, progress)
        return sum(size for _, size in wanted)

    def fetch_files(
        self,
        files: Iterable[tuple[Iterable[ChunkRef], str | int, str]],
        *,
        older: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """fetch_file for many at once: (refs, path or descriptor, name) each. Read in the order of the packs. The bytes of all."""
        fds: list[int] = []
        parts: list[tuple[list[ChunkRef], _Put, str]] = []
        total = 0
        try:
            for refs, path, name in files:
                wanted = list(refs)
                size = sum(size for _, size in wanted)
                if isinstance(path, str):
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                    fds.append(fd)
                else:
                    fd = path
                os.ftruncate(fd, size)  # zero chunks stay holes
                parts.append((wanted, partial(_write_at, fd), name))
                total += size
            self._fetch_parts(parts, older, progress)
        finally:
            for fd in fds:
                os.close(fd)
        return total

    def fetch_into(
        self,
        refs: Iterable[ChunkRef],
        target: memoryview,
        *,
        name: str = "",
        older: str | None = None,
    ) -> int:
        """Fills a writable buffer, zeros included; the bytes. Raises as fetch_file, and ValueError if it is too small."""
        wanted = list(refs)
        total = sum(size for _, size in wanted)
        view = target.cast("B")
        if total > len(view):
            raise ValueError(f"{total} bytes do not fit into {len(view)}")

        def put(offset: int, data: bytes | memoryview) -> None:
            view[offset : offset + len(data)] = data

        offset = 0
        for chunk, size in wanted:
            if chunk == ZERO:
                for start in range(offset, offset + size, MIB):
                    end = min(start + MIB, offset + size)
                    view[start:end] = bytes(end - start)
            offset += size
        self._fetch(wanted, put, name, older)
        return total

    def fetch_bytes(
        self, refs: Iterable[ChunkRef], *, name: str = "", older: str | None = None
    ) -> bytes:
        wanted = list(refs)
        data = bytearray(sum(size for _, size in wanted))
        self.fetch_into(wanted, memoryview(data), name=name, older=older)
        return bytes(data)

    def examine(self, refs: Iterable[ChunkRef], found: Examined) -> None:
        """Reads each chunk that is not in `found` yet, and keeps nothing. Damage goes into `found`; raises StoreError.

        The notes of damaged packs say afterwards what was found.
        """
        noted = self.noted_chunks()
        wanted: list[_Wanted] = []
        for chunk, size in dict.fromkeys(refs):
            if chunk == ZERO or chunk in found.stored_bytes:
                continue
            found.stored_bytes[chunk] = 0
            try:
                wanted.append(_Wanted(digest_of(chunk), size, 0, _nowhere, ""))
            except ChunkError as error:
                found.wrong[chunk] = error
        self._know(wanted)
        placed: list[tuple[_Wanted, Location]] = []
        for one in wanted:
            try:
                where = self._place(one, None)
            except ChunkError as error:
                found.wrong[one.digest.hex()] = error
                continue
            placed.append((one, where))
            found.stored_bytes[one.digest.hex()] = where.stored_bytes
            found.packs.add(where.pack)
        runs = _runs(placed)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="devproxy-examine") as pool:
            futures = [pool.submit(self._examine_run, run) for run in runs]
            failed: set[tuple[str, bytes]] = set()
            try:
                for future in futures:
                    wrong, bad = future.result()
                    found.wrong.update(wrong)
                    failed |= bad
            finally:
                for future in futures:
                    future.cancel()
        again = {(at.pack, c.digest) for c, at in placed if c.digest in noted.get(at.pack, ())}
        self.keep_notes(again - failed)

    def _examine_run(
        self, run: list[tuple[_Wanted, Location]]
    ) -> tuple[dict[str, ChunkError], set[tuple[str, bytes]]]:
        """What is wrong, by chunk; and what is not good in that pack, be it good in another or not."""
        wrong: dict[str, ChunkError] = {}
        bad: set[tuple[str, bytes]] = set()
        for chunk, where in self._take_run(run):
            bad.add((where.pack, chunk.digest))
            name = chunk.digest.hex()
            if where.pack in self.damaged and self.lookup().get(chunk.digest) == [where]:
                wrong[name] = DamagedChunk(name, pack=where.pack)
                continue
            try:
                self._read_elsewhere(chunk.digest, chunk.bytes, where)
            except ChunkError as error:
                wrong[name] = error
        return wrong, bad

    def _fetch_in_order(
        self,
        wanted: list[ChunkRef],
        to: IO[bytes],
        name: str,
        older: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        group: list[ChunkRef] = []
        size = 0
        for number, ref in enumerate(wanted):
            group.append(ref)
            size += ref[1]
            if size >= 4 * _READ_BYTES or number == len(wanted) - 1:
                to.write(self.fetch_bytes(group, name=name, older=older))
                if progress:
                    progress(size)
                group, size = [], 0

    def _fetch(
        self,
        refs: Iterable[ChunkRef],
        put: _Put,
        name: str = "",
        older: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """put(offset, data) is called from several threads, for all that is not zero, in pieces of any size and order."""
        self._fetch_parts([(refs, put, name)], older, progress)

    def _fetch_parts(
        self,
        parts: Iterable[tuple[Iterable[ChunkRef], _Put, str]],
        older: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Several _fetch with one pool. The memory that put is given is good until it returns."""
        wanted: list[_Wanted] = []
        for refs, put, name in parts:
            offset = 0
            for chunk, size in refs:
                if chunk != ZERO:
                    wanted.append(
                        _Wanted(_named_digest(chunk, name, older), size, offset, put, name)
                    )
                offset += size
        if not wanted:
            return
        runs = _runs(list(zip(wanted, self._places(wanted, older), strict=True)))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="devproxy-fetch") as pool:
            futures: list[Future[int]] = [pool.submit(self._read_run, run, older) for run in runs]
            try:
                for future in futures:
                    done = future.result()
                    if progress:
                        progress(done)
            finally:
                for future in futures:
                    future.cancel()

    def _places(self, wanted: list[_Wanted], older: str | None) -> list[Location]:
        self._know(wanted)
        return [self._place(chunk, older) for chunk in wanted]

    def _know(self, wanted: list[_Wanted]) -> None:
        merged = self.lookup()
        if any(chunk.digest not in merged for chunk in wanted):
            self.refresh()  # written since by another process

    def _place(self, chunk: _Wanted, older: str | None) -> Location:
        """As of the last refresh."""
        options = self.lookup().get(chunk.digest)
        if not options:
            why = self.why_missing()
            raise MissingChunk(chunk.digest.hex(), why=why).about(chunk.name, older)
        # An index may claim anything: one that names another size does not stand in the way of a good one.
        right = next((where for where in options if where.raw_bytes == chunk.bytes), None)
        if right is None:
            error = DamagedChunk(chunk.digest.hex(), pack=options[0].pack)
            raise error.about(chunk.name, older)
        return right

    def _read_run(self, run: list[tuple[_Wanted, Location]], older: str | None) -> int:
        """Reads neighbours of one pack, checks each, hands them on. Raw bytes handled."""
        # Behind the others: reading again takes the buffer that they lie in.
        for chunk, where in self._take_run(run):
            try:
                chunk.put(chunk.offset, self._read_elsewhere(chunk.digest, chunk.bytes, where))
            except ChunkError as error:
                raise error.about(chunk.name, older) from None
        return sum(chunk.bytes for chunk, _ in run)

    def _take_run(self, run: list[tuple[_Wanted, Location]]) -> list[tuple[_Wanted, Location]]:
        """Reads neighbours with one request, and hands on those that are good. The others."""
        first, last = run[0][1], run[-1][1]
        start, end = first.offset, last.offset + last.stored_bytes
        with named("read a chunk", f"{packs.pack_name(first.pack)} in store {self.url}"):
            fault.point("store_read_chunk")
            there = True
            try:
                data = self.backend.view_range(packs.pack_name(first.pack), start, end - start)
            except FileNotFoundError:
                data, there = memoryview(b""), False  # repacked, or lost: the other places decide
            except StoreError as error:
                if not self.backend.has_lost(error):
                    raise
                if len(run) > 1:  # a sector of it: the others are good
                    return [row for one in run for row in self._take_run([one])]
                data = memoryview(b"")
        bad: list[tuple[_Wanted, Location]] = []
        put: _Put = _nowhere
        to = begin = stop = 0  # raw neighbours that are good and not handed on yet
        for chunk, where in run:
            at = where.offset - start
            body = data[at : at + where.stored_bytes]
            whole = len(body) == where.stored_bytes
            raw = decompress(where.codec, body, chunk.bytes) if whole else None
            if raw is None or digest(raw) != chunk.digest:
                bad.append((chunk, where))
            elif raw is not body:
                chunk.put(chunk.offset, raw)
            elif chunk.put is put and at == stop and chunk.offset == to + stop - begin:
                stop += chunk.bytes
            else:
                put(to, data[begin:stop])
                put, to, begin, stop = chunk.put, chunk.offset, at, at + chunk.bytes
        put(to, data[begin:stop])
        if bad and there:
            self.note_damage(first.pack, *(chunk.digest for chunk, _ in bad))
        return bad

    def _read_elsewhere(self, hashed: bytes, size: int, bad: Location) -> bytes | memoryview:
        """Another copy of the chunk, in another pack. Raises DamagedChunk or MissingChunk."""
        self.refresh()
        for where in self.lookup().get(hashed, []):
            if where == bad:
                continue
            body = self.read_chunk(hashed, where)
            raw = None if body is None else decompress(where.codec, body, size)
            if raw is not None:
                return raw
        if bad.pack not in self.damaged:
            raise MissingChunk(hashed.hex(), why=f"pack {bad.pack} is not there")
        raise DamagedChunk(hashed.hex(), pack=bad.pack)


def digest_of(chunk: str) -> bytes:
    try:
        hashed = bytes.fromhex(chunk)
    except ValueError:
        hashed = b""
    if len(hashed) != 32:
        raise MissingChunk(chunk, why="its name is no hash")
    return hashed


def _named_digest(chunk: str, name: str, older: str | None) -> bytes:
    try:
        return digest_of(chunk)
    except ChunkError as error:
        raise error.about(name, older) from None


def _nowhere(offset: int, data: bytes | memoryview) -> None:
    del offset, data


def _write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _runs(placed: list[tuple[_Wanted, Location]]) -> list[list[tuple[_Wanted, Location]]]:
    """Groups chunks that lie side by side in a pack, up to a request's size."""
    rows = sorted(placed, key=lambda row: (row[1].pack, row[1].offset))
    runs: list[list[tuple[_Wanted, Location]]] = []
    for row in rows:
        where = row[1]
        if runs:
            first, last = runs[-1][0][1], runs[-1][-1][1]
            near = last.pack == where.pack and where.offset <= last.offset + last.stored_bytes
            # The same chunk twice, as a run of equal pages has it, is read once.
            if near and where.offset + where.stored_bytes - first.offset <= _READ_BYTES:
                runs[-1].append(row)
                continue
        runs.append([row])
    return runs
