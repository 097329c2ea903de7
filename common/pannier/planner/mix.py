"""What requests ask for on average: lengths, and the context that a step meets."""

from collections.abc import Iterable
from dataclasses import dataclass

from pannier.planner.trace import TraceRequest


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Means of many requests."""

    name: str
    prompt: float
    """Tokens of a prompt: lp of the Lamina paper."""
    output: float
    """Tokens of an output: lg."""
    context: float
    """Tokens behind a decode row, itself included, at a moment taken at random.

    Long outputs are met more often than short ones: sum lg (lp + (lg + 1) / 2) / sum lg, the length-biased context of
    arXiv 2601.21351. The Lamina paper's own figures agree with the plain lp + lg / 2 (`unbiased`).
    """
    chunk_pairs: float = 0.0
    """(query, key) pairs inside a prompt, and so among its own rows: lp (lp + 1) / 2, its mean."""
    requests: int = 1

    @classmethod
    def of(cls, name: str, requests: Iterable[TraceRequest]) -> "Mix":
        """Of a trace. Raises `ValueError` if there are no requests."""
        count = prompts = outputs = 0
        contexts = pairs = 0.0
        for request in requests:
            prompt, output = request.prompt_length, request.output_length
            count, prompts, outputs = count + 1, prompts + prompt, outputs + output
            contexts += output * (prompt + (output + 1) / 2)
            pairs += prompt * (prompt + 1) / 2
        if not count:
            raise ValueError(f"{name} has no requests")
        return cls(
            name=name,
            prompt=prompts / count,
            output=outputs / count,
            context=contexts / outputs,
            chunk_pairs=pairs / count,
            requests=count,
        )

    @classmethod
    def equal(cls, prompt: float, output: float) -> "Mix":
        """Requests of one length."""
        return cls(
            name=f"{prompt:g}+{output:g} tokens",
            prompt=prompt,
            output=output,
            context=prompt + (output + 1) / 2,
            chunk_pairs=prompt * (prompt + 1) / 2,
        )

    @classmethod
    def unbiased(cls, name: str, prompt: float, output: float) -> "Mix":
        """With the mean context lp + lg / 2, as the Lamina paper's figures have it; prompts are another pool's."""
        return cls(name=name, prompt=prompt, output=output, context=prompt + output / 2)

    def at_context(self, context: float) -> "Mix":
        """All lengths made longer or shorter by one factor, so that the context is this."""
        factor = context / self.context
        return Mix(
            name=f"{self.name} x {factor:g}",
            prompt=self.prompt * factor,
            output=self.output * factor,
            context=context,
            chunk_pairs=self.chunk_pairs * factor**2,
            requests=self.requests,
        )
