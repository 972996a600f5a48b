# SPDX-License-Identifier: Apache-2.0
"""torch.nn.TransformerEncoder without the nested tensors that it makes of a padding mask in eval mode.

The device has none. torch packs the words of a batch, runs the layers on them, and pads with zeros again. Here the layers run
on the whole batch under the mask, and what they make of the padding becomes zeros.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Nested(NotImplementedError):
    """Somebody wants a nested tensor of the device's."""


def complete(module: ModuleType) -> None:
    """module: torch.nn.modules.transformer"""
    torch, encoder, wants_nested = module.torch, module.TransformerEncoder, Nested
    packed, forward = torch._nested_tensor_from_mask, encoder.forward

    def nested_tensor_from_mask(tensor: Any, *rest: Any, **more: Any) -> Any:
        if tensor.is_cuda:
            raise wants_nested("devproxy has no nested tensors on the device")
        return packed(tensor, *rest, **more)

    # TorchScript takes the source of what is wrapped, but the names of this one: so _as_of gives it torch's own globals, and what
    # it needs of this module, Nested among it, are variables of complete().
    def padded(
        self: Any,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: Any = None,
    ) -> Any:
        try:
            return forward(self, src, mask, src_key_padding_mask, is_causal)
        except wants_nested:
            pass  # no layer has run yet
        causal = module._detect_is_causal_mask(
            mask, is_causal, module._get_seq_len(src, batch_first=True)
        )
        for layer in self.layers:
            src = layer(
                src, src_mask=mask, is_causal=causal, src_key_padding_mask=src_key_padding_mask
            )
        src = src.masked_fill(src_key_padding_mask.ne(0).unsqueeze(-1), 0.0)
        return src if self.norm is None else self.norm(src)

    torch._nested_tensor_from_mask = nested_tensor_from_mask
    encoder.forward = _as_of(module, padded, forward)


def _as_of(
    module: ModuleType, function: Callable[..., Any], wrapped: Callable[..., Any]
) -> Callable[..., Any]:
    code: Any = function
    made: Any = types.FunctionType(
        code.__code__, vars(module), wrapped.__name__, code.__defaults__, code.__closure__
    )
    made.__wrapped__, made.__module__ = wrapped, module.__name__
    made.__doc__, made.__qualname__ = wrapped.__doc__, wrapped.__qualname__
    return made  # type: ignore[no-any-return]
