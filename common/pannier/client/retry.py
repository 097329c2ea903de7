"""What may be asked again, and when.

Safe is what gave the caller nothing yet, and failed for want of a gateway or of room: a text is generated anew, which
changes nothing anywhere. What is wrong with a request stays wrong, and what took too long would again.
"""

import random
from collections.abc import Iterator

from pannier.client.errors import RequestFailed, Unreachable

FIRST_S, MOST_S = 0.25, 8.0
"""The pauses double, and each is shortened by up to half, so that many clients don't come back at once."""
PASSING = frozenset({"overloaded", "unavailable"})


def is_passing(error: Exception) -> bool:
    """Whether the same request may well be served a little later."""
    return isinstance(error, Unreachable) or (isinstance(error, RequestFailed) and error.code in PASSING)


def pauses(retries: int) -> Iterator[float]:
    """Seconds to wait before each of so many retries."""
    for number in range(retries):
        yield min(MOST_S, FIRST_S * 2**number) * random.uniform(0.5, 1.0)
