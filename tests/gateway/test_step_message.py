"""A step on the wire: four parts, and the numbers of its worker."""

from array import array

from pannier.gateway.step_message import step_message
from pannier.wire import Dtype
from pannier.wire import messages as m
from pannier.wire.parts import check_parts
from tests.gateway.rig import LANE, step


def ints(message: m.Step, payload: bytearray, part: int) -> list[int]:
    """The numbers of one part."""
    place = message.parts[part]
    return array("i", bytes(payload[place.offset : place.offset + place.nbytes])).tolist()


def test_the_parts_hold_tokens_blocks_scored_tokens_and_masks() -> None:
    """In that order, masks as rows of whole words."""
    planned = step(
        4,
        token_ids=array("i", [5, -1]),
        blocks=array("i", [9, 8, 7]),
        scored_tokens=array("i", [6]),
        masks=(b"\x01\0\0\0\x02\0\0\0", b"\x03\0\0\0\x04\0\0\0"),
    )
    message, payload = step_message(planned, life=1, session=2, first_lane=LANE)
    check_parts(message.parts, len(payload))
    assert [part.shape for part in message.parts] == [(2,), (3,), (1,), (2, 2)]
    assert {part.dtype for part in message.parts} == {Dtype.INT32}
    assert [ints(message, payload, part) for part in range(4)] == [[5, -1], [9, 8, 7], [6], [1, 2, 3, 4]]


def test_what_a_step_does_not_have_is_an_empty_part() -> None:
    """There are always four."""
    planned = step(4, token_ids=array("i", [5]))
    message, payload = step_message(planned, life=1, session=2, first_lane=LANE)
    check_parts(message.parts, len(payload))
    assert [part.shape for part in message.parts] == [(1,), (0,), (0,), (0, 0)]


def test_everything_else_is_passed_on() -> None:
    """As the scheduler wrote it."""
    fields = {
        "segments": (m.Segment(m.SegmentKind.CHUNK, 0, 0, 0, 1, 0, 0, 0, 1),),
        "previous": (m.Previous(0, 3, 0),),
        "samples": (m.Sample(0, 1, 1, 0, 7, m.Filters(), -1, 1, -1),),
        "scores": (m.Score(1, 0, 1, 1, 0, 0),),
        "copies": (m.BlockCopy(0, 1, 2),),
        "states": (m.SamplerState(1, m.SamplerRules(), (5,), ()),),
    }
    planned = step(4, **fields)
    message, _ = step_message(planned, life=1, session=2, first_lane=LANE)
    assert (message.life, message.session, message.step, message.lane) == (1, 2, 4, 0)
    assert {name: getattr(message, name) for name in fields} == fields
