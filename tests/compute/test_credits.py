"""A compute worker never has more under way to an attention worker than there are credits."""

from collections import Counter
from random import Random

import pytest
from transformers import LlamaForCausalLM

from pannier.compute import share
from pannier.compute.link import Link, Received, Tensors
from pannier.slicer import SlicedModel
from pannier.wire import ComputeToAttention
from pannier.wire import messages as m

from .rig import HeldLink, Stack, accept, assert_drawn, texts

pytestmark = pytest.mark.timeout(120)


class CountingLink(HeldLink):
    """Counts what is under way by lane, and complains as soon as it is more than allowed."""

    def __init__(self, inner: Link) -> None:
        super().__init__(inner)
        self.one_way: Counter[int] = Counter()
        self.requests: Counter[int] = Counter()
        self.most = 0
        self.pieces = 0

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        if isinstance(message, m.Piece):
            under_way = self.requests if message.is_request else self.one_way
            under_way[message.lane] += 1
            self.pieces += not message.is_request
            self.most = max(self.most, self.one_way[message.lane])
            assert self.one_way[message.lane] <= share.PIECE_CREDITS
            assert self.requests[message.lane] <= 1
            assert all(len(tensor) <= share.PIECE_ROWS for tensor in tensors if not message.is_request)
        super().send(message, tensors)

    def receive(self) -> Received | None:
        received = super().receive()
        if received is not None and isinstance(received[0], m.PieceWritten):
            self.one_way[received[0].lane] -= 1
        if received is not None and isinstance(received[0], m.Answer):
            self.requests[received[0].lane] -= 1
        return received


@pytest.mark.parametrize("seed", range(4))
def test_credits(whole: LlamaForCausalLM, sliced: SlicedModel, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whenever answers come, there are at most four one-way pieces and one request under way per lane and link.

    Prompts of many pieces run in both lanes, behind requests and without; every step ends, with the right text.
    """
    monkeypatch.setattr(share, "PIECE_ROWS", 3)
    stack = Stack(sliced, shards=(2,), wrap=CountingLink)
    random, links = Random(seed), [stack.link("a0.0"), stack.link("a0.1")]
    lanes = texts([41, 38], seed=seed)
    beside = texts([44, 23], seed=seed + 10)
    for lane, text in enumerate(lanes):
        beside[lane].sequence, beside[lane].blocks = 2 + lane, text.blocks[16:]
        stack.send(stack.step(lane).chunk(text, 20).made())
        stack.send(stack.step(lane).last_chunk(text).last_chunk(beside[lane]).made())
    while True:
        stack.pump()
        choice = random.sample(links, 2)
        if not any(link.let_through(random.randint(1, 3)) for link in choice):
            break
    for done in stack.take(m.StepDone, 4):
        for drawn in done.drawn:
            text = [*lanes, *beside][drawn.sequence]
            assert_drawn(whole, text.tokens, drawn)
            accept(text, drawn)
    assert [len(text.tokens) for text in (*lanes, *beside)] == [42, 39, 45, 24]
    for link in links:
        assert isinstance(link, CountingLink)
        assert link.most == share.PIECE_CREDITS
        assert link.pieces == 2 * sum(-(-rows // 3) for rows in (20, 20, 44, 23))


def test_out_of_credit_a_lane_lets_the_other_go_on(sliced: SlicedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that has used up its credits yields; the other lane begins and ends meanwhile."""
    monkeypatch.setattr(share, "PIECE_ROWS", 2)
    stack = Stack(sliced, wrap=CountingLink)
    long, short = texts([40, 3])
    stack.send(stack.step(0).last_chunk(long).made())
    stack.pump()
    link = stack.link()
    assert sum(isinstance(message, m.Piece) for message in link.sent) == share.PIECE_CREDITS
    stack.send(stack.step(1).last_chunk(short).made())
    stack.pump()
    pieces = [message for message in link.sent if isinstance(message, m.Piece)]
    assert {piece.call for piece in pieces if piece.lane == 1} == {0, 1}
    assert {piece.call for piece in pieces if piece.lane == 0} == {0}
    link.held = False
    stack.pump()
    stack.take(m.StepDone, 2)
