"""What was told of the Lamina paper's first version (arXiv 2405.01814v1), beside the cost model.

That version pairs A100 or H100 with consumer cards, for models of 13B and 33B. Its set-ups aren't known, so its figures
can't be recomputed; what can be said is for which numbers of cards the model gives such figures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from pannier.planner.catalogue import GB, Catalogue
from pannier.planner.check import Check, Outcome
from pannier.planner.devices import ACHIEVED, Kind, Shares, card_kind
from pannier.planner.homogeneous import Homogeneous
from pannier.planner.mix import Mix
from pannier.planner.offloaded import Offloaded, Wire
from pannier.planner.paper import Paper
from pannier.planner.sizes import ModelSizes

HIGH, CONSUMER = ("A100-80", "H100"), ("RTX-3090", "RTX-4090")
CARDS = (1, 2, 4, 8, 16)
CONTEXTS = (512, 2048, 8192)
NETWORK = 25 * GB / 2
"""100 Gbit/s each way: an assumption, since the first version's network isn't known."""
PCIE_4 = 31.5 * GB


class Pairing(NamedTuple):
    """One high-end card with some consumer cards, on one model, at one context."""

    model: str
    high: str
    consumer: str
    cards: int
    context: int
    batch_ratio: float
    per_cost: float
    """Tokens per dollar, of the high-end card's alone."""

    def __str__(self) -> str:
        return f"{self.model}, 1 {self.high} + {self.cards} {self.consumer}, {self.context} tokens"


@dataclass(frozen=True)
class FirstVersion:
    """The press figures and what they can be set beside."""

    says: dict[str, Any]
    catalogue: Catalogue
    hourly: Mapping[str, float]
    shares: Shares = ACHIEVED

    @classmethod
    def of(cls, paper: Paper, catalogue: Catalogue, hourly: Mapping[str, float]) -> "FirstVersion":
        """By prices of cards per hour, rented or bought."""
        return cls(paper.says["first_version"], catalogue, hourly)

    def all(self) -> Iterator[Check]:
        """Everything."""
        yield from self.per_dollar()
        yield from self.batches()
        yield from self.throughput()

    def per_dollar(self) -> Iterator[Check]:
        """Memory and bandwidth that a dollar buys."""
        said = self.says["per_dollar"]
        for high in HIGH:
            for consumer in CONSUMER:
                for what in ("memory_gib", "memory_gb_per_s"):
                    ours = self._per_dollar(consumer, what) / self._per_dollar(high, what)
                    name = "capacity" if what == "memory_gib" else "bandwidth"
                    outcome = Outcome.REPRODUCED if 0.5 * said <= ours <= 2 * said else Outcome.NOT_REPRODUCED
                    why = "within a factor of two; by the prices given, which decide it"
                    yield Check(f"{name} per dollar, {consumer} of {high}", f"{said}x", f"{ours:.2f}x", outcome, why)

    def batches(self) -> Iterator[Check]:
        """How many cards it takes for such batches: memory alone decides, whatever the context."""
        low, high = self.says["batch_ratio"]
        for name, model in self._models().items():
            for device in HIGH:
                free = self._kind(device).device.memory_bytes - model.weight_bytes
                card = self._kind("RTX-3090").device.memory_bytes
                cards = [ceil(ratio * free / card) for ratio in (low, high)]
                why = "its set-ups aren't known; so many cards' memory has the room"
                ours = f"{cards[0]} to {cards[1]} cards of 24 GiB beside one {device}"
                yield Check(
                    f"batch, of the homogeneous engine's, {name}", f"{low} to {high}x", ours, Outcome.NOT_DERIVABLE, why
                )

    def throughput(self) -> Iterator[Check]:
        """Tokens per dollar, over all pairings."""
        low, high = self.says["throughput_per_cost"]
        for name in self._models():
            found = sorted((each for each in self.pairings() if each.model == name), key=lambda each: each.per_cost)
            worst, best = found[0], found[-1]
            outcome = Outcome.NOT_REPRODUCED if best.per_cost < high else Outcome.REPRODUCED
            pays = sum(each.per_cost > 1 for each in found)
            why = f"best: {best}; worst: {worst}; {pays} of {len(found)} pairings pay; its set-ups aren't known"
            ours = f"{worst.per_cost:.2f} to {best.per_cost:.2f}x"
            yield Check(f"throughput per cost, {name}", f"{low} to {high}x", ours, outcome, why)

    def pairings(self) -> Iterator[Pairing]:
        """Every high-end card with every number of every consumer card, that have room for the model at all."""
        for name, model in self._models().items():
            for context in CONTEXTS:
                mix = Mix.unbiased(f"{context} tokens", context - 64, 128)
                for high in HIGH:
                    alone = Homogeneous(
                        model=model, mix=mix, kind=self._kind(high), devices=1, has_prefill=False, waste=32
                    ).figures()
                    for consumer in CONSUMER:
                        for cards in CARDS:
                            beside = self._beside(model, mix, high, consumer, cards).figures()
                            if alone is not None and beside is not None:
                                batch = beside.sequences / alone.sequences
                                gain = alone.usd_per_mtok / beside.usd_per_mtok
                                yield Pairing(name, high, consumer, cards, context, batch, gain)

    def _beside(self, model: ModelSizes, mix: Mix, high: str, consumer: str, cards: int) -> Offloaded:
        return Offloaded(
            model=model,
            mix=mix,
            compute=self._kind(high),
            attention=self._kind(consumer),
            compute_devices=1,
            attention_devices=cards,
            wire=Wire(round_trip_s=33e-6),  # as fast as the second version's own network stack
            has_prefill=False,
        )

    def _models(self) -> dict[str, ModelSizes]:
        return {
            name: ModelSizes.dense(
                name,
                weights_bytes=each["weights_gb"] * GB,
                layers=each["layers"],
                width=each["hidden"],
                queries_per_kv=each["gqa_group"],
            )
            for name, each in self.says["models"].items()
        }

    def _kind(self, name: str) -> Kind:
        network = NETWORK if name in HIGH else PCIE_4
        return card_kind(self.catalogue, name, self.hourly[name], network, "float16", self.shares)

    def _per_dollar(self, name: str, what: str) -> float:
        return float(getattr(self.catalogue.accelerator(name), what)) / self.hourly[name]
