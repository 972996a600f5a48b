# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.FloatTensor and its kin, which a CPU build has and cannot use, and the default tensor type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def complete(torch: Any) -> None:
    class Legacy(type):
        dtype: Any
        layout: Any
        # tensor.type() looks at the C name of a class, which torch's own have the module's name in.
        __name__ = property(lambda cls: cls.__qualname__)

        def __instancecheck__(cls, value: object) -> bool:
            wanted = (True, cls.dtype, cls.layout)
            return (
                isinstance(value, torch.Tensor)
                and (value.is_cuda, value.dtype, value.layout) == wanted
            )

    def make(dtype: Any) -> Callable[..., Any]:
        def __new__(cls: type, *args: Any, **_: Any) -> Any:
            if not args:
                return torch.empty(0, dtype=dtype, device="cuda")
            if all(isinstance(a, int) for a in args):
                return torch.empty(args, dtype=dtype, device="cuda")
            if isinstance(args[0], torch.Size):
                return torch.empty(args[0], dtype=dtype, device="cuda")
            if isinstance(args[0], torch.Tensor):
                if not isinstance(args[0], cls):
                    raise TypeError(
                        f"expected {cls.__module__}.{cls.__name__} (got {args[0].type()})"
                    )
                return torch.ops.aten.alias(args[0])
            return torch.tensor(*args, dtype=dtype, device="cuda")

        return __new__

    def make_sparse(dtype: Any) -> Callable[..., Any]:
        def __new__(cls: type, *args: Any, **_: Any) -> Any:
            given = args or ((0,),)
            return torch.sparse_coo_tensor(*given, dtype=dtype, device="cuda")

        return __new__

    def legacy(module: str, name: str, dtype: Any, layout: Any, new: Callable[..., Any]) -> Any:
        body = {
            "__new__": new, "dtype": dtype, "layout": layout, "__module__": module, "__qualname__": name,
            "is_cuda": True, "is_sparse": layout == torch.sparse_coo,
        }  # fmt: skip
        return Legacy(f"{module}.{name}", (), body)

    types = {
        "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }  # fmt: skip
    made = {}
    for prefix, dtype in types.items():
        name = prefix + "Tensor"
        made[dtype] = legacy("torch.cuda", name, dtype, torch.strided, make(dtype))
        setattr(torch.cuda, name, made[dtype])
        of_coo = legacy("torch.cuda.sparse", name, dtype, torch.sparse_coo, make_sparse(dtype))
        setattr(torch.cuda.sparse, name, of_coo)

    plain = torch.set_default_tensor_type

    def new_tensor(cls: type, *args: Any, **named: Any) -> Any:
        """torch.Tensor(2, 3), which a default device alone does not reach."""
        if cls is torch.Tensor and not named:
            return made[torch.get_default_dtype()](*args)
        return torch._C.TensorBase.__new__(cls, *args, **named)

    def set_default_tensor_type(kind: Any) -> None:
        given = torch._import_dotted_name(kind) if isinstance(kind, str) else kind
        if not isinstance(given, Legacy):
            plain(kind)
            if torch.Tensor.__new__ is new_tensor:
                torch.set_default_device(None)
                del torch.Tensor.__new__
            return
        plain(getattr(torch, given.__name__))
        torch.set_default_device("cuda")
        torch.Tensor.__new__ = new_tensor

    set_default_tensor_type.__doc__ = plain.__doc__
    torch.set_default_tensor_type = set_default_tensor_type
