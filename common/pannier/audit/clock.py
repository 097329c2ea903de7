"""The clock by which forward passes and operators are timed."""

import time
from collections.abc import Callable


class Clock:
    """`now` is the wall's; a test puts a thread's own there, which other processes don't disturb."""

    now: Callable[[], float] = staticmethod(time.perf_counter)
