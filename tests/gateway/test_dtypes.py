"""Element types of blocks and links: chosen from what workers compute, and whoever can't join in is told so."""

import pytest

from pannier.gateway.dtypes import choose_dtypes
from pannier.gateway.fleet import Fleet, FleetConfig
from pannier.runtime.errors import NotAccepted
from pannier.wire import Dtype
from pannier.wire import messages as m

F32, BF16, F16 = Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16
INT8, FP8 = Dtype.INT8, Dtype.FLOAT8_E4M3
CALLS = (m.CallGeometry(4, 4, 8, 8, 1.0, 0, 0.0),)


@pytest.mark.parametrize(
    ("own", "wanted", "native", "chosen"),
    [
        (BF16, None, {F32, BF16, F16}, (BF16, BF16)),
        (BF16, None, {F32, F16}, (F16, F16)),
        (BF16, None, {F32}, (F32, F32)),
        (F16, None, {F32, BF16}, (F32, F32)),
        (F32, None, {F32, BF16, F16}, (F32, F32)),
        (BF16, F16, {F32, BF16, F16}, (F16, F16)),
        (F32, BF16, {F32, BF16}, (BF16, BF16)),
        (BF16, F32, {F32, BF16}, (F32, BF16)),
        (BF16, INT8, {F32, BF16, INT8}, (INT8, BF16)),
        (F32, INT8, {F32, BF16, INT8}, (INT8, F32)),
        (BF16, FP8, {F32, F16, FP8}, (FP8, F16)),
        (BF16, FP8, {F32, FP8}, (FP8, F32)),
    ],
)
def test_links_carry_the_narrower_type(
    own: Dtype, wanted: Dtype | None, native: set[Dtype], chosen: tuple[Dtype, Dtype]
) -> None:
    """So that rounding is done before sending. Blocks have the model's type where attention computes it. 8 bits are
    only stored: links carry what they would without."""
    found = choose_dtypes(own, wanted, native)
    assert (found.kv.dtype, found.wire.dtype) == chosen


class Gateway:
    """A fleet that waits for two attention workers."""

    def __init__(self, kv_dtype: Dtype | None = None) -> None:
        self.fleet = Fleet(FleetConfig(1, "m", "d", 1, 2, 16, kv_dtype, None, 64))
        self._join("compute", m.ComputeFacts("m", "d", "cpu", "bfloat16", BF16, 1, CALLS, 100, 64, 0), None)

    def attention(self, name: str, *dtypes: Dtype) -> None:
        """One joins."""
        self._join(name, None, m.AttentionFacts("cuda:0", 1 << 20, 1e9, dtypes, f"ipc://{name}"))

    def _join(self, name: str, *facts: m.ComputeFacts | m.AttentionFacts | None) -> None:
        self.fleet.accept(m.Hello(m.PROTOCOL, name, 1, 1, "h", "l", *facts))  # type: ignore[arg-type]
        self.fleet.joined(name)


def test_what_all_attention_workers_compute_is_assigned() -> None:
    gateway = Gateway()
    gateway.attention("a", F32, BF16, F16)
    gateway.attention("b", F32, F16)
    assert [(assign.kv_dtype, assign.wire_dtype) for _, assign in gateway.fleet.new_groups()] == [(F16, F16)] * 2


def test_every_attention_worker_must_be_able_to_keep_the_type_that_is_wanted() -> None:
    """One error names the worker, what it computes and what is missing."""
    gateway = Gateway(kv_dtype=BF16)
    gateway.attention("a", F32, BF16)
    with pytest.raises(NotAccepted, match=r"b \(cuda:0\) keeps K and V in float32, float16, and not in bfloat16"):
        gateway.attention("b", F32, F16)


def test_who_comes_later_must_compute_what_was_chosen() -> None:
    gateway = Gateway()
    gateway.attention("a", F32, BF16, F16)
    gateway.attention("b", F32, BF16)
    assert gateway.fleet.new_groups()
    gateway.attention("c", F32, BF16)
    with pytest.raises(NotAccepted, match=r"d .* not in bfloat16"):
        gateway.attention("d", F32, F16)


def test_eight_bits_leave_room_for_their_scales() -> None:
    """Blocks are counted with them, and a worker that can't store 8 bits is told so."""
    gateway = Gateway(kv_dtype=INT8)
    gateway.attention("a", F32, BF16, INT8)
    with pytest.raises(NotAccepted, match=r"b .* keeps K and V in float32, bfloat16, and not in int8"):
        gateway.attention("b", F32, BF16)
    gateway.attention("b", F32, BF16, INT8)
    assigns = gateway.fleet.new_groups()
    assert {(assign.kv_dtype, assign.wire_dtype) for _, assign in assigns} == {(INT8, BF16)}
    per_head = 2 * (8 + 4)  # a key and a value of 8 elements, with a scale in fp32 each
    assert {assign.num_blocks for _, assign in assigns} == {(1 << 20) // (2 * per_head * 16)}
    assert gateway.fleet.config.token_bytes(gateway.fleet.compute["compute"].facts) == 4 * per_head
