"""What a prefix cache without limits could hit in a trace, from its hash ids alone; it knows no scheduler."""

from collections.abc import Iterable

from pannier.planner.trace import HASHED_TOKENS, TraceError, TraceRequest


def ideal_hit_rate(requests: Iterable[TraceRequest]) -> float:
    """Tokens hit over prompt tokens, each request after the one before it is done.

    A request hits the longest sequence of ids from its beginning that an earlier prompt began with, as far as these
    are full blocks of 512 tokens, in both; its last token is always computed, so a hit ends before it.
    """
    children: dict[tuple[int, int], int] = {}  # (node, hash id) -> node: the tree of all prefixes seen, from node 0
    hit_tokens = prompt_tokens = 0
    for request in requests:
        if request.hash_ids is None:
            raise TraceError("the trace has no hash ids, so it doesn't say what its requests share")
        node, may_hit, usable = 0, True, (request.prompt_length - 1) // HASHED_TOKENS
        for index, hash_id in enumerate(request.hash_ids[: request.prompt_length // HASHED_TOKENS]):
            may_hit = may_hit and index < usable and (node, hash_id) in children
            hit_tokens += HASHED_TOKENS * may_hit
            node = children.setdefault((node, hash_id), len(children) + 1)
        prompt_tokens += request.prompt_length
    return hit_tokens / prompt_tokens if prompt_tokens else 0.0
