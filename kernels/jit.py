"""numba.njit with our options: lock-free, cached on disk where some place is writable; and three instructions
that Python has no word for. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])
njit: Any = numba.njit  # its stubs do not know every option
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def entry(function: F) -> F:
    """Called from Python. Cached beside the module, else in the user's cache folder, else not at all."""
    try:
        return cast(F, njit(cache=True, **OPTIONS)(function))
    except RuntimeError:  # no writable place for the cache: compile in memory
        return cast(F, njit(**OPTIONS)(function))


def inner(function: F) -> F:
    """Called from compiled code only: no wrapper for Python, which halves the compile time."""
    return cast(F, njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function))


def fuse(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in fp32, rounded once (a library call where the processor has no such instruction)."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, signature, args: builder.fma(*args)


def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


def take_bits(context: Any, x: Any) -> Any:
    return types.int64(types.float64), bitcast


def make_double(context: Any, x: Any) -> Any:
    return types.float64(types.int64), bitcast


fused: Any = intrinsic(fuse)
bits_of_double: Any = intrinsic(take_bits)
double_of_bits: Any = intrinsic(make_double)
