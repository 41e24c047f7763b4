"""numba.njit with our options: lock-free, cached on disk where some place is writable. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

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
