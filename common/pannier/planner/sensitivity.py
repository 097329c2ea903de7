"""How a plan changes with what may be otherwise: the context, and the link."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pannier.planner.figures import Figures, Goal
from pannier.planner.offloaded import NO_LIMIT, Offloaded

GIGABIT = 1e9 / 8
PCIE_LANES, PCIE_CODING = 16, 128 / 130
LINKS = {
    "PCIe 3.0 x16": 8e9 / 8 * PCIE_LANES * PCIE_CODING,
    "PCIe 4.0 x16": 16e9 / 8 * PCIE_LANES * PCIE_CODING,
    "PCIe 5.0 x16": 32e9 / 8 * PCIE_LANES * PCIE_CODING,
    "25 Gbit/s": 25 * GIGABIT,
    "100 Gbit/s": 100 * GIGABIT,
    "200 Gbit/s": 200 * GIGABIT,
    "400 Gbit/s": 400 * GIGABIT,
}
"""Bytes per second each way of every device, before anything is lost; PCIe 128b/130b coded."""
CONTEXTS = (0.25, 0.5, 1.0, 2.0, 4.0)
ENOUGH = 0.95
"""Of the tokens per second of a link without any limit."""


class Changed(NamedTuple):
    """The same devices under another circumstance."""

    what: str
    figures: Figures | None


def over_contexts(layout: Offloaded, goal: Goal) -> Iterator[Changed]:
    """With requests that are shorter and longer."""
    for factor in CONTEXTS:
        mix = layout.mix.at_context(layout.mix.context * factor)
        yield Changed(f"{mix.context:.0f} tokens", replace(layout, mix=mix).figures(goal))


def over_links(layout: Offloaded, goal: Goal) -> Iterator[Changed]:
    """With other links between every two devices, of which each is used for one link only."""
    for name, rate in LINKS.items():
        yield Changed(name, with_link(layout, rate).figures(goal))


def with_link(layout: Offloaded, rate: float) -> Offloaded:
    """With so many bytes per second each way for every device, on however many connections."""
    return replace(layout, wire=replace(layout.wire, limit=rate, flow=NO_LIMIT))


def is_enough(layout: Offloaded, goal: Goal, figures: Figures | None) -> bool:
    """Whether a faster link would hardly make it faster."""
    unlimited = with_link(layout, NO_LIMIT).figures(goal)
    if figures is None or unlimited is None:
        return False
    return figures.tokens_per_s >= ENOUGH * unlimited.tokens_per_s


def smallest_link(layout: Offloaded, sequences: float) -> float:
    """Bytes per second of every device's link with which a batch of so many sequences is as fast as without limits.

    Where a lane-step is held by the round trip of a lane every byte is seen: then 1 % is given up for the link.
    """
    step = with_link(layout, NO_LIMIT).step(sequences)
    wanted = 1.01 * step.bound.seconds
    low, high = 1e3, NO_LIMIT
    for _ in range(100):
        middle = (low * high) ** 0.5
        if with_link(layout, middle).step(sequences).bound.seconds <= wanted:
            high = middle
        else:
            low = middle
    return high


def paper_bandwidth(layout: Offloaded, sequences: float, inflation: float = 0.2) -> float:
    """(2 + 2/G) e d B L / (alpha (MTIME(B) + ATIME(B, l))): the smallest network bandwidth of the Lamina paper.

    Bytes per second in both directions together; alpha is the tolerated inflation of latency, 0.2 in its figure 4.
    """
    step = layout.step(sequences)
    return (step.sent_bytes + step.returned_bytes) / (inflation * (step.parts.compute_s + step.parts.attention_s))
