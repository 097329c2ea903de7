"""An alarm that a poller can wait for: readable once its moment has come. A poller's own timeout is too coarse."""

import ctypes
import os
import time

_TFD_NONBLOCK = os.O_NONBLOCK
_libc = ctypes.CDLL(None, use_errno=True)


class _Setting(ctypes.Structure):
    """`struct itimerspec`: the alarm goes off once, `seconds` and `nanoseconds` from now; zero is never."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Alarm:
    """One moment of `time.perf_counter` to wait for, or none."""

    def __init__(self) -> None:
        self._moment: float | None = None
        self._timer: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        """What a poller watches."""
        return self._timer

    def set(self, moment: float | None) -> None:
        """Go off then instead, at once if that is over; None: not at all."""
        if moment is None and self._moment is None:
            return
        self._moment = moment
        wait_ns = 0 if moment is None else max(1, int((moment - time.perf_counter()) * 1e9))
        seconds, nanoseconds = divmod(wait_ns, 1_000_000_000)
        _libc.timerfd_settime(self._timer, 0, ctypes.byref(_Setting(0, 0, seconds, nanoseconds)), None)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._timer)
