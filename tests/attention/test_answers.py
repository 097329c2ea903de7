"""The answers of attention workers are attention, whatever was stored by which step on whichever shard."""

from collections.abc import Sequence

import pytest
import torch

from pannier.ops import merge_partials
from pannier.wire import Dtype
from pannier.wire import messages as m
from pannier.wire.messages import SegmentKind

from .rig import (
    CALLS,
    LIFE,
    UNEVEN,
    WHOLE,
    Frame,
    Hand,
    MadeStep,
    Rows,
    Stored,
    answers_of,
    assert_answers,
    chunk,
    decode,
    dense,
    feed,
    kinds,
    make_core,
)

pytestmark = pytest.mark.timeout(30)


def plans(a: Stored, b: Stored, c: Stored) -> list[list[Rows]]:
    """Three sequences that come in chunks, grow beside each other, and decode."""
    return [
        [chunk(a, 7)],
        [chunk(a, 6), chunk(b, 3)],
        [decode(a), chunk(b, 1), chunk(c, 5)],
        [decode(a), decode(b), chunk(c, 4)],
        *[[decode(a), decode(b), decode(c)]] * 4,
    ]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("shards", [(WHOLE,), UNEVEN], ids=["whole", "uneven"])
def test_chunks_and_decode_rows(shards: Sequence[tuple[m.HeadRange, ...]], block_size: int) -> None:
    """Every step's answers are attention by definition, over unlike heads, windows and caps, shards side by side."""
    cores = [make_core(heads, block_size=block_size, num_blocks=80) for heads in shards]
    size = -(-20 // block_size)
    blocks = torch.randperm(3 * size, generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [Stored(blocks[i * size : (i + 1) * size]) for i in range(3)]
    hand = Hand(seed=block_size)
    for number, plan in enumerate(plans(*sequences)):
        made = hand.step(number, plan, shards)
        replies = [feed(core, step.frames) for core, step in zip(cores, made, strict=True)]
        assert_answers(replies, made[0].answers)
        assert all(kinds(own)[-1] == "StepWritten" for own in replies)


def test_a_fresh_prompt_is_shipped_one_way() -> None:
    """Its pieces, in whatever order, are acknowledged one by one and answered by nothing; they are there afterwards."""
    core, hand, sequence = make_core(), Hand(), Stored([3, 9, 2, 0])
    prompt = hand.only(0, [chunk(sequence, 13)], piece_rows=4)
    pieces = list(reversed(prompt.pieces))
    assert kinds(feed(core, [prompt.begin, *pieces])) == ["PieceWritten"] * len(CALLS) * 4
    assert kinds(feed(core, [prompt.end])) == ["StepWritten"]
    step = hand.only(1, [decode(sequence)])
    assert_answers([feed(core, step.frames)], step.answers)


@pytest.mark.parametrize("lse_from", [0, 2, 4, 9])
def test_log_sum_exps_only_of_the_rows_that_need_them(lse_from: int) -> None:
    """The answer has outputs of all rows, and log-sum-exps from one row on."""
    core, hand = make_core(), Hand()
    sequences = [Stored([3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)]
    feed(core, hand.only(0, [chunk(s, 5) for s in sequences]).frames)
    step = hand.only(1, [decode(sequences[0]), decode(sequences[1]), chunk(sequences[2], 2)], lse_from=lse_from)
    assert_answers([feed(core, step.frames)], step.answers, lse_from)


def narrowed(*steps: MadeStep) -> list[Frame]:
    """Frames whose q, k and v are in bfloat16."""
    return [
        (message, [t.bfloat16() if t.is_floating_point() else t for t in tensors])
        for step in steps
        for message, tensors in step.frames
    ]


def test_answers_in_the_wire_dtype() -> None:
    """Outputs travel in the wire dtype, log-sum-exps in fp32, whatever the cache stores."""
    core, hand, sequence = make_core(wire_dtype=Dtype.BFLOAT16), Hand(), Stored([0, 1])
    steps = hand.only(0, [chunk(sequence, 3)]), hand.only(1, [decode(sequence)])
    answers = answers_of(feed(core, narrowed(*steps)))
    assert {(o.dtype, lse.dtype) for o, lse in answers.values()} == {(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize(("kv_dtype", "converted"), [(Dtype.BFLOAT16, 0), (Dtype.FLOAT32, len(CALLS)), (Dtype.INT8, 0)])
def test_what_is_stored_in_another_type_is_counted(kv_dtype: Dtype, converted: int) -> None:
    """Once for each piece that comes; not 8 bits, which it is asked for to be rounded to."""
    core = make_core(wire_dtype=Dtype.BFLOAT16, kv_dtype=kv_dtype)
    feed(core, narrowed(Hand().only(0, [chunk(Stored([0, 1]), 3)])))
    assert core.counters["converted_pieces"] == converted


@pytest.mark.parametrize("stored", [(6, 4), (9, 1), (2, 8)])
def test_a_sequence_over_two_groups(stored: tuple[int, int]) -> None:
    """One group answers over the first part and stores nothing, the other holds the rest; merged they are the whole.

    Positions are absolute, so windows that reach over the border are right too.
    """
    first, rest = stored
    one, other = make_core(group=0), make_core(group=1)
    hands = Hand(group=0), Hand(group=1, seed=5)
    head, tail = Stored([0, 1, 2]), Stored([7, 5, 6])
    feed(one, hands[0].only(0, [chunk(head, first)]).frames)
    feed(other, hands[1].only(0, [chunk(tail, rest)]).frames)
    position = first + rest
    reads = m.Segment(SegmentKind.READ, 0, 0, 0, 3, first, position, 0, 1)
    grows = m.Segment(SegmentKind.DECODE, 1, first, 0, 3, rest, position, 0, 1)
    for core, segment, blocks in ((one, reads, head.blocks), (other, grows, tail.blocks)):
        begin = m.BeginStep(LIFE, 1, 1, 0, (segment,), (), ())
        feed(core, [(begin, [torch.tensor(blocks, dtype=torch.int32)])])
    for call, geometry in enumerate(CALLS):
        q, k, v = (
            torch.randn(1, heads, size)
            for heads, size in (
                (geometry.q_heads, geometry.k_size),
                (geometry.kv_heads, geometry.k_size),
                (geometry.kv_heads, geometry.v_size),
            )
        )
        piece = m.Piece(LIFE, 1, 1, 0, call, 0, True, 0, ())
        (read,) = answers_of(feed(one, [(piece, [q, k[:0], v[:0]])])).values()
        (grown,) = answers_of(feed(other, [(piece, [q, k, v])])).values()
        keys = torch.cat([head.keys[call], tail.keys[call], k])
        values = torch.cat([head.values[call], tail.values[call], v])
        o, lse = dense(call, q[0], position, keys, values, 0)
        merged_o, merged_lse = merge_partials(read[0], read[1], grown[0], grown[1])
        torch.testing.assert_close(merged_o[0], o, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged_lse[0], lse, rtol=1e-5, atol=1e-5)


def test_blocks_are_copied_before_anything_else() -> None:
    """Copies name whole blocks, read all sources first (a swap is a swap), and leave other groups' copies alone."""
    core, hand = make_core(), Hand()
    one, other = Stored([0, 1]), Stored([2, 3])
    feed(core, hand.only(0, [chunk(one, 6), chunk(other, 6)]).frames)
    copies = tuple(m.BlockCopy(0, *pair) for pair in ((0, 2), (2, 0), (1, 3), (3, 1)))
    one.blocks, other.blocks = other.blocks, one.blocks
    step = hand.only(1, [decode(one), decode(other)], copies=(*copies, m.BlockCopy(1, 0, 1)))
    assert_answers([feed(core, step.frames)], step.answers)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(Dtype.INT8, 0.05), (Dtype.FLOAT8_E4M3, 0.2)])
def test_eight_bits_are_nearly_what_came_and_copied_with_their_scales(kv_dtype: Dtype, tolerance: float) -> None:
    """Chunks and decode rows over what is stored, then over copies of it."""
    core, hand = make_core(kv_dtype=kv_dtype), Hand()
    one, other = Stored([0, 1, 4]), Stored([2, 3, 5])
    for number, plan in enumerate(([chunk(one, 6), chunk(other, 5)], [decode(one), chunk(other, 2)])):
        step = hand.only(number, plan)
        assert_answers([feed(core, step.frames)], step.answers, tolerance=tolerance)
    pairs = ((0, 2), (2, 0), (1, 3), (3, 1))
    one.blocks, other.blocks = [2, 3, 4], [0, 1, 5]
    step = hand.only(2, [decode(one), decode(other)], copies=tuple(m.BlockCopy(0, *pair) for pair in pairs))
    assert_answers([feed(core, step.frames)], step.answers, tolerance=tolerance)
