"""The compiled part: what `rings.cpp` does, as functions."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pannier.net.shm.errors import CannotShare

LIBRARY = Path(__file__).parent / "librings.so"


SLOTS = 64
"""Messages that may be under way in one ring."""
SLOT_BYTES = 32


class CRing(ctypes.Structure):
    """`Ring` of rings.cpp."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("slots", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("freed", ctypes.c_void_p),
        ("asleep", ctypes.c_void_p),
        ("position", ctypes.c_uint64),
        ("starts", ctypes.c_uint64 * SLOTS),
        ("ends", ctypes.c_uint64 * SLOTS),
    )


class CMessage(ctypes.Structure):
    """`Message` of rings.cpp."""

    _fields_ = (
        ("header", ctypes.c_uint64),
        ("header_length", ctypes.c_uint64),
        ("payload", ctypes.c_uint64),
        ("payload_length", ctypes.c_uint64),
    )


class Functions(NamedTuple):
    """What is exported, without its prefix. Rings and messages are given by address."""

    reserve: Any
    publish: Any
    receive: Any
    release: Any
    spin: Any
    wake: Any
    fall_asleep: Any


@cache
def functions() -> Functions:
    """The functions. Raises `CannotShare` where they weren't compiled."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise CannotShare(
            f"the compiled part of shared memory is missing ({error}): install pannier where there is a C++ compiler"
        ) from error
    ring, rings, message = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    length, time, number = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int
    signatures: dict[str, tuple[list[Any], Any]] = {
        "reserve": ([ring, ctypes.c_char_p, length, length], ctypes.c_int64),
        "publish": ([ring], number),
        "receive": ([rings, number, number, message], number),
        "release": ([ring], None),
        "spin": ([rings, number, time], number),
        "wake": ([rings, number], None),
        "fall_asleep": ([rings, number], number),
    }
    return Functions(**{name: _typed(library, name, *signature) for name, signature in signatures.items()})


def _typed(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any) -> Any:
    function = getattr(library, f"pannier_shm_{name}")
    function.argtypes, function.restype = arguments, result
    return function
