"""Prompts for traces that don't have any: token ids that are shared exactly where the trace says so."""

from array import array

from pannier.planner.trace import HASH_IDS, HASHED_TOKENS, TraceRequest
from pannier.scheduler.blocks import Ints

DRAWN_TOKEN = 0
"""What a simulated step draws; no prompt contains it, so no output is ever taken for a piece of another's prompt."""


def make_prompt(request: TraceRequest, number: int) -> Ints:
    """The prompt of the request with this number, which no other request of the run has.

    With hash ids, each stretch of 512 tokens repeats a token that stands for its id: equal ids give equal stretches,
    others differ in every token. Without, the whole prompt repeats one token of its own, so nothing is shared.
    """
    if request.hash_ids is None:
        return array("i", (1 + HASH_IDS + number,)) * request.prompt_length
    prompt = array("i")
    for hash_id in request.hash_ids:
        prompt.extend(array("i", (hash_id + 1,)) * HASHED_TOKENS)
    del prompt[request.prompt_length :]
    return prompt
