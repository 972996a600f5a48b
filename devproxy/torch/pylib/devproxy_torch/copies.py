# SPDX-License-Identifier: Apache-2.0
"""Copies between GPUs, which torch.nn.parallel.comm is made of: nn.DataParallel, which transformers.Trainer takes for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from devproxy_torch.stand_ins import refuse

# Late imports: torch is being imported when this module is.


def names() -> dict[str, object]:
    def broadcast(tensor: Any, devices: Sequence[int]) -> list[Any]:
        return [tensor.to(f"cuda:{d}", non_blocking=True) for d in devices]

    def broadcast_out(tensor: Any, out: Sequence[Any]) -> Sequence[Any]:
        for one in out:
            one.copy_(tensor, non_blocking=True)
        return out

    def broadcast_coalesced(
        tensors: Sequence[Any], devices: Sequence[int], buffer_size: int
    ) -> list[list[Any]]:
        return [[t.to(f"cuda:{d}", non_blocking=True) for t in tensors] for d in devices]

    def scatter(
        tensor: Any,
        devices: Sequence[int],
        chunk_sizes: Sequence[int] | None,
        dim: int,
        streams: Sequence[Any] | None,
    ) -> list[Any]:
        import torch

        chunks = (
            tensor.split(list(chunk_sizes), dim)
            if chunk_sizes is not None
            else tensor.chunk(len(devices), dim)
        )
        found = []
        for i, (chunk, device) in enumerate(zip(chunks, devices)):
            with torch.cuda.stream(streams[i] if streams is not None else None):
                found.append(chunk.contiguous().to(f"cuda:{device}", non_blocking=True))
        return found

    def scatter_out(
        tensor: Any, out: Sequence[Any], dim: int, streams: Sequence[Any] | None
    ) -> Sequence[Any]:
        import torch

        chunks = tensor.split([o.size(dim) for o in out], dim)
        for i, (chunk, one) in enumerate(zip(chunks, out)):
            with torch.cuda.stream(streams[i] if streams is not None else None):
                one.copy_(chunk, non_blocking=True)
        return out

    def gather(tensors: Sequence[Any], dim: int, destination: int | None) -> Any:
        import torch

        where = "cuda" if destination is None else f"cuda:{destination}"
        return torch.cat([t.to("cpu" if destination == -1 else where) for t in tensors], dim)

    def gather_out(tensors: Sequence[Any], out: Any, dim: int) -> Any:
        return out.copy_(gather(tensors, dim, out.device.index if out.is_cuda else -1))

    def reduce(
        inputs: Sequence[Any], output: Any, root: int, op: int, streams: object, comms: object
    ) -> None:
        if op != 0 or comms:
            refuse("torch.cuda.nccl.reduce but for the sum")()
        total = inputs[0].to(output.device, copy=True)
        for one in inputs[1:]:
            total += one.to(output.device)
        output.copy_(total)

    return {
        "_broadcast": broadcast,
        "_broadcast_out": broadcast_out,
        "_broadcast_coalesced": broadcast_coalesced,
        "_scatter": scatter,
        "_scatter_out": scatter_out,
        "_gather": gather,
        "_gather_out": gather_out,
        "_nccl_reduce": reduce,
    }
