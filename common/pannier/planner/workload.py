"""A trace made longer, or faster: other requests and arrivals from the same lines, still one at a time."""

import random
from collections.abc import Callable, Iterable, Iterator

from pannier.planner.trace import HASH_IDS, TraceError, TraceRequest


def repeated(read: Callable[[], Iterable[TraceRequest]], times: int) -> Iterator[TraceRequest]:
    """The trace `times` times, one after the other, a mean gap between them; `read` begins it anew.

    Hash ids are others each time: a prefix is shared as often as in the trace, and never with an earlier repeat.
    """
    start, next_id = 0.0, 0
    for _ in range(times):
        count, last, largest = 0, 0.0, -1
        for request in read():
            count, last = count + 1, request.arrival_s
            hash_ids = request.hash_ids
            if hash_ids is not None:
                largest = max(largest, *hash_ids)
                hash_ids = tuple(next_id + hash_id for hash_id in hash_ids)
            yield request._replace(arrival_s=start + last, hash_ids=hash_ids)
        start += last + (last / (count - 1) if count > 1 else 0.0)
        next_id += largest + 1
        if next_id > HASH_IDS:
            raise TraceError(f"{times} repeats of the trace need more than {HASH_IDS} hash ids")


def at_rate(requests: Iterable[TraceRequest], rate: float, seed: int) -> Iterator[TraceRequest]:
    """The same requests, arriving at random and independently (Poisson), `rate` of them a second on average."""
    draw, now = random.Random(seed), 0.0
    for request in requests:
        now += draw.expovariate(rate)
        yield request._replace(arrival_s=now)
