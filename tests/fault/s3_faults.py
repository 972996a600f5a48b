# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `s3-faults`: a store on S3 behind a forwarder that spoils requests, and a model beside it.

The seed gives the program and the faults. A program saves, loads, lists, verifies, prunes and removes images, collects
garbage and takes epochs, by several open stores; some uploads stay open while others work, and some operations run side
by side. After each operation a store that does not go through the forwarder compares everything with the model. An
operation succeeds or raises a StoreError; without a harmful fault it succeeds. A commit that raised has left a whole
image or none.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import logging
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from botocore.retries.standard import ExponentialBackoff  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

from devproxy.checkpoint import object_backend
from devproxy.checkpoint import writer as writers
from devproxy.checkpoint.chunker import KIB
from devproxy.checkpoint.errors import StaleJob, StoreError, UploadLost
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.errors import Refused
from tests.fault.store_programs import load, side_by_side

BUCKET = "images"
BLOCK = 64 * KIB  # one chunk
JOBS = ("a", "b")
OPERATIONS = 16
SHARES = {
    "save": 6,
    "begin": 3,
    "commit": 3,
    "abort": 0.5,
    "load": 2,
    "verify": 1,
    "list": 1,
    "remove": 1.5,
    "prune": 2,
    "gc": 3,
    "epoch": 1,
    "open": 1.5,
}
HANG_S = 120.0  # of one operation: hundreds of requests, each with its limit
ANSWER_S = 3.0
LATE_S = 3.5  # an answer that comes after the client has given it up

# Those that a client may not survive, and those that it must survive.
HARMFUL = (
    *("reset", "answer_lost", "error_500", "error_500_done", "slow_down", "cut_short"),
    "late",
)
FAULTS = (*HARMFUL, "delayed", "twice")
WEIGHTS = (4, 5, 2, 3, 2, 3, 0.1, 2, 3)
SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
INTERNAL = (
    b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
)
HOPS = ("connection", "transfer-encoding", "content-length", "expect", "keep-alive")


# ---- the server and what stands in front of it ----


@functools.cache
def server() -> tuple[str, int]:
    """One for all runs of the process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    return host, port


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


def ask(method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Answer:
    connection = http.client.HTTPConnection(*server(), timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.getheaders(), response.read())
    finally:
        connection.close()


@dataclass(frozen=True)
class Weather:
    """What becomes of the requests from now on. share: of them is spoiled. Or a row of them, after some good ones."""

    share: float = 0.0
    good_first: int = 0
    row: int = 0
    kinds: tuple[str, ...] = ()  # of the row; else any


CALM = Weather()


class Forwarder(ThreadingHTTPServer):
    """Takes requests on 127.0.0.1, and hands them on one after another: the order of the store's objects is theirs."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, dice: random.Random) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: Counter[str] = Counter()
        self.requests = 0
        self._dice, self._weather, self._since = dice, CALM, 0
        self._mu = threading.Lock()
        self._one = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def harm(self) -> int:
        with self._mu:
            return sum(self.faults[kind] for kind in HARMFUL)

    def turn(self, weather: Weather) -> None:
        with self._mu:
            self._weather, self._since = weather, 0

    def choose(self) -> tuple[str, float]:
        """The fault of the next request, "" for none, and a number for its details."""
        with self._mu:
            weather, number = self._weather, self._since
            self._since += 1
            self.requests += 1
            kind = ""
            if weather.row:
                if 0 <= number - weather.good_first < weather.row:
                    kind = self._dice.choice(weather.kinds or FAULTS)
            elif self._dice.random() < weather.share:
                kind = self._dice.choices(FAULTS, WEIGHTS)[0]
            self.faults[kind] += bool(kind)
            return kind, self._dice.random()

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._one:
            return ask(method, path, headers, body)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._mu:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._mu:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        with self._mu:
            left = list(self._open)
        for one in left:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Forwarder

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOPS}
        kind, number = self.server.choose()
        if kind == "reset":
            self._hang_up(number < 0.7)
            return
        if kind in ("error_500", "slow_down"):
            status, text = (500, INTERNAL) if kind == "error_500" else (503, SLOW_DOWN)
            self._answer(Answer(status, [("Content-Type", "application/xml")], text))
            return
        answer = self.server.ask(self.command, self.path, headers, body)
        if kind == "twice":
            second = self.server.ask(self.command, self.path, headers, body)
            answer = second if number < 0.5 else answer
        elif kind == "error_500_done":
            answer = Answer(500, [("Content-Type", "application/xml")], INTERNAL)
        elif kind == "delayed":
            time.sleep(0.1 * number)
        elif kind == "late":
            time.sleep(LATE_S)
        if kind == "answer_lost" or (kind == "cut_short" and not answer.body):
            self._hang_up(number < 0.7)
        elif kind == "cut_short":
            self._answer(answer, int(len(answer.body) * number))
            self._hang_up(number < 0.3)
        else:
            self._answer(answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def _answer(self, answer: Answer, most: int | None = None) -> None:
        length = str(len(answer.body))
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:most])

    def _hang_up(self, hard: bool) -> None:
        """hard: by a reset; else as if it had ended."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            if hard:
                off = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)
                os.close(self.connection.detach())
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


# ---- the model ----


@dataclass
class Wish:
    """An image as it is to be. sure: it is there; else it is there or not. torn: it may be there and not whole."""

    data: bytes
    job: str
    epoch: int
    sequence: int
    sure: bool = False
    torn: bool = False


@dataclass
class Upload:
    """doomed: a gc may have taken it for dead."""

    image: str
    wish: Wish
    carried: list[Any]  # chunks that an older image has, and that nobody puts again
    harm: int
    writer: Writer | None = None
    chunks: list[Any] = field(default_factory=list)
    put: int = 0  # bytes of the data
    doomed: bool = False


@dataclass(frozen=True)
class Op:
    """work() runs in a thread of its own; done(value, error, harmed) then says what the model makes of it."""

    name: str
    work: Callable[[], Any]
    done: Callable[[Any, StoreError | None, bool], None]
    job: str = ""
    upload: Upload | None = None
    deadly: bool = False  # it takes every upload for dead


class Program:
    def __init__(self, seed: int, url: str, forwarder: Forwarder) -> None:
        self.dice = random.Random(seed)
        self.url, self.forwarder = url, forwarder
        self.figures: Counter[str] = Counter()
        self.images: dict[str, Wish] = {}
        self.uploads: list[Upload] = []
        self.epochs: dict[str, list[int]] = {job: [] for job in JOBS}
        self.sequences: Counter[tuple[str, int]] = Counter()
        self.failed: list[tuple[str, Wish]] = []
        self.blocks = [self.dice.randbytes(BLOCK) for _ in range(8)] + [bytes(BLOCK)]
        self.serial = 0
        self.log: list[str] = []
        self.attempts = self.dice.choice([1, 2, 3, 3])
        self.calm = self.open(calm=True)
        for job in JOBS:
            self.epochs[job].append(self.calm.take_epoch(job))
        self.stores = [self.open() for _ in range(2)]

    def open(self, calm: bool = False, below: str = "") -> Store:
        host, port = server()
        endpoint = f"http://{host}:{port}" if calm else self.forwarder.url
        env = {"AWS_ENDPOINT_URL": endpoint, "AWS_MAX_ATTEMPTS": str(self.attempts)}
        with mock.patch.dict(os.environ, env):
            return Store.open(self.url + below)

    def harmed(self, before: int) -> bool:
        """Whether an operation may fail. One fault alone is borne where requests are tried again."""
        return self.forwarder.harm - before > (self.attempts > 1)

    # ---- operations ----

    def weather(self) -> Weather:
        dice = self.dice
        first, kind = int(dice.expovariate(0.1)), (dice.choice(HARMFUL[:-1]),)
        return dice.choices(
            [
                CALM,
                Weather(share=0.05),
                Weather(share=0.25),
                Weather(share=0.7),
                Weather(good_first=first, row=1),
                Weather(good_first=first, row=dice.choice([6, 8, 12]), kinds=kind),
                Weather(good_first=first, row=1000, kinds=kind),
            ],
            (3, 2, 3, 1, 3, 3, 2),
        )[0]

    def store(self) -> Store:
        return self.dice.choice(self.stores)

    def sure(self) -> list[str]:
        return [image for image, wish in self.images.items() if wish.sure]

    def begin(self, fresh: bool) -> Upload:
        """fresh: no second try of an image."""
        dice = self.dice
        self.serial += 1
        if self.failed and not fresh and dice.random() < 0.4:
            image, wish = self.failed.pop()
            return Upload(image, wish, [], self.forwarder.harm)
        job = dice.choice(JOBS)
        newest = self.calm.epoch(job)
        epoch = max(1, newest - (dice.random() < 0.08))
        self.sequences[job, epoch] += 1
        blocks = dice.choices(self.blocks, k=dice.randint(0, 4))
        blocks += [dice.randbytes(dice.choice([BLOCK, 1000])) for _ in range(dice.randint(0, 2))]
        data = b"".join(blocks)
        carried: list[Any] = []
        mine = [image for image in self.sure() if self.images[image].job == job]
        if mine and dice.random() < 0.3:
            older = dice.choice(mine)
            carried = self.calm.read_manifest(older)["data"]["chunks"]
            data = self.images[older].data + data
        wish = Wish(data, job, epoch, self.sequences[job, epoch])
        put = sum(size for _, size in carried)
        return Upload(f"i{self.serial}", wish, carried, self.forwarder.harm, put=put)

    def commit(self, upload: Upload) -> None:
        assert upload.writer is not None
        wish = upload.wish
        rest = upload.writer.put_bytes(wish.data[upload.put :], kind="host")
        data = {"name": "the data", "chunks": [*upload.carried, *upload.chunks, *rest]}
        body = {"job": wish.job, "job_id": wish.job, "epoch": wish.epoch, "data": data}
        created = float(sum(upload.image.encode()) * 7919 % 1000)  # no order
        upload.writer.commit({**body, "sequence": wish.sequence, "created": created})

    def committed(
        self, upload: Upload, newest: int, error: StoreError | None, harmed: bool
    ) -> None:
        """newest: the epoch of the job when the commit began."""
        wish = upload.wish
        if error is None:
            assert wish.epoch >= newest, f"{upload.image} of a stale job was committed"
            wish.sure = True
            self.images[upload.image] = wish
            return
        stale = wish.epoch < self.calm.epoch(wish.job)
        lost = upload.doomed and isinstance(error, UploadLost)
        assert harmed or stale or lost, f"{upload.image} failed without a fault: {error}"
        assert stale or not isinstance(error, StaleJob), error
        self.figures["stale"] += isinstance(error, StaleJob)
        self.figures["lost"] += isinstance(error, UploadLost)
        if wish.epoch < newest:
            return  # it must not be there
        wish.torn |= upload.doomed
        wish.sure = False
        self.images.setdefault(upload.image, wish)
        self.failed.append((upload.image, wish))

    def op_save(self, fresh: bool = False) -> Op:
        upload = self.begin(fresh)
        store, newest = self.store(), self.calm.epoch(upload.wish.job)
        there = upload.image in self.images

        def work() -> bool:
            try:
                upload.writer = store.writer(upload.image)
            except Refused:
                return False
            with upload.writer:
                self.commit(upload)
            return True

        def done(made: bool | None, error: StoreError | None, harmed: bool) -> None:
            if made is False or (there and error is not None):
                assert there, f"{upload.image} is not in the store, and was refused"
                return
            assert not there, f"{upload.image} is there, and was saved again"
            self.committed(upload, newest, error, harmed)

        return Op("save", work, done, upload.wish.job, upload)

    def op_begin(self) -> Op:
        if len(self.uploads) >= 2:
            return self.op_commit()
        upload, store = self.begin(fresh=False), self.store()
        half = len(upload.wish.data[upload.put :]) // (2 * BLOCK) * BLOCK

        def work() -> bool:
            try:
                upload.writer = store.writer(upload.image)
            except Refused:
                return False
            try:
                data = upload.wish.data[upload.put : upload.put + half]
                upload.chunks = upload.writer.put_bytes(data, kind="host")
            except BaseException:
                upload.writer.abort()
                raise
            upload.put += half
            return True

        def done(made: bool | None, error: StoreError | None, harmed: bool) -> None:
            if made is False:
                assert upload.image in self.images, f"{upload.image} was refused"
            elif error is None:
                self.uploads.append(upload)
            else:
                assert harmed, f"begin of {upload.image} failed without a fault: {error}"

        return Op("begin", work, done, upload=upload)

    def op_commit(self) -> Op:
        if not self.uploads:
            return self.op_begin()
        upload = self.uploads.pop(self.dice.randrange(len(self.uploads)))
        newest = self.calm.epoch(upload.wish.job)

        def work() -> None:
            assert upload.writer is not None
            with upload.writer:
                self.commit(upload)

        def done(_: None, error: StoreError | None, harmed: bool) -> None:
            self.committed(upload, newest, error, self.harmed(upload.harm))

        return Op("commit", work, done, upload.wish.job, upload)

    def op_abort(self) -> Op:
        if not self.uploads:
            return self.op_save()
        upload = self.uploads.pop()
        assert upload.writer is not None
        return Op("abort", upload.writer.abort, self.aborted)

    def aborted(self, _: None, error: StoreError | None, harmed: bool) -> None:
        assert error is None, f"abort failed: {error}"

    def op_load(self) -> Op:
        if not self.sure():
            return self.op_save()
        image, store = self.dice.choice(self.sure()), self.store()
        wish = self.images[image]

        def done(data: bytes | None, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"load of {image} failed without a fault: {error}"
            assert error is not None or data == wish.data, f"{image} has other bytes"

        return Op("load", lambda: load(store, image), done)

    def op_verify(self) -> Op:
        if not self.sure():
            return self.op_save()
        image, store, full = self.dice.choice(self.sure()), self.store(), self.dice.random() < 0.7

        def done(found: Any, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"verify of {image} failed without a fault: {error}"
            assert error is not None or found.whole, f"verify of {image}: {found.problem}"

        return Op("verify", lambda: store.verify(image, full=full), done)

    def op_list(self) -> Op:
        store, sure = self.store(), self.sure()

        def done(found: Any, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"list failed without a fault: {error}"
            whole = {image.id for image in found or () if image.whole}
            assert error is not None or whole >= set(sure), f"list without {set(sure) - whole}"

        return Op("list", store.images, done)

    def op_remove(self) -> Op:
        if not self.images:
            return self.op_save()
        image, store = self.dice.choice(list(self.images)), self.store()

        def done(_: None, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"remove of {image} failed without a fault: {error}"
            self.gone([image], error)

        return Op("remove", lambda: store.remove_image(image), done)

    def gone(self, removed: list[str], error: StoreError | None) -> None:
        for image in removed:
            if error is None:
                del self.images[image]
            else:
                self.images[image].sure = False

    def op_prune(self) -> Op:
        job, keep, store = self.dice.choice(JOBS), self.dice.randint(1, 3), self.store()
        mine = [image for image, wish in self.images.items() if wish.job == job]
        mine.sort(key=lambda image: (self.images[image].epoch, self.images[image].sequence))
        whole = [image for image in mine if self.images[image].sure]
        committed = self.dice.choice([*whole, ""])
        old = mine[: mine.index(whole[-1])] if whole else []
        expected = set(whole[:-keep]) | {image for image in old if not self.images[image].sure}
        expected.discard(committed)

        def done(removed: list[str] | None, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"prune failed without a fault: {error}"
            if error is None:
                assert set(removed or ()) == expected, f"{removed} instead of {expected} of {mine}"
            self.gone(sorted(expected), error)

        return Op("prune", lambda: store.prune(job, keep, committed=committed), done, job)

    def op_gc(self, deadly: bool | None = None) -> Op:
        store = self.store()
        deadly = self.dice.random() < 0.3 if deadly is None else deadly
        work = functools.partial(store.gc, 0.0) if deadly else store.gc
        return Op("gc", work, self.collected, deadly=deadly)

    def collected(self, report: Any, error: StoreError | None, harmed: bool) -> None:
        assert error is None or harmed, f"gc failed without a fault: {error}"
        if report is not None:
            self.figures["removed_packs"] += report.removed_packs
            self.figures["repacked_packs"] += report.repacked_packs

    def op_epoch(self, job: str = "") -> Op:
        job, store = job or self.dice.choice(JOBS), self.store()

        def done(epoch: int | None, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"take_epoch failed without a fault: {error}"
            if epoch is not None:
                assert epoch not in self.epochs[job], f"epoch {epoch} was given out twice"
                self.epochs[job].append(epoch)

        return Op("epoch", lambda: store.take_epoch(job), done, job)

    def op_open(self) -> Op:
        """Of this store, or of one in which nothing is yet."""
        below = self.dice.choice(["", "", "-new"])

        def done(store: Store | None, error: StoreError | None, harmed: bool) -> None:
            assert error is None or harmed, f"open failed without a fault: {error}"
            if store is not None and not below:
                self.stores[self.dice.randrange(len(self.stores))] = store

        return Op("open", lambda: self.open(below=below), done)

    def step(self) -> None:
        dice = self.dice
        name = dice.choices(list(SHARES), list(SHARES.values()))[0]
        ops: list[Op] = [getattr(self, f"op_{name}")()]
        if ops[0].name == "epoch" and dice.random() < 0.6:
            ops.append(self.op_epoch(ops[0].job))
        elif ops[0].name not in ("open", "abort") and dice.random() < 0.35:
            if ops[0].deadly or dice.random() < 0.5:
                beside = self.op_save(fresh=True)
            else:
                beside = self.op_gc(deadly=ops[0].upload is not None and dice.random() < 0.4)
            # A prune is to know which images of its job there are.
            if ops[0].name != "prune" or beside.job != ops[0].job:
                ops.append(beside)
        if any(op.deadly for op in ops):
            for upload in [*self.uploads, *(op.upload for op in ops if op.upload)]:
                upload.doomed = True
        weather = self.weather()
        self.log.append(f"{'+'.join(op.name for op in ops)} {weather}")
        self.forwarder.turn(weather)
        before = self.forwarder.harm
        results = side_by_side([op.work for op in ops], HANG_S)
        self.forwarder.turn(CALM)
        harmed = self.harmed(before)
        for op, (value, error) in zip(ops, results, strict=True):
            self.figures[op.name] += 1
            self.figures["failed"] += error is not None
            self.log.append(f"  {op.name}: {error or 'ok'}")
            if error is not None and not isinstance(error, StoreError):
                raise AssertionError(f"{op.name} raised {error!r}") from error
            op.done(value, error, harmed)
        self.figures["side_by_side"] += len(ops) > 1
        self.settle(self.calm)

    # ---- comparing ----

    def settle(self, store: Store, every: bool = False) -> None:
        """Compares images with the model, and learns what became of those that it is not sure of. every: reads all bytes."""
        listed = store.images()
        found = {image.id: image for image in listed}
        assert found.keys() <= self.images.keys(), f"{found.keys() - self.images.keys()} came back"
        for image, wish in list(self.images.items()):
            if image not in found:
                assert not wish.sure, f"{image} is not there"
                del self.images[image]
                continue
            if not found[image].whole:
                assert not wish.sure, f"{image}: {found[image].problem}"
                assert wish.torn, f"{image} is there and not whole: {found[image].problem}"
                continue
            self.figures["there_after_an_error"] += not wish.sure
            if every or not wish.sure or self.dice.random() < 0.4:
                assert load(store, image) == wish.data, f"{image} has other bytes"
            wish.sure = True
        for job in JOBS:
            order = [(i.epoch, i.sequence) for i in listed if i.job_id == job]
            assert order == sorted(order), f"images of {job} are listed as {order}"

    def finish(self) -> None:
        for upload in self.uploads:
            assert upload.writer is not None
            upload.writer.abort()
        store = self.open(calm=True)
        self.settle(store, every=True)
        report = store.gc(0.0)
        assert not report.busy, report.busy
        self.settle(store, every=True)
        for image in self.sure():
            assert store.verify(image, full=True).whole, image
        assert not store.noted_packs(), "a fault was taken for damage"
        left = [e.name for f in ("uploads", "gc") for e in store.backend.list(f)]
        assert not left, left
        check_garbage(store)


def check_garbage(store: Store) -> None:
    """Each pack has an index, and at least half of its bytes are needed."""
    live = {
        bytes.fromhex(name)
        for image in store.images()
        for name, _ in store.read_manifest(image.id)["data"]["chunks"]
        if name != "zero"
    }
    sizes = {entry.name: entry.size for entry in store.backend.list("packs")}
    packs = store.pack_ids()
    assert len(sizes) == 2 * len(packs), f"halves of packs are left: {sorted(sizes)}"
    for pack in packs:
        index = store.pack_index(pack)
        assert index is not None, pack
        used = sum(at.stored_bytes for key, at in index.entries.items() if key in live)
        assert 2 * used >= sizes[f"{pack}.pack"] > 0, f"{pack}: {used} bytes of it are needed"


@contextlib.contextmanager
def surroundings(folder: str) -> Iterator[None]:
    """Credentials, a key, short pauses, small packs; and an empty bucket."""
    env = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "DEVPROXY_KEY_FILE": str(Path(folder) / "image.key"),
    }
    assert ask("POST", "/moto-api/reset").status == 200
    assert ask("PUT", f"/{BUCKET}").status == 200
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(object_backend, "ANSWER_S", ANSWER_S),
        mock.patch.object(writers, "PACK_BYTES", 3 * BLOCK),
        mock.patch.object(ExponentialBackoff, "delay_amount", lambda *_: 0.01),
    ):
        yield


def run(seed: int) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up."""
    dice = random.Random(seed * 7919)
    with tempfile.TemporaryDirectory() as folder, surroundings(folder):
        forwarder = Forwarder(dice)
        program: Program | None = None
        try:
            program = Program(seed, f"s3://{BUCKET}/store", forwarder)
            for _ in range(OPERATIONS):
                program.step()
            program.finish()
        except Exception as error:
            steps = "\n".join(program.log[-40:] if program else [])
            raise AssertionError(
                f"{steps}\nseed {seed}: {type(error).__name__}: {error}"
            ) from error
        finally:
            forwarder.close()
    faults = {f"fault_{kind}": count for kind, count in forwarder.faults.items() if kind}
    return {**program.figures, **faults, "requests": forwarder.requests}
