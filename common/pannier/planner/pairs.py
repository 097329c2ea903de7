"""Known pairs of pools, each judged: does it pay, and if not, is it the network or the devices?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files

import msgspec

from pannier.planner.catalogue import GB, MIB, Catalogue
from pannier.planner.devices import ACHIEVED, Device, Kind, Shares, card_kind, choose_dtype, kind_of
from pannier.planner.mix import Mix
from pannier.planner.offloaded import NO_LIMIT, Wire
from pannier.planner.purchase import read_prices
from pannier.planner.search import Answer, Question, search
from pannier.planner.sensitivity import LINKS
from pannier.planner.verdict import Verdict, judge

SAME_HOST_S = 25e-6
"""A round trip through shared memory: what Pannier's own takes on the processors it was measured on."""
CARD, CARD_NETWORK = "card:", 100e9 / 8
FREE = Wire(round_trip_s=0.0, limit=NO_LIMIT)
"""A network that costs nothing."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two kinds of instances, or one and its host's memory."""

    compute: str
    attention: str
    model: str
    sockets: int = 0
    """Of the host, if attention is its memory."""
    link: str | None = None
    """Between device and host, if attention is the host's memory."""


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of all requests."""

    name: str
    prompt: int
    output: int


class Pairs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    pairs: list[Pair]
    lengths: list[Lengths]
    note: str = ""
    lengths_source: str = ""


@dataclass(frozen=True)
class Judged:
    """One pair with requests of some lengths."""

    pair: Pair
    lengths: Lengths
    dtype: str
    question: Question
    answer: Answer
    verdict: Verdict
    without_network: Verdict
    """If the network cost nothing."""

    @property
    def reason(self) -> str:
        """Which bound holds; of a pair that doesn't pay whether the network or the devices are to blame."""
        held = self.answer.offloaded.figures.step.bound.held_by if self.answer.offloaded else "no division works"
        if self.verdict.pays:
            return f"held by {held}"
        if self.answer.offloaded is None:
            return held
        blame = "the network" if self.without_network.pays else "the devices, whatever the network"
        return f"held by {held}; it is {blame}"


def read_pairs() -> Pairs:
    """Those that come with Pannier."""
    return msgspec.json.decode((files("pannier.planner") / "data" / "pairs.json").read_bytes(), type=Pairs)


def judge_pairs(
    pairs: Pairs, catalogue: Catalogue, question_of: Callable[[str, Mix], Question], shares: Shares = ACHIEVED
) -> Iterator[Judged]:
    """Each pair with each of the lengths; `question_of` says what is asked of a model."""
    for pair in pairs.pairs:
        compute, attention, dtype, wire = _kinds(pair, catalogue, shares)
        for lengths in pairs.lengths:
            asked = question_of(pair.model, Mix.equal(lengths.prompt, lengths.output))
            asked = replace(asked, model=asked.model.in_dtype(dtype))
            if wire is not None:
                asked = replace(asked, wire=wire, compute_counts=(1,), attention_counts=(1,))
            rivals = None if wire is None else (compute,)
            answer = search(asked, compute, attention, rivals)
            free = judge(search(replace(asked, wire=FREE), compute, attention, rivals))
            yield Judged(pair, lengths, dtype, asked, answer, judge(answer), free)


def host_memory(catalogue: Catalogue, pair: Pair, shares: Shares) -> Kind:
    """An instance's host memory, in a part for each of its accelerators."""
    instance, memory = catalogue.instance(pair.compute), catalogue.accelerator(pair.attention)
    assert memory.memory_gb_per_s is not None
    assert instance.ram_mib is not None
    device = Device(
        name=memory.name,
        flops=None,
        weight_bandwidth=1.0,  # it never has weights
        kv_bandwidth=shares.attention * pair.sockets * memory.memory_gb_per_s * GB / instance.accelerators,
        memory_bytes=shares.memory * instance.ram_mib * MIB / instance.accelerators,
        network=NO_LIMIT,
        usd_per_hour=0.0,
    )
    return Kind(name=memory.name, device=device, devices=instance.accelerators, native=("bfloat16", "float16"))


def _kinds(pair: Pair, catalogue: Catalogue, shares: Shares) -> tuple[Kind, Kind, str, Wire | None]:
    names = [pair.compute] if pair.sockets else [pair.compute, pair.attention]
    devices = [catalogue.accelerator(_accelerator(catalogue, name)) for name in names]
    dtype, _ = choose_dtype([(each.name, each.native) for each in devices], "auto")
    kinds = [_kind(catalogue, name, dtype, shares) for name in names]
    if not pair.sockets:
        return kinds[0], kinds[1], dtype, None
    assert pair.link is not None
    wire = Wire(round_trip_s=SAME_HOST_S, limit=LINKS[pair.link])
    return kinds[0], host_memory(catalogue, pair, shares), dtype, wire


def _accelerator(catalogue: Catalogue, name: str) -> str:
    return name.removeprefix(CARD) if name.startswith(CARD) else catalogue.instance(name).accelerator


def _kind(catalogue: Catalogue, name: str, dtype: str, shares: Shares) -> Kind:
    if not name.startswith(CARD):
        return kind_of(catalogue, name, dtype, shares)
    card = name.removeprefix(CARD)
    return card_kind(catalogue, card, read_prices().hourly()[card], CARD_NETWORK, dtype, shares)
