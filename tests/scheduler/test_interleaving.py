"""Whatever happens and in whatever order: each request's tokens are those of a run in which nothing else happened."""

import os
import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pannier.scheduler import Request, SchedulerConfig

from .gateway import SimulatedGateway
from .simulation import BLOCK_SIZE, EOS, MAX_MODEL_LEN

CONFIGS = st.builds(
    SchedulerConfig,
    max_model_len=st.just(MAX_MODEL_LEN),
    max_batch_tokens=st.integers(5, 16),
    max_sequences=st.integers(1, 5),
    max_waiting=st.integers(1, 8),
    block_size=st.just(BLOCK_SIZE),
    plan_ahead=st.sampled_from([1, 2, 2, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_cache=st.sampled_from([True, True, False]),
)
REQUESTS = st.builds(
    Request,
    sequences=st.just(()),  # numbers, and the prompt's tokens, are chosen when it is added
    prompt=st.integers(1, 24).map(lambda length: array("i", [0] * length)),
    max_tokens=st.integers(1, 12),
    stop_tokens=st.sampled_from([frozenset(), EOS]),
    step_by_step=st.booleans(),
    priority=st.integers(0, 2),
)
ADDED = st.tuples(REQUESTS, st.integers(0, 2), st.sampled_from([1, 1, 1, 2, 3]))  # with topic and number of samples
CAPACITIES = st.integers(3, 32)
PICKS = st.integers(0, 59)

Added: TypeAlias = tuple[Request, int, int]


class Interleaving(RuleBasedStateMachine):
    """Hypothesis chooses what happens, and finds the shortest way to what should not."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        config=CONFIGS,
        num_lanes=st.integers(1, 3),
        capacities=st.one_of(
            st.lists(CAPACITIES, min_size=1, max_size=3),
            st.lists(st.integers(3, 5), min_size=2, max_size=3),  # long sequences are spread over several
        ),
        requests=st.lists(ADDED, min_size=1, max_size=6),
    )
    def start(self, config: SchedulerConfig, num_lanes: int, capacities: list[int], requests: list[Added]) -> None:
        self.gateway = SimulatedGateway(config, num_lanes, capacities, self.seen)
        self.add(requests)

    @rule(requests=st.lists(ADDED, min_size=1, max_size=4))
    def add(self, requests: list[Added]) -> None:
        for request, topic, num_samples in requests:
            self.gateway.add(request, topic, num_samples)

    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        self.gateway.cancel(pick)

    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        self.gateway.finish(pick)

    @rule()
    def plan(self) -> None:
        self.gateway.plan()

    @rule(pick=PICKS, share=st.sampled_from([0.5, 1.0, 1.0]))
    def run(self, pick: int, share: float) -> None:
        self.gateway.run(pick, share)

    @rule(pick=PICKS)
    def commit(self, pick: int) -> None:
        self.gateway.commit(pick)

    @rule(rounds=st.integers(1, 4))
    def advance(self, rounds: int) -> None:
        for _ in range(rounds):
            self.gateway.advance()

    @rule(lose=st.sampled_from(["drop", "abort", "fail"]), pick=PICKS)
    def lose_steps(self, lose: str, pick: int) -> None:
        getattr(self.gateway, lose)(pick)

    @rule(change=st.sampled_from(["remove_lane", "lose_group"]), pick=PICKS, num_blocks=CAPACITIES)
    def change_workers(self, change: str, pick: int, num_blocks: int) -> None:
        getattr(self.gateway, change)(pick)
        self.gateway.add_lane() if change == "remove_lane" else self.gateway.add_group(num_blocks)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "gateway"):
            self.gateway.check()

    def teardown(self) -> None:
        if hasattr(self, "gateway"):
            self.gateway.settle()


def random_run(seed: int, num_actions: int, seen: Counter[str]) -> None:
    """One long run under load, everything chosen by one seed: no shrinking, but ten times as much in a second."""
    chance = random.Random(seed)
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_batch_tokens=chance.randint(6, 20),
        max_sequences=chance.randint(1, 6),
        max_waiting=chance.randint(1, 8),
        block_size=BLOCK_SIZE,
        plan_ahead=chance.choice([1, 2, 2, 2, 3]),
        policy=chance.choice(["fcfs", "priority"]),
        prefix_cache=chance.random() < 0.7,
    )
    sizes = chance.choice([(3, 5), (3, 32), (6, 32)])  # in the first, long sequences are spread over several groups
    gateway = SimulatedGateway(config, chance.randint(1, 3), [chance.randint(*sizes) for _ in range(3)], seen)
    actions = _actions(gateway, chance, sizes)
    weights = [weight for _, weight in actions]
    for _ in range(num_actions):
        chance.choices(actions, weights)[0][0]()
        gateway.check()
    gateway.settle()


def _actions(
    gateway: SimulatedGateway, chance: random.Random, sizes: tuple[int, int]
) -> list[tuple[Callable[[], None], float]]:
    """What may happen and how often."""

    def add() -> None:
        eos = chance.choice([frozenset(), EOS])
        request = Request(
            sequences=(),
            prompt=array("i", [0] * chance.randint(1, 24)),
            max_tokens=chance.randint(1, 12),
            stop_tokens=eos,
            step_by_step=chance.random() < 0.3,
            priority=chance.randint(0, 2),
        )
        gateway.add(request, chance.randint(0, 2), chance.choice([1, 1, 1, 2, 3]))

    def lane() -> None:
        if len(gateway.workers) > chance.randint(0, 3):
            gateway.remove_lane(pick())
        else:
            gateway.add_lane()

    def group() -> None:
        if len(gateway.groups) > chance.randint(0, 3):
            gateway.lose_group(pick())
        else:
            gateway.add_group(chance.randint(*sizes))

    def pick() -> int:
        return chance.randrange(1000)

    return [
        (add, 3),
        (lambda: gateway.cancel(pick()), 1),
        (lambda: gateway.finish(pick()), 0.5),
        (gateway.plan, 8),
        (lambda: gateway.run(pick(), chance.choice([0.5, 1, 1])), 14),
        (lambda: gateway.commit(pick()), 10),
        (lambda: gateway.drop(pick()), 0.5),
        (lambda: gateway.abort(pick()), 0.7),
        (lambda: gateway.fail(pick()), 0.2),
        (lane, 0.3),
        (group, 0.2),
    ]


def assert_it_happened(seen: Counter[str], times: int) -> None:
    """A run in which nothing was disturbed would prove nothing."""
    happenings = ["tokens promised", "rows discarded", "steps lost", "preemptions", "prefixes found", "samples forked"]
    happenings += ["blocks copied", "blocks shared", "lanes balanced", "sequences spread"]
    endings = [f"ended with {reason}" for reason in ("stop", "length", "error")]
    assert all(seen[each] >= times for each in happenings + endings), seen


def explore(max_examples: int, steps: int, *, derandomize: bool) -> None:
    Interleaving.seen.clear()
    limits = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Interleaving, settings=limits)
    assert_it_happened(Interleaving.seen, 3)


@pytest.mark.timeout(180)
def test_each_request_gets_its_undisturbed_text() -> None:
    """Whatever hypothesis cancels, loses, fails, adds or removes around it."""
    explore(max_examples=50, steps=30, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_each_request_gets_its_undisturbed_text_under_load() -> None:
    """The same in long seeded runs in which lanes and blocks are always short."""
    seen: Counter[str] = Counter()
    for seed in range(50):
        random_run(seed, 400, seen)
    assert_it_happened(seen, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_request_gets_its_undisturbed_text_at_length() -> None:
    """Both with more examples and new seeds each time; PANNIER_EXAMPLES sets how many."""
    num_examples = int(os.environ.get("PANNIER_EXAMPLES", "60"))
    explore(num_examples, steps=60, derandomize=False)
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + num_examples):
        try:
            random_run(seed, 1000, Counter())
        except Exception as error:
            raise AssertionError(f"random_run({seed}, 1000, Counter()) fails") from error
