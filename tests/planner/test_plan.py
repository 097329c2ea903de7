from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.planner.figures import NO_GOAL, Figures, Goal, Prompts
from pannier.planner.homogeneous import Homogeneous
from pannier.planner.mix import Mix
from pannier.planner.offloaded import NO_LIMIT, Offloaded, Wire
from pannier.planner.search import Question, search
from pannier.planner.sensitivity import (
    LINKS,
    is_enough,
    over_links,
    paper_bandwidth,
    smallest_link,
    with_link,
)
from pannier.planner.sizes import CallSize, ModelSizes
from pannier.planner.trace import TraceRequest
from pannier.planner.verdict import Gain, judge
from pannier.scheduler import PlacementError
from tests.planner.engines import MODEL, kind, offloaded

MIX = Mix.unbiased("even", 900, 200)


def figures(layout: Offloaded, goal: Goal = NO_GOAL) -> Figures:
    found = layout.figures(goal)
    assert found is not None
    return found


def test_the_parts_of_a_lane_step_are_the_formulas() -> None:
    """Weights by bandwidth, K and V of a thousand tokens by two devices, payload by the slower network."""
    step = offloaded().step(8)
    assert step.rows == 4
    assert step.parts.compute_s == pytest.approx(2e9 / 1e9)
    assert step.parts.attention_s == pytest.approx(4 * 1000 * 10_240 / 2e9)
    assert (step.sent_bytes, step.returned_bytes) == (4 * 30_720, 4 * 20_480)
    assert step.parts.transfer_s == pytest.approx(4 * (30_720 + 20_480) / 1e9)
    assert step.bound.held_by == "compute"


def test_many_rows_are_held_by_arithmetic() -> None:
    """2 N a row."""
    step = offloaded(attention_devices=8).step(8000)
    assert step.compute_held_by == "arithmetic"
    assert step.parts.compute_s == pytest.approx(4000 * 2e9 / 1e12)


def test_a_lane_step_is_bound_as_the_design_says() -> None:
    """Half the sum with two lanes where that is the most; the sum with one."""
    slow = offloaded(wire=Wire(round_trip_s=0.3))
    step = slow.step(8)
    assert step.bound.held_by == "round trip"
    assert step.bound.seconds == pytest.approx(sum(step.parts) / 2)
    assert step.exposed_s == pytest.approx(step.bound.seconds - 2.0)
    assert step.period_s == pytest.approx(sum(step.parts))
    alone = replace(slow, lanes_per_stage=1).step(8)
    assert alone.bound.seconds == pytest.approx(sum(alone.parts))


def test_replicas_share_the_attention_pool_and_stages_share_the_weights() -> None:
    two = offloaded(compute_devices=2).step(16)
    assert two.rows == 4
    stages = offloaded(compute_devices=2, stages=2, model=MODEL).step(16)
    assert stages.bound.seconds == pytest.approx(1.0)  # half of the weights each
    assert stages.period_s == pytest.approx(4.0)  # four lanes


def test_the_busier_direction_of_the_network_can_hold_a_step() -> None:
    """Where more goes out than comes back half of the sum is less than the way out alone."""
    model = ModelSizes.dense("mha", weights_bytes=2e6, layers=10, width=1024, queries_per_kv=1)
    step = offloaded(model=model, compute=kind(network=1e6)).step(8)
    assert step.bound.held_by == "link"
    assert step.bound.seconds == pytest.approx(step.sent_bytes / 1e6)


def test_single_connections_limit_a_link_and_several_share_it() -> None:
    """Half of the heads go to each of two devices, over a connection of a tenth of the network, or several."""
    one = offloaded(wire=Wire(round_trip_s=0.0, flow=1e8)).step(8)
    assert one.parts.transfer_s == pytest.approx(4 * 51_200 / 2 / 1e8)
    four = offloaded(wire=Wire(round_trip_s=0.0, flow=1e8, flows=4)).step(8)
    assert four.parts.transfer_s == pytest.approx(one.parts.transfer_s / 4)
    many = offloaded(wire=Wire(round_trip_s=0.0, flow=1e8, flows=20)).step(8)
    assert many.parts.transfer_s == pytest.approx(4 * 51_200 / 1e9)


def test_heads_are_split_as_the_engine_splits_them() -> None:
    """Eight KV heads over three devices: three of them set the pace, and two are 3 + 3 + 2."""
    model = ModelSizes.dense("eight", weights_bytes=2e9, layers=10, width=1024, queries_per_kv=1)
    layout = offloaded(model=model, attention_devices=3)
    shards = [shard.heads[0].stop - shard.heads[0].start for shard in layout.groups[0].shards]
    assert sorted(shards) == [2, 3, 3]
    step = layout.step(2)
    assert step.parts.attention_s == pytest.approx(1000 * 40_960 * 3 / 8 / 1e9)


def test_more_devices_than_heads_form_groups_that_share_the_sequences() -> None:
    layout = offloaded(attention_devices=4)  # two KV heads
    assert [len(group.shards) for group in layout.groups] == [2, 2]
    assert layout.step(8).parts.attention_s == pytest.approx(4 * 1000 * 10_240 / 4e9)


def test_what_the_engine_would_refuse_is_never_recommended() -> None:
    """Attention workers without room for one block."""
    tiny = kind(memory_bytes=1e4)
    with pytest.raises(PlacementError):
        offloaded(attention=tiny).figures()
    answer = search(Question(model=MODEL, mix=MIX, has_prefill=False), kind(), tiny)
    assert answer.offloaded is None
    assert "can't hold a block" in judge(answer).sentence


def test_memory_decides_how_many_sequences_there_are() -> None:
    """Of three GB each: blocks of 64 tokens, and half a block of each sequence is empty."""
    layout = offloaded()
    tokens = layout.groups[0].num_blocks * 64
    assert tokens == pytest.approx(2 * 3e9 / 10_240, abs=64)
    found = figures(layout)
    assert (found.sequences, found.sequences_held_by) == (int(tokens / 1032), "memory")
    assert found.tokens_per_s == pytest.approx(found.sequences / found.tpot_s)
    assert found.usd_per_mtok == pytest.approx(3 / 3600 / found.tokens_per_s * 1e6)


def test_a_goal_is_kept_by_the_most_sequences_that_can() -> None:
    layout = offloaded(wire=Wire(round_trip_s=0.0, limit=1e6))
    free = figures(layout)
    found = figures(layout, Goal(tpot_s=free.tpot_s / 2))
    assert found.sequences < free.sequences
    assert found.sequences_held_by == "TPOT"
    assert found.tpot_s <= free.tpot_s / 2 < layout.step(found.sequences + 1).period_s
    assert layout.figures(Goal(tpot_s=1e-3)) is None
    prompts = replace(layout, has_prefill=True)
    assert figures(prompts, Goal(ttft_s=30.0)).sequences_held_by == "TTFT"


def test_weights_that_do_not_fit_need_stages() -> None:
    small = kind(memory_bytes=1.5e9)
    assert offloaded(compute=small).figures() is None
    assert offloaded(compute=small, compute_devices=2, stages=2).figures() is not None


def test_the_homogeneous_engine_takes_turns_on_its_devices() -> None:
    """What the weights leave of its memory is for K and V; compute and attention take turns."""
    engine = Homogeneous(model=MODEL, mix=MIX, kind=kind(), devices=1, has_prefill=False, waste=0.0)
    assert engine.room == int(1e9 / 10_240 / 1000)
    step = engine.step(10)
    assert step.parts == pytest.approx((2.0, 10 * 1000 * 10_240 / 1e9, 0.0))
    assert step.period_s == pytest.approx(sum(step.parts))


def test_devices_of_one_instance_share_a_step_and_instances_take_turns() -> None:
    together = Homogeneous(model=MODEL, mix=MIX, kind=kind(devices=2), devices=2, has_prefill=False)
    in_turn = Homogeneous(model=MODEL, mix=MIX, kind=kind(), devices=2, has_prefill=False)
    assert (together.at_once, together.stages, in_turn.at_once, in_turn.stages) == (2, 1, 1, 2)
    assert together.step(10).parts.compute_s == pytest.approx(1.0)
    assert in_turn.step(10).parts.compute_s == pytest.approx(2.0)
    assert in_turn.step(10).rows == 5


def test_prompts_cost_what_their_rows_cost() -> None:
    """In the time of a token each of ten sequences ends a two-hundredth of itself, and another begins."""
    mix = Mix.equal(900, 200)
    prompts = Prompts.of(mix, 10, chunk=2048)
    assert prompts.begun == pytest.approx(0.05)
    assert prompts.rows == pytest.approx(45)
    assert prompts.pairs == pytest.approx(0.05 * 900 * 901 / 2)
    assert (prompts.past_rows, prompts.past_tokens) == (0, 0)
    chunked = Prompts.of(mix, 10, chunk=300)
    assert chunked.past_rows == pytest.approx(0.05 * 600)
    assert chunked.past_tokens == pytest.approx(0.05 * (300 + 600))
    assert chunked.pairs + chunked.past_pairs == pytest.approx(prompts.pairs)


def test_the_context_that_a_step_meets_is_biased_by_length() -> None:
    """A request of 10 tokens is met once for every ten times of one of 100."""
    requests = [TraceRequest(0.0, 100, 10), TraceRequest(0.0, 1000, 100)]
    mix = Mix.of("two", requests)
    assert (mix.prompt, mix.output) == (550, 55)
    assert mix.context == pytest.approx((10 * 105.5 + 100 * 1050.5) / 110)
    assert Mix.of("one", requests[:1]).context == Mix.equal(100, 10).context
    with pytest.raises(ValueError, match="no requests"):
        Mix.of("none", [])


def test_the_factors_of_the_gain_multiply_to_the_ratio_of_the_costs() -> None:
    """FastAFD's identity, with prices: for every division that was tried."""
    answer = search(Question(model=MODEL, mix=MIX, has_prefill=False), kind(usd_per_hour=3.0), kind())
    assert answer.homogeneous is not None
    _, rival = answer.homogeneous
    for found in answer.tried:
        gain = Gain.of(found.layout, found.figures, rival)
        assert gain.product == pytest.approx(rival.usd_per_mtok / found.figures.usd_per_mtok)
        assert gain.devices == found.layout.attention_devices / found.figures.devices


def test_cheap_memory_pays_and_a_slow_network_forbids_it() -> None:
    """The same devices: a tenth of the price for attention, and then a network of a ten-thousandth."""
    question = Question(model=MODEL, mix=MIX, has_prefill=False, wire=Wire(round_trip_s=0.0))
    answer = search(question, kind(usd_per_hour=10.0), kind(usd_per_hour=0.1), rivals=[kind(usd_per_hour=10.0)])
    verdict = judge(answer)
    assert verdict.pays
    assert verdict.sentence.startswith("disaggregate: ")
    slow = replace(question, wire=Wire(round_trip_s=0.0, limit=1e4))
    verdict = judge(search(slow, kind(usd_per_hour=10.0), kind(usd_per_hour=0.1), rivals=[kind(usd_per_hour=10.0)]))
    assert not verdict.pays
    assert verdict.sentence.startswith("do not disaggregate: ")
    assert "held by link" in verdict.sentence


def test_the_most_throughput_is_that_of_the_budget() -> None:
    question = Question(model=MODEL, mix=MIX, has_prefill=False, objective="throughput", budget=9.5)
    answer = search(question, kind(), kind())
    assert answer.offloaded is not None
    assert answer.homogeneous is not None
    assert answer.offloaded.figures.usd_per_hour <= 9.5
    assert answer.homogeneous[1].usd_per_hour in (8, 9)
    best = max(each.figures.tokens_per_s for each in answer.tried)
    assert answer.offloaded.figures.tokens_per_s == best


def test_windows_are_read_only_as_far_as_they_reach() -> None:
    """But stored whole, as the engine stores them."""
    model = ModelSizes(name="w", parameters=1, read=1, calls=(CallSize(4, 2, 8, 8), CallSize(4, 2, 8, 8, 100)))
    assert model.kv_bytes == 2 * 2 * 2 * 16
    assert model.kv_read_bytes(50) == 50 * model.kv_bytes
    assert model.kv_read_bytes(1000) == (1000 + 100) * 2 * 2 * 16


def test_experts_are_read_when_somebody_is_routed_to_them() -> None:
    """One row touches its own, many rows touch all; arithmetic grows with what is chosen only."""
    model = ModelSizes(
        name="m", parameters=110, read=10, expert=100, experts=10, chosen=1, calls=(CallSize(1, 1, 1, 1),)
    )
    assert model.read_bytes(1) == pytest.approx(2 * (10 + 10))
    assert model.read_bytes(1000) == pytest.approx(2 * 110)
    assert model.flops_per_row == 2 * (10 + 10)


def test_links_are_enough_when_a_faster_one_would_not_help() -> None:
    layout = offloaded()
    found = {each.what: is_enough(layout, NO_GOAL, each.figures) for each in over_links(layout, NO_GOAL)}
    assert found.keys() == LINKS.keys()
    assert all(found.values())
    hungry = offloaded(compute=kind(weight_bandwidth=1e14, flops=1e16), attention=kind(kv_bandwidth=1e14, flops=1e16))
    found = {each.what: is_enough(hungry, NO_GOAL, each.figures) for each in over_links(hungry, NO_GOAL)}
    assert not any(found.values())


def test_the_smallest_link_is_just_enough() -> None:
    layout = offloaded(wire=Wire(round_trip_s=0.01))
    rate = smallest_link(layout, 100)
    unlimited = with_link(layout, NO_LIMIT).step(100).bound.seconds
    assert with_link(layout, rate).step(100).bound.seconds == pytest.approx(1.01 * unlimited, rel=1e-3)
    assert with_link(layout, rate / 2).step(100).bound.seconds > 1.01 * unlimited


def test_the_smallest_bandwidth_of_the_paper_is_its_formula() -> None:
    step = offloaded().step(100)
    payload = (2 + 2 / 4) * 2 * 1024 * step.rows * 10
    assert step.sent_bytes + step.returned_bytes == pytest.approx(payload)
    expected = payload / (0.2 * (step.parts.compute_s + step.parts.attention_s))
    assert paper_bandwidth(offloaded(), 100) == pytest.approx(expected)


RATES = ("weight_bandwidth", "kv_bandwidth", "flops", "network", "memory_bytes")
positive = st.floats(1e7, 1e13)


@given(
    pool=st.sampled_from(["compute", "attention"]),
    rate=st.sampled_from(RATES),
    values=st.fixed_dictionaries(dict.fromkeys(RATES, positive)),
    more=st.floats(1.0, 100.0),
    devices=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    context=st.floats(50, 50_000),
    has_prefill=st.booleans(),
)
def test_more_of_anything_never_makes_a_plan_slower(
    pool: str,
    rate: str,
    values: dict[str, float],
    more: float,
    devices: tuple[int, int],
    context: float,
    has_prefill: bool,
) -> None:
    """Bandwidth, arithmetic or network of either pool: the same sequences are served at least as fast.

    More memory only makes room: the engine splits heads by how many blocks that gives, and another split may be slower.
    """
    values["memory_bytes"] = max(values["memory_bytes"], 2.1e9)
    base = offloaded(
        compute=kind(**values),
        attention=kind(**values),
        compute_devices=devices[0],
        attention_devices=devices[1],
        mix=Mix.equal(context, 100),
        has_prefill=has_prefill,
        wire=Wire(round_trip_s=1e-4),
    )
    better = kind(**{**values, rate: values[rate] * more})
    richer = replace(base, compute=better) if pool == "compute" else replace(base, attention=better)
    if rate != "memory_bytes":
        for sequences in (1, 7, 300):
            assert richer.step(sequences).period_s <= base.step(sequences).period_s * (1 + 1e-9)
    assert richer.room >= base.room


@given(
    sequences=st.lists(st.integers(1, 5000), min_size=2, max_size=2).map(sorted),
    lanes=st.integers(1, 3),
    devices=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    round_trip_s=st.floats(0, 0.1),
)
def test_more_sequences_never_make_a_token_come_sooner(
    sequences: list[int], lanes: int, devices: tuple[int, int], round_trip_s: float
) -> None:
    """So halving finds the most that keep a goal; and the pools together never give fewer tokens for them."""
    layout = offloaded(
        compute_devices=devices[0],
        attention_devices=devices[1],
        lanes_per_stage=lanes,
        wire=Wire(round_trip_s=round_trip_s),
    )
    few, many = (layout.step(count) for count in sequences)
    assert many.period_s >= few.period_s * (1 - 1e-9)
    assert sequences[1] / many.period_s >= sequences[0] / few.period_s * (1 - 1e-9)


@given(flows=st.integers(1, 8), flow=st.floats(1e3, 1e12), limit=st.none() | st.floats(1e3, 1e12))
def test_no_bound_is_below_the_resources_it_is_made_of(flows: int, flow: float, limit: float | None) -> None:
    """Whatever the wire: a step takes as long as each pool is busy, and at most as long as all parts in turn."""
    step = offloaded(compute_devices=2, wire=Wire(round_trip_s=1e-4, flow=flow, flows=flows, limit=limit)).step(50)
    assert step.bound.seconds >= max(step.parts.compute_s, 2 * step.parts.attention_s) * (1 - 1e-9)
    assert step.exposed_s >= 0
    assert step.bound.seconds < inf
