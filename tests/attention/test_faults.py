"""What is stale writes nothing; what is malformed fails its own step, and the lane goes on."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from pannier.attention.core import AttentionCore
from pannier.ops.kv_cache import KVCache
from pannier.runtime.errors import DeviceError
from pannier.wire import Dtype
from pannier.wire import messages as m
from pannier.wire.messages import SegmentKind

from .rig import (
    LIFE,
    Frame,
    Hand,
    MadeStep,
    Stored,
    assert_answers,
    chunk,
    contents,
    decode,
    feed,
    kinds,
    make_core,
    unchanged,
)

pytestmark = pytest.mark.timeout(30)


def changed(frame: Frame, **fields: Any) -> Frame:
    return msgspec.structs.replace(frame[0], **fields), frame[1]


# --- the past ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [{"life": LIFE + 1}, {"life": LIFE - 1}, {"session": 1}, {"step": 4}, {"step": 5}])
def test_frames_of_the_past_are_dropped_and_counted(stale: dict[str, int]) -> None:
    """A frame of another life, of a session before the present one, or of a step that is over does nothing."""
    core, hand, sequence = make_core(), Hand(session=2), Stored([0, 1, 2])
    feed(core, hand.only(5, [chunk(sequence, 5)]).frames)
    before = contents(core)
    step = hand.only(6, [decode(sequence)])
    assert feed(core, [changed(frame, **stale) for frame in step.frames]) == []
    assert core.counters["stale_frames"] == len(step.frames)
    assert unchanged(core, before)
    assert_answers([feed(core, step.frames)], step.answers)


def test_before_it_is_assigned_a_worker_takes_nothing() -> None:
    """Without blocks every frame is stale."""
    from pannier.attention.core import AttentionCore

    core = AttentionCore(torch.device("cpu"))
    assert feed(core, Hand().only(0, [chunk(Stored([0]), 2)]).frames) == []
    assert core.counters["stale_frames"] == 5


def test_a_fenced_session_writes_nothing() -> None:
    """After a fence its late pieces, begun step or not, leave no byte behind, and are answered by nothing."""
    core, hand = make_core(), Hand(session=3)
    step = hand.only(0, [chunk(Stored([0, 1, 2]), 10)])
    first, *late = step.pieces
    feed(core, [step.begin, first])
    assert core.fence(m.Fence(LIFE, "c0", 3)) == m.Fenced(LIFE, "c0", 3)
    before = contents(core)
    new_lane = [changed(frame, lane=1) for frame in step.frames]
    assert feed(core, [*late, step.end, *new_lane, *hand.only(1, [chunk(Stored([3]), 2)]).frames]) == []
    assert unchanged(core, before)
    assert core.counters["stale_frames"] == len(late) + 1 + len(step.frames) + 5


def test_a_stopped_worker_that_wakes_up_spoils_no_one_elses_blocks() -> None:
    """Its blocks are in use by the next session when its late pieces come: the answers are those of the new owner."""
    core, stopped, new = make_core(), Hand(session=1), Hand(session=2, seed=9)
    left = stopped.only(0, [chunk(Stored([4, 5, 6]), 10)])
    feed(core, [left.begin, left.pieces[0]])
    core.fence(m.Fence(LIFE, "c0", 1))
    owner = Stored([6, 5, 4])
    feed(core, new.only(0, [chunk(owner, 9)]).frames)
    feed(core, [*left.pieces[1:], left.end])
    step = new.only(1, [decode(owner)])
    assert_answers([feed(core, step.frames)], step.answers)


def test_a_fence_ends_one_compute_worker_only() -> None:
    """Others go on in mid-step; fencing twice, or somebody unknown, is fine; a later session is not fenced."""
    core, fenced, other = make_core(), Hand(session=1), Hand(session=1, seed=3)
    mine, theirs = fenced.only(0, [chunk(Stored([0]), 3)]), other.only(0, [chunk(Stored([1]), 3)])
    feed(core, [mine.begin], "c0")
    feed(core, [theirs.begin], "c1")
    for name, session in (("c0", 1), ("c0", 1), ("nobody", 7)):
        assert core.fence(m.Fence(LIFE, name, session)) == m.Fenced(LIFE, name, session)
    assert kinds(feed(core, [*theirs.pieces, theirs.end], "c1"))[-1] == "StepWritten"
    assert feed(core, mine.pieces, "c0") == []
    again = Hand(session=2).only(0, [chunk(Stored([0]), 3)])
    feed(core, [again.begin], "c0")
    core.fence(m.Fence(LIFE, "c0", 1))
    assert kinds(feed(core, [*again.pieces, again.end], "c0"))[-1] == "StepWritten"


def test_a_new_session_ends_the_one_before() -> None:
    """The first frame of a later session drops what the former one had under way."""
    core, former, latter = make_core(), Hand(session=1), Hand(session=2)
    step = former.only(0, [chunk(Stored([0]), 3)])
    feed(core, [step.begin])
    assert kinds(feed(core, latter.only(0, [chunk(Stored([1]), 3)]).frames))[-1] == "StepWritten"
    before = contents(core)
    assert feed(core, [*step.pieces, step.end]) == []
    assert unchanged(core, before)


def test_a_new_assignment_forgets_everything() -> None:
    """Blocks, sessions and steps of the former group are gone with it."""
    core, hand = make_core(), Hand()
    step = hand.only(0, [chunk(Stored([0]), 3)])
    feed(core, [step.begin])
    assert core.shard is not None
    core.assign(msgspec.structs.replace(core.shard.assign, life=LIFE + 1))
    assert feed(core, [*step.pieces, step.end]) == []
    assert all(stored.isnan().all() for stored in contents(core))


# --- aborted steps ----------------------------------------------------------------------------------------------------


def abort_of(step: MadeStep) -> Frame:
    begin = step.begin[0]
    return m.AbortStep(begin.life, begin.session, begin.step, begin.lane), []


@pytest.mark.parametrize("received", [0, 1, 2, 4, 5])
def test_an_aborted_step_writes_nothing_more(received: int) -> None:
    """Aborted before it began, in the middle, or when it was over: acknowledged; what comes later writes nothing."""
    core, hand, kept = make_core(), Hand(), Stored([0, 1])
    feed(core, hand.only(0, [chunk(kept, 5)]).frames)
    step = hand.only(1, [chunk(Stored([2]), 4)], piece_rows=4)
    feed(core, step.frames[:received])
    assert kinds(feed(core, [abort_of(step)])) == ["StepAborted"]
    before = contents(core)
    assert feed(core, step.frames[received:]) == []
    assert unchanged(core, before)
    following = hand.only(2, [decode(kept)])
    assert_answers([feed(core, following.frames)], following.answers)


def test_aborting_twice_is_fine() -> None:
    """Each abort is acknowledged, be the step long over."""
    core, hand = make_core(), Hand()
    steps = [hand.only(number, [chunk(Stored([number]), 2)]) for number in range(3)]
    for step in steps:
        feed(core, step.frames)
    assert kinds(feed(core, [abort_of(steps[0]), abort_of(steps[2]), abort_of(steps[2])])) == ["StepAborted"] * 3


# --- malformed steps --------------------------------------------------------------------------------------------------

STORED = m.Segment(SegmentKind.CHUNK, 0, 0, 0, 2, 3, 3, 0, 2)
"""Two rows behind three stored tokens, in blocks 2 and 5 of 4 tokens each."""


def begin(segment: m.Segment, *copies: m.BlockCopy, tables: torch.Tensor | None = None) -> Frame:
    blocks = torch.tensor([2, 5], dtype=torch.int32) if tables is None else tables
    return m.BeginStep(LIFE, 1, 1, 0, (segment,), copies, ()), [blocks]


def segment(**fields: Any) -> m.Segment:
    return msgspec.structs.replace(STORED, **fields)


BAD_BEGINS: dict[str, tuple[Frame, str]] = {
    "another group": (begin(segment(group=3)), "group 3 came to a worker of group 0"),
    "block too large": (begin(STORED, tables=torch.tensor([2, 40], dtype=torch.int32)), "block outside 0..39"),
    "block negative": (begin(STORED, tables=torch.tensor([-1, 2], dtype=torch.int32)), "block outside 0..39"),
    "no room": (begin(segment(num_stored=7)), "9 tokens do not fit 2 blocks of 4"),
    "no room to read": (begin(segment(kind=SegmentKind.READ, num_stored=9)), "9 tokens do not fit"),
    "blocks not sent": (begin(segment(num_blocks=3)), "blocks 0 to 3 are not there"),
    "blocks elsewhere": (begin(segment(first_block=7)), "blocks 7 to 9 are not there"),
    "long decode": (begin(segment(kind=SegmentKind.DECODE)), "a decode segment has one row, not 2"),
    "copy from nowhere": (begin(STORED, m.BlockCopy(0, 99, 1)), "block 99 does not exist"),
    "copied over": (begin(STORED, m.BlockCopy(0, 3, 1), m.BlockCopy(0, 4, 1)), "each may be written once"),
    "no tables": ((begin(STORED)[0], []), "one int32 list of block tables"),
    "wrong tables": (begin(STORED, tables=torch.zeros(2)), "one int32 list of block tables"),
    "square tables": (begin(STORED, tables=torch.zeros(2, 2, dtype=torch.int32)), "one int32 list of block tables"),
}


def q_k_v(piece: Frame) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = piece[1]
    return q, k, v


BAD_PIECES: dict[str, tuple[Callable[[Frame], Frame], str]] = {
    "call too large": (lambda p: changed(p, call=3), "call 3 is not among those of the step"),
    "no tensors": (lambda p: (p[0], []), "a piece has k and v"),
    "no query": (lambda p: (p[0], p[1][1:]), "a request q before them"),
    "surplus": (lambda p: (p[0], [*p[1], p[1][0]]), "a piece has k and v"),
    "scalar k": (lambda p: (p[0], [p[1][0], torch.tensor(1.0), p[1][2]]), "not shapes"),
    "flat q": (lambda p: (p[0], [p[1][0].flatten(1), *p[1][1:]]), "not shapes"),
    "heads of k": (lambda p: (p[0], [p[1][0], p[1][1][:, 1:], p[1][2]]), "rows and heads"),
    "size of v": (lambda p: (p[0], [*p[1][:2], p[1][2][..., 1:]]), "rows and heads"),
    "rows of v": (lambda p: (p[0], [*p[1][:2], p[1][2][1:]]), "rows and heads"),
    "rows beyond": (lambda p: changed(p, first_stored_row=1), "rows and heads"),
    "rows of q": (lambda p: (p[0], [p[1][0][1:], *p[1][1:]]), "call 0: q"),
    "heads of q": (lambda p: (p[0], [p[1][0][:, 1:], *p[1][1:]]), "call 0: q"),
    "dtype of q": (lambda p: (p[0], [p[1][0].bfloat16(), *p[1][1:]]), "bfloat16 came where torch.float32"),
    "dtype of k": (lambda p: (p[0], [p[1][0], p[1][1].double(), p[1][2]]), "float64 came where torch.float32"),
    "begun twice": (lambda _: begin(STORED), "step 1 began twice"),
}


def fails_and_goes_on(frames: list[Frame], spoilt: Frame, reason: str) -> None:
    """The spoilt frame fails its step, later frames of the step are stale, and the lane's next step is answered."""
    core, hand, kept = make_core(), Hand(), Stored([0, 1])
    feed(core, hand.only(0, [chunk(kept, 5)]).frames)
    before = contents(core)
    feed(core, frames)
    ((failed, tensors),) = feed(core, [spoilt])
    assert isinstance(failed, m.StepFailed)
    assert (failed.step, tensors) == (1, [])
    assert reason in failed.reason
    assert feed(core, [(m.EndStep(LIFE, 1, 1, 0, 3), [])]) == []
    assert unchanged(core, before, but_for=(2, 5))
    following = hand.only(2, [decode(kept)])
    assert_answers([feed(core, following.frames)], following.answers)
    assert core.counters["failed_steps"] == 1


@pytest.mark.parametrize("name", BAD_BEGINS)
def test_a_step_that_does_not_fit_fails(name: str) -> None:
    """What a step's beginning says must fit the cache, else it fails with the reason and changes nothing."""
    fails_and_goes_on([], *BAD_BEGINS[name])


@pytest.mark.parametrize("name", BAD_PIECES)
def test_a_piece_that_does_not_fit_fails(name: str) -> None:
    """A piece must have the shapes and dtypes of its call and rows, else its step fails; others keep their blocks."""
    spoil, reason = BAD_PIECES[name]
    sequence = Stored([2, 5])
    hand = Hand(seed=4)
    hand.only(0, [chunk(sequence, 3)])
    step = hand.only(1, [chunk(sequence, 2)])
    fails_and_goes_on([step.begin], spoil(step.pieces[0]), reason)


def test_a_step_that_fails_after_waiting_is_named() -> None:
    """A malformed step that had to wait for the one before it fails under its own number; the one before is written."""
    core, hand, sequence = make_core(), Hand(), Stored([0, 1])
    first = hand.only(0, [chunk(sequence, 5)])
    feed(core, [first.begin, *first.pieces])
    assert feed(core, [begin(segment(group=3))]) == []
    replies = feed(core, [first.end])
    assert [(type(message), message.step) for message, _ in replies] == [(m.StepWritten, 0), (m.StepFailed, 1)]
    following = hand.only(2, [decode(sequence)])
    assert_answers([feed(core, following.frames)], following.answers)


def test_blocks_that_no_memory_is_left_for() -> None:
    """One sentence, with what torch says."""

    def full(*_: object) -> KVCache:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    core = AttentionCore(torch.device("cpu"), full)
    assign = m.AttentionAssign(
        1, 0, 0, (m.CallGeometry(1, 1, 8, 8, 1.0, 0, 0.0),), (m.HeadRange(0, 1),), 9, 16, Dtype.FLOAT32, Dtype.FLOAT32
    )
    with pytest.raises(DeviceError, match="cpu has no room for 9 KV blocks: tried to allocate"):
        core.assign(assign)
