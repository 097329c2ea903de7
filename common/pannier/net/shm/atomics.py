"""The compiled helper: loads and stores in an order that another process sees (`atomics.cpp` says which and why)."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pannier.net.shm.errors import CannotShare

LIBRARY = Path(__file__).parent / "libatomics.so"


class Atomics(NamedTuple):
    """The helper's functions. Addresses are plain numbers."""

    load: Any
    store: Any
    post: Any
    find: Any
    spin: Any
    wake: Any
    fall_asleep: Any


@cache
def atomics() -> Atomics:
    """The helper. Raises `CannotShare` where it wasn't built."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise CannotShare(
            f"the compiled part of shared memory is missing ({error}): install pannier where there is a C++ compiler"
        ) from error
    word, flag, number, time = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
    words, flags, count = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[list[Any], Any]] = {
        "load": ([word], number),
        "store": ([word, number], None),
        "post": ([word, number, flag], count),
        "find": ([words, words, count, count], count),
        "spin": ([words, words, count, time], count),
        "wake": ([flags, count], None),
        "fall_asleep": ([flags, count, words, words, count], count),
    }
    return Atomics(**{name: _typed(library, name, *signature) for name, signature in signatures.items()})


def _typed(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any) -> Any:
    function = getattr(library, f"pannier_shm_{name}")
    function.argtypes, function.restype = arguments, result
    return function
