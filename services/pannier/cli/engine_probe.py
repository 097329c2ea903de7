"""What a model's slices take by themselves, and what the engine takes beside everything: measured on a small model."""

import asyncio
from collections.abc import Iterator
from functools import partial

import torch

from pannier.cli.device_probe import Probe
from pannier.cli.engines import running
from pannier.cli.load import Load, vocab_size
from pannier.cli.overlap_run import Window, run
from pannier.cli.plan_inputs import model_sizes
from pannier.cli.stack import ServeOptions
from pannier.planner.predict import LINK, between
from pannier.planner.profile import EngineCost, LinkRate, SliceTime
from pannier.runtime.errors import PannierError
from pannier.runtime.model_source import EMBEDDED, resolve
from pannier.runtime.random_models import build
from pannier.slicer import SlicedModel, load, slice_model

SMALL, SMALL_ROWS, SMALL_CONTEXT, SMALL_OUTPUT = "embedded", 4, 128, 64
"""What the engine's own costs are measured on: hardly anything else takes time there."""


def sliced(model: str, dtype: str) -> SlicedModel:
    """A model on the CPU, ready to run without any workers."""
    source, kind = resolve(model), getattr(torch, dtype)
    if source.shape is not None:
        return slice_model(build(source.shape, source.seed, kind), device="cpu")
    return load(source.path or EMBEDDED, dtype=kind, device="cpu")


def slice_times(
    probe: Probe, model: SlicedModel, name: str, dtype: str, threads: int, rows: list[int], *, is_shared: bool
) -> Iterator[SliceTime]:
    """Steps with so many decode rows; attention is answered with zeros, tokens are drawn greedily."""
    for count in rows:
        with torch.inference_mode():
            seconds = probe.time(partial(_step, model, _answers(model, count), torch.full((count,), 7)))
        yield SliceTime(model=name, dtype=dtype, threads=threads, rows=count, is_shared=is_shared, seconds=seconds)


def _answers(model: SlicedModel, rows: int) -> list[torch.Tensor]:
    return [torch.zeros(rows, call.q_heads, call.v_size, dtype=model.dtype) for call in model.calls]


def _step(model: SlicedModel, answers: list[torch.Tensor], ids: torch.Tensor) -> list[int]:
    """One step of all slices: the best token of each row."""
    places = torch.arange(len(ids))
    going = model.run(ids, places, places)
    asked = next(going)
    try:
        while True:
            asked = going.send(answers[asked.call.index])
    except StopIteration as end:
        tokens: list[int] = end.value.max(-1).indices.tolist()
        return tokens


def engine_costs(probe: Probe, dtype: str, links: list[LinkRate], cores: int) -> Iterator[EngineCost]:
    """What a lane-step of the small model takes more than its slices, its attention and its links."""
    model, sizes = sliced(SMALL, dtype), model_sizes(SMALL)
    for is_monolithic in (False, True):
        torch.set_num_threads(cores if is_monolithic else max(1, cores // 2))
        slices = next(slice_times(probe, model, SMALL, dtype, 0, [SMALL_ROWS], is_shared=False)).seconds
        window = asyncio.run(_small_run(dtype, is_monolithic))
        calls, parts = len(sizes.calls), window.parts
        link_s = 0.0
        if not is_monolithic:
            size = SMALL_ROWS * (sizes.sent_bytes + sizes.returned_bytes) / 2 / calls
            link_s = calls * between(
                {each.size: each.round_trip_s for each in links if each.kind == LINK}, size, "links"
            )
        beside = parts.compute_s - slices + parts.transfer_s - link_s
        yield EngineCost(
            is_monolithic=is_monolithic,
            call_s=max(0.0, beside / calls),
            step_s=max(0.0, window.lane_step_s - sum(parts)),
        )


async def _small_run(dtype: str, is_monolithic: bool) -> Window:
    options = ServeOptions(model=SMALL, dtype=dtype, lanes=1, monolithic=is_monolithic, emulate_past=True)
    load = Load.equal(SMALL_ROWS, SMALL_CONTEXT, SMALL_OUTPUT)
    async with running(options) as engine:
        asks = load.asks(0, vocab_size(SMALL))
        await engine.work(run(engine.client, asks))  # warms up
        window = (await engine.work(run(engine.client, asks))).window
    if window is None:
        raise PannierError("at no moment did all requests of the small model decode; try again")
    return window
