"""Types like `torch.cuda.FloatTensor`, and `torch.set_default_tensor_type` with them.

Native code has no such types in a build without CUDA. If one is the default, functions that make tensors make them on
the device, unless the call names another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepbusy.program.patches import Patches
from keepbusy.torch_names.dispatcher import (
    DEFAULT_DEVICE,
    DEVICE_OF_MODE,
    SET_DEFAULT_TYPE,
    TENSOR_TYPES,
    device_constructors,
)


class TensorType(type):
    """Device tensors of one type, such as `torch.cuda.FloatTensor`; native code uses the full name."""

    __name__ = property(lambda cls: cls.on_host.__name__)
    dtype: torch.dtype
    on_host: Any
    is_cuda = True
    is_sparse = False
    layout = torch.strided

    @classmethod
    def of(cls, on_host: Any) -> TensorType:
        namespace = {"__module__": "torch.cuda", "dtype": on_host.dtype, "on_host": on_host}
        return cls(f"torch.cuda.{on_host.__name__}", (), namespace)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if _are_sizes(args):
            return torch.empty(*args or (0,), dtype=cls.dtype, device="cuda")
        if not isinstance(args[0], Tensor):
            return cls.on_host(*args, **options).cuda()
        if not isinstance(args[0], cls):
            raise TypeError(f"expected torch.cuda.{cls.__name__} (got {args[0].type()})")
        return torch.ops.aten.alias.default(args[0])

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype is cls.dtype

    def __repr__(cls) -> str:
        return f"<class 'torch.cuda.{cls.__name__}'>"


def _are_sizes(args: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int | torch.Size) for value in args)


class Default:
    """Whether tensors are made on the device by default."""

    is_device = False


_OF_TENSORS = ("tensor", "as_tensor", "normal")
"""With a tensor as argument their result stays on that tensor's device."""


def patch(patches: Patches) -> None:
    """Add the types to `torch.cuda`, and let functions that make tensors use the default type."""
    for on_host in [kind for kind in TENSOR_TYPES if kind.__module__ == "torch"]:
        setattr(torch.cuda, on_host.__name__, TensorType.of(on_host))
    patches.wrap(*SET_DEFAULT_TYPE, _set_default)
    patches.wrap(*DEFAULT_DEVICE, lambda native: "cuda" if Default.is_device else native())
    makers = {function.__name__ for function in device_constructors()}
    for name in makers - {"asarray"}:  # PyTorch makes that on the host
        is_fft = name.startswith("fft_")
        patches.wrap(torch.fft if is_fft else torch, name.removeprefix("fft_"), partial(_make, name))
    patches.wrap(torch, "normal", partial(_make, "normal"))


def _set_default(native: Callable[..., Any], kind: Any) -> None:
    native(kind.on_host if isinstance(kind, TensorType) else kind)  # which refuses other objects
    Default.is_device = isinstance(kind, TensorType)
    if Default.is_device and "__new__" not in vars(Tensor):
        import torch._dynamo  # noqa: F401  # it checks `Tensor.__new__` once, when it is imported

        Tensor.__new__ = staticmethod(partial(_new, Tensor.__new__))


def _make(name: str, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    says_where = kwargs.get("device") is not None or kwargs.get("out") is not None
    if not Default.is_device or says_where or getattr(*DEVICE_OF_MODE) is not None:
        return native(*args, **kwargs)
    if name in _OF_TENSORS and any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return native(*args, **kwargs)
    return native(*args, **{**kwargs, "device": torch.device("cuda")})


def _new(native: Callable[..., Any], cls: type[Tensor], *args: Any, **options: Any) -> Any:
    """`torch.Tensor(...)`: of sizes, of values, or another tensor."""
    if not Default.is_device or cls is not Tensor or options or (args and isinstance(args[0], Tensor)):
        return native(cls, *args, **options)
    return torch.empty(*args or (0,)) if _are_sizes(args) else native(cls, *args).cuda()
