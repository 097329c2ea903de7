"""Every message survives the wire, and nothing else is let in."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pannier.wire import (
    ClientToGateway,
    ComputeToAttention,
    Decoder,
    Dtype,
    GatewayToClient,
    GatewayToWorkerData,
    WireError,
    WorkerToGateway,
    WorkerToGatewayData,
    encode,
    lay_out,
    payload_bytes,
)
from pannier.wire import messages as m

from .strategies import DIRECTIONS, MESSAGES, direction_of, header, messages

pytestmark = pytest.mark.timeout(30)
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def decode(union: Any, *frames: bytes) -> Any:
    return Decoder[m.Message](union).decode(frames)[0]


def test_every_message_travels_in_some_direction() -> None:
    """No message is forgotten in the unions, and each union holds messages only."""
    assert {kind for union in DIRECTIONS.values() for kind in get_args(union)} == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[m.Message]) -> None:
    """What is sent is what is received, payload included."""

    @quick
    @given(messages(kind), st.randoms())
    def check(message: m.Message, random: Any) -> None:
        parts = getattr(message, "parts", ())
        payload = random.randbytes(payload_bytes(parts)) if parts else None
        received, received_payload = Decoder[m.Message](direction_of(kind)).decode(encode(message, payload))
        assert received == message
        assert type(received) is kind
        assert bytes(received_payload) == (payload or b"")

    check()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_surplus_and_missing_fields_are_refused(kind: type[m.Message]) -> None:
    """A message with one field too many, or without its first, is no message."""

    @settings(quick, max_examples=5)
    @given(messages(kind))
    def check(message: m.Message) -> None:
        union, fields = direction_of(kind), header(message)
        for spoilt in ([*fields, None], [*fields, 0], [*fields, []], fields[:1]):
            with pytest.raises(WireError, match="array"):
                decode(union, msgspec.msgpack.encode(spoilt))

    check()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_field_of_another_type_is_refused(kind: type[m.Message]) -> None:
    """Whichever field has a value of a type that no field has, the message is refused and the field named."""

    @settings(quick, max_examples=5)
    @given(messages(kind))
    def check(message: m.Message) -> None:
        fields = header(message)
        for place in range(1, len(fields)):
            spoilt = [*fields[:place], b"bytes are in no message", *fields[place + 1 :]]
            with pytest.raises(WireError, match=rf"\[{place}\]"):
                decode(direction_of(kind), msgspec.msgpack.encode(spoilt))

    check()


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (WorkerToGateway, m.Fence(1, "c0", 2)),
        (WorkerToGatewayData, m.Goodbye("")),
        (GatewayToWorkerData, m.Fenced(1, "c0", 2)),
        (ComputeToAttention, m.StepWritten(1, 2, 3, 0)),
        (ClientToGateway, m.Failed("r", "invalid", None, "")),
        (GatewayToClient, m.Cancel("r")),
    ],
)
def test_a_message_of_another_direction_is_refused(union: Any, message: m.Message) -> None:
    """A direction takes its own messages only."""
    with pytest.raises(WireError, match=r"tag|Invalid"):
        decode(union, *map(bytes, encode(message)))


@quick
@given(st.sampled_from(sorted(DIRECTIONS)), st.binary(max_size=64))
def test_noise_is_refused(direction: str, noise: bytes) -> None:
    """Bytes that are no message raise `WireError` and nothing else."""
    with pytest.raises(WireError):
        decode(DIRECTIONS[direction], noise)


def test_text_that_is_not_utf8_is_refused() -> None:
    """Invalid text is a `WireError` as any other fault."""
    with pytest.raises(WireError, match="UTF-8"):
        decode(ClientToGateway, b"\x92\xa6Cancel\xa1\xff")


def test_bottomless_nesting_is_refused() -> None:
    """A status nested deeper than the interpreter goes is a `WireError`, not a crash of the client."""
    with pytest.raises(WireError):
        decode(GatewayToClient, b"\x93\xa6Status\xa1r" + b"\x81\xa1k" * 100_000)


SEGMENT = m.Segment(m.SegmentKind.CHUNK, 0, 0, 0, 2, 16, 16, 0, 4)
PIECE = m.Piece(1, 2, 3, 0, 4, 5, True, 6, lay_out([(Dtype.BFLOAT16, (1, 2, 3))]))


@pytest.mark.parametrize("field", [name for name in m.Segment.__struct_fields__ if name != "kind"])
def test_negative_numbers_of_a_segment_are_refused(field: str) -> None:
    """No count and no place of a segment is negative, or too large to be one."""
    for value in (-1, 2**31, 2**63):
        segment = msgspec.structs.replace(SEGMENT, **{field: value})
        begin = m.BeginStep(1, 2, 3, 0, (segment,), (), lay_out([(Dtype.INT32, (2,))]))
        with pytest.raises(WireError, match="int"):
            decode(ComputeToAttention, *map(bytes, encode(begin, bytes(8))))


@pytest.mark.parametrize("field", ["lane", "call", "first_stored_row", "lse_from"])
def test_negative_numbers_of_a_piece_are_refused(field: str) -> None:
    """A negative place would count from the end, and write where nobody meant to."""
    piece = msgspec.structs.replace(PIECE, **{field: -1})
    with pytest.raises(WireError, match=">= 0"):
        decode(ComputeToAttention, *map(bytes, encode(piece, bytes(12))))


def test_more_log_probabilities_than_allowed_are_refused() -> None:
    """A sample asks for at most 20 alternatives."""
    _refuse_sample(msgspec.structs.replace(SAMPLE, top_logprobs=21))


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -0.5), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1)]
)
def test_filters_out_of_range_are_refused(field: str, value: float) -> None:
    """A temperature is not negative, top_p is a share of more than nothing."""
    filters = msgspec.structs.replace(SAMPLE.filters, **{field: value})
    _refuse_sample(msgspec.structs.replace(SAMPLE, filters=filters))


SAMPLE = m.Sample(0, 1, 2, 0, 3, m.Filters(), 20, 0, -1)


def _refuse_sample(spoilt: m.Sample) -> None:
    step = m.Step(1, 2, 3, 0, (), (), (spoilt,), (), (), (), ())
    with pytest.raises(WireError, match="Expected"):
        decode(GatewayToWorkerData, *map(bytes, encode(step)))


TIMES = m.StepTimes(1.0, 0.5, 0.25, 0.125, 0.0625, 1.5)
GOLDEN: list[tuple[m.Message, str]] = [
    (
        m.Fence(7, "c0", 3),
        "94a546656e636507a2633003",
    ),
    (
        m.EndStep(1, 2, 3, 0, 31),
        "96a7456e6453746570010203001f",
    ),
    (
        PIECE,
        "9aa55069656365010203000405c3069193a4626631369301020300",
    ),
    (
        m.BeginStep(1, 2, 3, 1, (SEGMENT,), (m.BlockCopy(0, 5, 6),), lay_out([(Dtype.INT32, (2,))])),
        "9aa9426567696e5374657001020301919901000000021010000491930005069193a3693332910200c090",
    ),
    (
        m.StepDone(1, 2, 3, 0, (m.Drawn(9, 42, -0.5, (m.TopLogprob(42, -0.5),)),), (), TIMES),
        "98a853746570446f6e65010203009194092acbbfe000000000000091922acbbfe00000000000009096cb3ff0000000000000cb3fe0000000000000cb3fd0000000000000cb3fc0000000000000cb3fb0000000000000cb3ff8000000000000",
    ),
    (
        m.Delta("r1", 0, "wörd", (5,), (), (), "stop", m.Usage(3, 0, 1)),
        "99a544656c7461a2723100a577c3b6726491059090a473746f7093030001",
    ),
]


@pytest.mark.parametrize(("message", "hexadecimal"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message: m.Message, hexadecimal: str) -> None:
    """These bytes are protocol 9: whoever changes them raises `PROTOCOL`."""
    parts = getattr(message, "parts", ())
    payload = bytes(payload_bytes(parts)) if parts else None
    assert bytes(encode(message, payload)[0]).hex() == hexadecimal
    assert m.PROTOCOL == 9
