"""A model's forward passes: timed while nobody watches, watched, and seen by the profiler, in turns."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from pannier.audit.calls import Call, name_of
from pannier.audit.drive import DECODE, PREFILL, Drive, Workload
from pannier.audit.profile import Profile, profiled
from pannier.audit.watch import Watch, tensors_in

WATCHED_STEPS = 2
"""Of each repeat: the same operators come in every step."""


@dataclass
class Recording:
    """What was seen, by phase.

    Attributes:
        seconds: of each forward pass that nobody watched.
        calls: of one forward pass, each with the median of its seconds over those that were watched.
        profile: what the profiler saw of one decode step, or of one prompt where there is none.
        stored: storages of the model's own tensors.
        cache_dtypes: of keys and values as they are kept.
        logits_dtype: of what the model gives.
        vocabulary: logits of one row.
    """

    work: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    stored: frozenset[int] = frozenset()
    cache_dtypes: tuple[str, ...] = ()
    cache_bytes: int = 0
    logits_dtype: str = ""
    vocabulary: int = 0

    def step_s(self, phase: str) -> float:
        """The fastest forward pass of a phase: what else the machine does only makes others slower."""
        return min(self.seconds[phase])

    def tokens(self, phase: str) -> int:
        """Tokens of one forward pass of a phase."""
        return self.work.batch * (self.work.prompt if phase == PREFILL else 1)


def record(
    model: PreTrainedModel, work: Workload = Workload(), make_cache: Callable[[], Any] | None = None
) -> Recording:
    """Run and watch a model. Raises `CannotRun`.

    Args:
        make_cache: what keeps keys and values, in place of the model's own choice.
    """
    drive, watch = Drive(model, work, make_cache), Watch(model)
    watched: dict[str, list[list[Call]]] = {}
    found = Recording(work, stored=watch.stored)
    _pass(drive, lambda _, forward: forward())  # the first one is slower, and says whether there is a cache
    for _ in range(work.repeats):
        _pass(drive, lambda phase, forward: found.seconds.setdefault(phase, []).append(drive.timed(forward)))
        _pass(drive, lambda phase, forward: _watched(drive, watch, watched, phase, forward), WATCHED_STEPS)
    _pass(drive, lambda phase, forward: _profiled(drive, found, phase, forward), 1)
    found.calls = {phase: merged(passes) for phase, passes in watched.items()}
    kept = [tensor for tensor in tensors_in(drive.cache) if tensor.is_floating_point() and tensor.dim() >= 3]
    found.cache_dtypes = tuple(sorted({name_of(tensor.dtype) for tensor in kept}))
    found.cache_bytes = sum(tensor.nbytes for tensor in kept)
    assert drive.logits is not None
    found.logits_dtype, found.vocabulary = name_of(drive.logits.dtype), drive.logits.shape[-1]
    return found


Do = Callable[[str, Callable[[], None]], None]


def _pass(drive: Drive, do: Do, steps: int | None = None) -> None:
    """A prompt and its decode steps; none of those for a model that keeps nothing."""
    do(PREFILL, drive.prefill)
    if drive.cache is not None:
        for _ in range(drive.work.steps if steps is None else steps):
            do(DECODE, drive.decode)


def _watched(
    drive: Drive, watch: Watch, into: dict[str, list[list[Call]]], phase: str, forward: Callable[[], None]
) -> None:
    watch.keep(drive.cache if phase == DECODE else None)
    with watch.watching():
        forward()
    into.setdefault(phase, []).append(watch.take())


def merged(passes: list[list[Call]]) -> list[Call]:
    """The last pass's calls with the medians of all passes that make the same ones.

    Single calls are now and then a hundred times as slow, when the machine does something else.
    """
    last = passes[-1]
    same = [calls for calls in passes if [call.op for call in calls] == [call.op for call in last]]
    times = zip(*([call.seconds for call in calls] for calls in same), strict=True)
    return [replace(call, seconds=median(each)) for call, each in zip(last, times, strict=True)]


def _profiled(drive: Drive, found: Recording, phase: str, forward: Callable[[], None]) -> None:
    wanted = phase == DECODE or DECODE not in found.seconds
    with profiled(drive.model.device, found.profile) if wanted else nullcontext():
        forward()


def storage_dtypes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of a model's parameters, each storage once, by element type."""
    sizes: dict[str, int] = {}
    for tensor in {parameter.data_ptr(): parameter for parameter in model.parameters()}.values():
        sizes[name_of(tensor.dtype)] = sizes.get(name_of(tensor.dtype), 0) + tensor.nbytes
    return sizes
