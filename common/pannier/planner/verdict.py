"""Whether to disaggregate, and why: the factors of the gain, and the bound that holds."""

from dataclasses import dataclass
from typing import NamedTuple

from pannier.planner.figures import Figures
from pannier.planner.offloaded import Offloaded
from pannier.planner.search import Answer

WAYS_OUT = {
    "compute": "compute is always busy: more attention workers or a faster link change nothing",
    "attention": "attention is always busy: more attention workers or faster memory would help",
    "link": "the network is always busy in one direction: more bandwidth would help, more devices behind it wouldn't",
    "round trip": "both pools wait for each other and for the link: a shorter round trip or more lanes would help",
}


class Gain(NamedTuple):
    """Tokens per dollar of an offloaded engine, of those of a homogeneous one, as a product.

    The first three are the speed-up per device of FastAFD (https://haoailab.com/blogs/fastafd/): batch ratio x step
    ratio x M / (M + N), for M attention and N compute devices. The last one makes dollars of devices.
    """

    batch: float
    """Sequences per attention device, of those per homogeneous device."""
    step: float
    """Seconds per token of a sequence there, of those here."""
    devices: float
    """M / (M + N)."""
    price: float
    """Dollars per device there, of those here."""

    @classmethod
    def of(cls, layout: Offloaded, offloaded: Figures, homogeneous: Figures) -> "Gain":
        """Of two engines; the product is the ratio of their costs per token, exactly."""
        attending = layout.attention_devices
        return cls(
            batch=(offloaded.sequences / attending) / (homogeneous.sequences / homogeneous.devices),
            step=homogeneous.tpot_s / offloaded.tpot_s,
            devices=attending / offloaded.devices,
            price=(homogeneous.usd_per_hour / homogeneous.devices) / (offloaded.usd_per_hour / offloaded.devices),
        )

    @property
    def product(self) -> float:
        """Tokens per dollar, of the other's."""
        return self.batch * self.step * self.devices * self.price

    def __str__(self) -> str:
        return (
            f"{self.product:.2f} = batch {self.batch:.2f} x step {self.step:.2f} x "
            f"M/(M+N) {self.devices:.2f} x price {self.price:.2f}"
        )


@dataclass(frozen=True)
class Verdict:
    """What to do, in sentences."""

    pays: bool
    sentence: str
    gain: Gain | None = None
    of_compute_alone: float | None = None
    """Tokens per dollar, of the best homogeneous engine of the compute pool's kind."""
    bound: str = ""


def judge(answer: Answer) -> Verdict:
    """Whether the best offloaded engine gives more tokens per dollar than the best homogeneous one."""
    if answer.offloaded is None:
        reasons = ", ".join(answer.refused) or "the budget pays for none"
        return Verdict(False, f"do not disaggregate: no division of these instances works ({reasons})")
    found = answer.offloaded
    held, bound = held_by(found.figures), WAYS_OUT[found.figures.step.bound.held_by]
    if answer.homogeneous is None:
        return Verdict(True, f"disaggregate: no homogeneous engine of these works; {held}", bound=bound)
    engine, figures = answer.homogeneous
    gain = Gain.of(found.layout, found.figures, figures)
    alone = None if answer.alone is None else answer.alone.usd_per_mtok / found.figures.usd_per_mtok
    rival = f"{figures.devices} x {engine.kind.device.name} ({engine.kind.name})"
    if gain.product > 1:
        sentence = f"disaggregate: {gain.product:.2f} times the tokens per dollar of {rival}; {held}"
    else:
        sentence = f"do not disaggregate: {gain.product:.2f} times the tokens per dollar of {rival}; {held}"
    return Verdict(gain.product > 1, sentence, gain, alone, bound)


def held_by(figures: Figures) -> str:
    """What holds the time of a step, and the number of sequences."""
    step = figures.step
    bound = f"compute ({step.compute_held_by})" if step.bound.held_by == "compute" else step.bound.held_by
    return f"a step is held by {bound}, the batch by {figures.sequences_held_by}"
