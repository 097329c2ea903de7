"""The sampler states that a compute worker keeps."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from pannier.compute.sampling.state import State
from pannier.wire import WireError
from pannier.wire import messages as m

KEPT_PER_SAMPLE = 8
"""States kept for every sample of the largest step so far: two lanes' sequences, and three times as many that wait."""
LEAST_KEPT = 64


class SamplerStates:
    """Sequence -> `State`, for one session; those not used for longest are forgotten, and asked for again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._states: OrderedDict[int, State] = OrderedDict()
        self._most_kept = LEAST_KEPT

    def put(self, state: m.SamplerState) -> None:
        """Take what the gateway says in the place of what is here. Raises `WireError`."""
        biased = (token for token, _ in state.rules.logit_bias)
        words = chain.from_iterable(state.rules.bad_words)
        named = chain(biased, words, state.rules.held_tokens, state.prompt_tokens, state.output_tokens)
        if max(named, default=0) >= self._vocab_size:  # an index out of range would end a device
            raise WireError(f"the sampler state of sequence {state.sequence} names a token outside the vocabulary")
        self._states[state.sequence] = State(state)

    def lacking(self, samples: Sequence[m.Sample]) -> tuple[int, ...]:
        """Sequences whose state is not here, or has not come as far as their sample needs."""
        return tuple(dict.fromkeys(s.sequence for s in samples if s.state_version > self._version(s.sequence)))

    def of(self, samples: Sequence[m.Sample]) -> list[State | None]:
        """The samples' states, cut back to the versions they need; None where they need none. None may be lacking."""
        states = [self._use(sample) if sample.state_version else None for sample in samples]
        self._most_kept = max(self._most_kept, KEPT_PER_SAMPLE * len(samples))
        while len(self._states) > self._most_kept:
            self._states.popitem(last=False)
        return states

    def clear(self) -> None:
        """Forget all: a new session."""
        self._states.clear()

    def _version(self, sequence: int) -> int:
        return self._states[sequence].version if sequence in self._states else 0

    def _use(self, sample: m.Sample) -> State:
        state = self._states[sample.sequence]
        self._states.move_to_end(sample.sequence)
        state.cut_back(sample.state_version)
        return state
