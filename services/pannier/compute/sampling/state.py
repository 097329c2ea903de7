"""What one sequence's draws need of its past, kept up to date token by token."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from pannier.wire import messages as m


class Occurrences:
    """How often each token that occurred was output; those of the prompt alone: 0 times.

    Attributes:
        tokens: the prompt's distinct tokens in ascending order, then those first output, in the order in which they
            were. So undoing outputs, the last first, takes tokens from the end.
        counts: of outputs, beside them.
    """

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.tokens = array("i", sorted(set(prompt_tokens)))
        self.counts = array("i", bytes(4 * len(self.tokens)))
        self._num_prompt = len(self.tokens)
        self._places: dict[int, int] = {}
        """Of tokens that are not the prompt's: prompts are long, and kept compact."""

    def add(self, token: int) -> None:
        """It was output."""
        place = self._place(token)
        if place is None:
            self._places[token] = len(self.tokens)
            self.tokens.append(token)
            self.counts.append(1)
        else:
            self.counts[place] += 1

    def remove_last(self, token: int) -> None:
        """It was the last output, and is undone."""
        place = self._place(token)
        assert place is not None
        self.counts[place] -= 1
        if self.counts[place] == 0 and place >= self._num_prompt:
            del self.tokens[-1], self.counts[-1], self._places[token]

    def _place(self, token: int) -> int | None:
        place = bisect_left(self.tokens, token, 0, self._num_prompt)
        if place < self._num_prompt and self.tokens[place] == token:
            return place
        return self._places.get(token)


class State:
    """A `SamplerState` that goes on with what is drawn. Its version is 1 more than its number of output tokens."""

    def __init__(self, state: m.SamplerState) -> None:
        self.rules = state.rules
        self.bias_tokens = array("i", [token for token, _ in state.rules.logit_bias])
        self.bias = array("f", [bias for _, bias in state.rules.logit_bias])
        self.occurrences = Occurrences(state.prompt_tokens) if state.rules.penalties != m.Penalties() else None
        self._outputs = array("i")
        self._bad_words = [(array("i", word[:-1]), word[-1]) for word in state.rules.bad_words if word]
        for token in state.output_tokens:
            self.append(token)

    @property
    def version(self) -> int:
        """Which draw it is up to."""
        return len(self._outputs) + 1

    def append(self, token: int) -> None:
        """It was drawn."""
        self._outputs.append(token)
        if self.occurrences is not None:
            self.occurrences.add(token)

    def cut_back(self, version: int) -> None:
        """Undo what was drawn since `version`."""
        while self.version > version:
            token = self._outputs.pop()
            if self.occurrences is not None:
                self.occurrences.remove_last(token)

    def banned(self) -> list[int]:
        """Tokens that can't be drawn next: last ones of bad words, and held ones before `min_tokens`."""
        outputs = self._outputs
        banned = [
            last
            for before, last in self._bad_words
            if len(before) <= len(outputs) and outputs[len(outputs) - len(before) :] == before
        ]
        return banned + list(self.rules.held_tokens) if len(outputs) < self.rules.min_tokens else banned
