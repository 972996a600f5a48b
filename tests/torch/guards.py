# SPDX-License-Identifier: Apache-2.0
"""Watches one op on 'cuda': that it ran on the device, and only there.

Four things are asked of an op, each from a witness that the op itself cannot talk to:

launch      at least one launch: the server's own count, over its socket. A result that is a view of an argument needs
            none, but is told apart: only the ops listed as views may give one.
read back   no device-to-host bytes: the server's own count again. (What an op with a data-dependent result asks of the
            device comes back in its reply, written by the device into pinned memory, and is no copy.)
host        no ATen kernel on the CPU in this process. torch's RecordFunction sees every call of the dispatcher, those
            inside kernels too, with the devices of its tensors; a TorchDispatchMode would see only the outermost. A
            call whose tensors are all on the CPU ran there. 0-dimensional ones are Python numbers and do not count.
live        every storage, whole, lies in memory that the server's mirror holds. The server checks each tensor of each
            launch, so one launch that takes all the storages as bytes is the question. A dead address is a sticky
            error, as on a GPU: after it nothing works in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from devproxy.proxy import stats

GPU = 0
# Neither computes: allocation, bookkeeping, and what only hands over to calls that are seen themselves.
NO_COMPUTE = {
    "aten::_to_copy",
    "aten::detach_",
    "aten::empty_like",
    "aten::item",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::requires_grad_",
    "aten::resize_",
    "aten::set_",
    "aten::to",
}


@dataclass
class Seen:
    """What was seen of one run of an op; d2h_bytes in bytes, `dead` in words or empty."""

    elements: int = 0
    aliases: bool = False  # every result lies in the storage of an argument
    launches: int = 0
    d2h_bytes: int = 0
    host_kernels: list[str] = field(default_factory=list)
    dead: str = ""


def totals() -> dict[str, int]:
    """The server's counts once all that was sent has been done. Raises ServerUnreachable."""
    torch.cuda.synchronize()
    counts: dict[str, int] = stats.query(os.environ["DEVPROXY_JOB_DIR"], GPU)["totals"]
    return counts


@cache
def is_view(name: str) -> bool:
    """Whether every overload of that op only looks at its argument's storage in another way."""
    schemas = [
        s
        for s in torch._C._jit_get_schemas_for_operator(name)
        if s.arguments and str(s.arguments[0].type) == "Tensor"  # not those of lists and strings
    ]
    return bool(schemas) and all(
        any(r.alias_info is not None and not r.alias_info.is_write for r in s.returns)
        for s in schemas
    )


def tensors_of(inputs: Any) -> Iterator[Any]:
    """The profiler's descriptions of the tensors among an op's inputs."""
    for i in inputs or ():
        if isinstance(i, (list, tuple)):
            yield from tensors_of(i)
        elif isinstance(i, torch._C._profiler._TensorMetadata):
            yield i


def host_kernels(events: Iterable[Any]) -> list[str]:
    """The calls, at any depth, that an ATen kernel of the CPU answered."""
    found = []
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag != torch._C._profiler._EventType.TorchOp or event.name in NO_COMPUTE:
            continue
        if not event.name.startswith("aten::") or is_view(event.name):
            continue
        given = list(tensors_of(event.extra_fields.inputs))
        if all(t.device.type == "cpu" for t in given) and any(len(t.sizes) for t in given):
            found.append(event.name)
    return sorted(set(found))


def dead_storages(tensors: Iterable[torch.Tensor]) -> str:
    """In words, the first storage of these that is not in the server's mirror; empty where all are."""
    whole: dict[tuple[int, int], torch.Tensor] = {}
    for t in tensors:
        if not t.is_cuda or t.layout != torch.strided:
            continue
        storage = t.untyped_storage()
        if storage.nbytes():
            place = (storage.data_ptr(), storage.nbytes())
            whole[place] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
    if not whole:
        return ""
    try:
        torch.cat(list(whole.values()))
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        return str(error).splitlines()[0]
    return ""


def watch(
    run: Callable[[], list[torch.Tensor]], arguments: Iterable[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], Seen]:
    """What run() returns and what was seen of it. What run() raises, passes. Raises ServerUnreachable."""
    arguments = list(arguments)
    before = totals()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        result = run()
    after = totals()
    given = {t.untyped_storage().data_ptr() for t in arguments if t.layout == torch.strided}
    seen = Seen(
        sum(t.numel() for t in result if t.layout == torch.strided),
        {t.untyped_storage().data_ptr() for t in result if t.layout == torch.strided and t.numel()}
        <= given,
        after["launches"] - before["launches"],
        after["d2h_bytes"] - before["d2h_bytes"],
        host_kernels(recorded.profiler.kineto_results.experimental_event_tree()),
        dead_storages([*result, *arguments]),
    )
    return result, seen


def broken(seen: Seen) -> dict[str, str]:
    """The rules that a run broke, by name, with what was seen. Where the result has no elements none need launch."""
    found = {}
    if seen.launches == 0 and seen.elements:
        how = "all results are views of arguments" if seen.aliases else "the results are new"
        found["view" if seen.aliases else "no_launch"] = f"nothing was launched, {how}"
    if seen.d2h_bytes != 0:
        found["reads_back"] = f"{seen.d2h_bytes} bytes came back from the device"
    if seen.host_kernels:
        found["host"] = "on the CPU: " + ", ".join(seen.host_kernels)
    if seen.dead:
        found["dead"] = f"a storage is not in the server's mirror: {seen.dead}"
    return found
