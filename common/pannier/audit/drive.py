"""Runs a transformers model as generation does, unmodified: a prompt, then tokens one by one, greedily."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from pannier.audit.clock import Clock

PREFILL, DECODE = "prefill", "decode"
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What a model calls what it keeps between steps, by version and kind."""


class CannotRun(Exception):
    """Raised for a model that isn't one that continues a text."""


@dataclass(frozen=True)
class Workload:
    """What is run."""

    prompt: int = 64
    """Tokens of each prompt."""
    steps: int = 8
    """Decode steps that are timed."""
    batch: int = 1
    repeats: int = 3
    autocast: torch.dtype | None = None
    """Each forward pass under an autocast region of its own, as a careless server would have it."""


class Drive:
    """One sequence, or several alike, under way."""

    def __init__(self, model: PreTrainedModel, work: Workload, make_cache: Callable[[], Any] | None = None) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise CannotRun(
                f"{model.config.model_type} has an encoder; only models that continue a text can be audited"
            )
        self.model = model
        self.work = work
        self.cache: Any = None
        self.logits: torch.Tensor | None = None
        self._make_cache = make_cache
        known = inspect.signature(model.forward).parameters
        names = [*known, *CausalLMOutputWithPast.__dataclass_fields__]  # a model may pass on whatever it is given
        self._cache_name = next(name for name in names if name in CACHE_NAMES)
        self._last_row_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def prefill(self) -> None:
        """Begin anew with a random prompt."""
        self.cache = None if self._make_cache is None else self._make_cache()
        draw = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        self._forward(torch.randint(0, vocabulary, (self.work.batch, self.work.prompt), generator=draw))

    def decode(self) -> None:
        """Another token. Raises `CannotRun` if the model keeps nothing."""
        if self.cache is None:
            raise CannotRun(f"{self.model.config.model_type} keeps nothing between steps")
        assert self.logits is not None
        self._forward(self.logits[:, -1:].argmax(-1))

    def _forward(self, ids: torch.Tensor) -> None:
        kept = {} if self.cache is None else {self._cache_name: self.cache}
        device, work = self.model.device, self.work
        cast = nullcontext() if work.autocast is None else torch.autocast(device.type, work.autocast)
        with torch.no_grad(), cast:
            output = self.model(input_ids=ids.to(device), use_cache=True, **kept, **self._last_row_only)
        self.logits = output.logits
        if self._make_cache is None:
            self.cache = next((output[name] for name in CACHE_NAMES if output.get(name) is not None), None)

    def timed(self, forward: Callable[[], None]) -> float:
        """Seconds of a forward pass, to the end of what it has the device do."""
        self._wait()
        started = Clock.now()
        forward()
        self._wait()
        return Clock.now() - started

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
