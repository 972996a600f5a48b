# SPDX-License-Identifier: Apache-2.0
"""The manifest of an image: what makes it an image, and so written last.

Three lines that are one JSON text, so that any tool can read it and no reader has to guess where it ends:

    {"authentication":"HMAC-SHA256 of format and line 2","body_bytes":N,"checksum":"BLAKE3 of line 2","format":2,"body":
    {...}
    }

The body is canonical JSON: sorted keys, no spaces, UTF-8. References to chunks stand under keys named "chunks", as lists
of [hash, raw bytes]; that rule is all that the store knows of the rest of the body.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from devproxy.checkpoint.chunker import ChunkRef, digest
from devproxy.checkpoint.errors import (
    ImageError,
    TruncatedManifest,
    UnknownFormat,
    WrongAuthentication,
    WrongChecksum,
)
from devproxy.errors import Refused

FORMAT = 2
READABLE = (1, 2)
_HEAD_LIMIT = 512
_CREATED_MAX = 253402300799.0  # the end of the year 9999


@dataclass(frozen=True)
class Image:
    """What `devproxy images` shows. Bytes; created in seconds since 1970. problem is "" for a whole image."""

    id: str
    job: str = ""
    job_id: str = ""
    created: float = 0.0
    epoch: int = 0
    sequence: int = 0  # within the epoch, from 1 on; 0: of a devproxy that did not count
    format: int = 0
    sizes: dict[str, Any] = field(default_factory=dict)
    gpus: list[int] = field(default_factory=list)  # how many the job sees, by its nodes
    ranks: list[int] = field(
        default_factory=list
    )  # how many of its processes have a communicator, by its nodes
    whole: bool = True
    problem: str = ""
    noted: bool = False  # the problem was found before, and a note in the store says so
    foreign: bool = False  # the problem: it is not signed with this key, so its job is unknown

    @classmethod
    def unread(cls, image_id: str, error: ImageError, problem: str = "") -> Image:
        """One whose manifest cannot be used. problem: in other words than the error's."""
        foreign = isinstance(error, WrongAuthentication)
        return cls(image_id, whole=False, problem=problem or error.what, foreign=foreign)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def canonical(body: object) -> bytes:
    text = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    # A file name that is no UTF-8 has lone surrogates in it (PEP 383): backslashreplace writes them as JSON does, \\udcff.
    return text.encode(errors="backslashreplace")


def _authentication(key: bytes, version: int, body: bytes) -> str:
    return hmac.new(key, b"devproxy image %d\n" % version + body, hashlib.sha256).hexdigest()


def encode(body: dict[str, Any], key: bytes) -> bytes:
    data = canonical(body)
    line = _head(FORMAT, len(data), digest(data).hex(), _authentication(key, FORMAT, data))
    return line + b"\n" + data + b"\n}\n"


def _head(version: int, body_bytes: int, checksum: str, authentication: str) -> bytes:
    head = {
        "format": version,
        "body_bytes": body_bytes,
        "checksum": checksum,
        "authentication": authentication,
    }
    return canonical(head)[:-1] + b',"body":'


def decode(image_id: str, data: bytes, key: bytes | None, key_file: str = "") -> dict[str, Any]:
    """The body. key None: not authenticated (gc only asks what is referenced).

    Raises TruncatedManifest, UnknownFormat, WrongChecksum or WrongAuthentication, found in that order.
    """
    line, newline, rest = data.partition(b"\n")
    if not newline:
        if len(data) > _HEAD_LIMIT:
            raise WrongChecksum(image_id, "its first line is none of ours")
        raise TruncatedManifest(image_id, len(data), None)
    try:
        head = json.loads(line + b"null}", parse_constant=_no_number)
        version = head["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WrongChecksum(image_id, "its first line cannot be read") from None
    if type(version) is not int or version not in READABLE:
        raise UnknownFormat(image_id, version)
    try:
        size, checksum, signature = (
            int(head["body_bytes"]),
            str(head["checksum"]),
            str(head["authentication"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise WrongChecksum(image_id, "its first line cannot be read") from None
    if line != _head(version, size, checksum, signature):
        raise WrongChecksum(image_id, "its first line is not as it was written")
    want = len(line) + 1 + size + len(b"\n}\n")
    if len(data) < want:
        raise TruncatedManifest(image_id, len(data), want)
    body = rest[:size]
    if size < 0 or rest[size:] != b"\n}\n" or digest(body).hex() != checksum:
        raise WrongChecksum(image_id)
    if key is not None:
        mine = _authentication(key, version, body).encode()
        if not hmac.compare_digest(mine, signature.encode(errors="replace")):
            raise WrongAuthentication(image_id, key_file)
    try:
        value = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise WrongChecksum(image_id, "its body is not JSON") from None
    if not isinstance(value, dict):
        raise WrongChecksum(image_id, "its body is not an object")
    return value


def _no_number(text: str) -> object:
    """JSON has no Infinity and no NaN; Python's reader takes them."""
    raise ValueError(f"{text} is no number")


@contextmanager
def understood(image_id: str) -> Iterator[None]:
    """Whatever a body that is not ours makes fail is that manifest's fault: WrongChecksum, which names it."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as e:
        why = f"its body is none of ours ({type(e).__name__})"
        raise WrongChecksum(image_id, why) from None


def chunk_lists(value: object, path: str = "") -> Iterator[tuple[str, list[ChunkRef]]]:
    """(label, references) of every list of chunks in a body. The label is what a user knows the object by."""
    if isinstance(value, dict):
        name = value.get("path") or value.get("name")
        label = f"{path}:{name}" if isinstance(name, str) else path
        for key, item in value.items():
            if key == "chunks" and isinstance(item, list):
                yield label or "the image", [(str(ref[0]), int(ref[1])) for ref in item]
            else:
                yield from chunk_lists(item, f"{label}.{key}" if label else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from chunk_lists(item, f"{path}[{number}]")


def summary(body: dict[str, Any], problem: str = "", *, noted: bool = False) -> Image:
    """Of the image whose manifest has this body. Raises what `understood` takes for a body that is none of ours."""
    trees = body.get("trees", [])
    created = float(body.get("created", 0.0))
    if not 0 <= created <= _CREATED_MAX:
        raise ValueError("no time of an image")
    str(body.get("job", "")).encode()  # it is printed
    return Image(
        id=str(body["image"]),
        job=str(body.get("job", "")),
        job_id=str(body.get("job_id", "")),
        created=created,
        epoch=int(body.get("epoch") or 0),
        sequence=int(body.get("sequence") or 0),
        format=int(body["format"]),
        sizes=dict(body.get("sizes", {})),
        gpus=[len(tree.get("gpus", [])) for tree in trees],
        ranks=[int(tree.get("facts", {}).get("ranks", 0)) for tree in trees],
        whole=not problem,
        problem=problem,
        noted=noted,
    )


def in_order(images: Iterable[Image]) -> list[Image]:
    """Oldest first. Of one job by epoch and sequence, which no clock can set back; by clocks between jobs."""
    return [image for _, image in in_order_of_stores(("", image) for image in images)]


def in_order_of_stores(found: Iterable[tuple[str, Image]]) -> list[tuple[str, Image]]:
    """in_order() for (URL of the store, image). A store counts epochs of its own, so clocks decide between stores too."""
    latest: dict[tuple[str, str], float] = {}
    placed: list[tuple[float, str, int, int, str, int, Image]] = []
    by_job = sorted(
        found, key=lambda f: (f[1].job_id, f[0], f[1].epoch, f[1].sequence, f[1].created, f[1].id)
    )
    for number, (url, image) in enumerate(by_job):
        # An image is as young as the youngest clock of the job until then.
        job = (url, image.job_id)
        when = latest[job] = max(latest.get(job, 0.0), image.created)
        # Where the clocks of two stores agree, one may be a copy from which the job went on: a later epoch is later.
        placed.append((when, image.job_id, image.epoch, image.sequence, url, number, image))
    return [(row[4], row[6]) for row in sorted(placed, key=lambda row: row[:6])]


def is_image_id(text: str) -> bool:
    named = all(c.isalnum() or c in "-_.:" for c in text)
    return bool(text) and not text.startswith(".") and named


def check_image_id(image_id: str) -> None:
    """Raises Refused for an id that cannot be a folder's name."""
    if not is_image_id(image_id):
        raise Refused(f"image id {image_id!r} cannot be used", "letters, digits and - _ . : only")
