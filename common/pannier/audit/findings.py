"""From what was seen to what is reported: conversions of one kind at one place, what they cost, and a verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pannier.audit.bound import Logits, Size, own_s, size_of, tied_s
from pannier.audit.calls import Call, name_of, streamed_bytes
from pannier.audit.device import Device
from pannier.audit.drive import DECODE
from pannier.audit.record import Recording
from pannier.audit.rules import Conversion, How, conversions_of, emulated_in
from pannier.audit.verdict import Case, Judgement, Verdict, judge, native_instead

EVERY_PRODUCT = "(every product)"


@dataclass(frozen=True)
class Amount:
    """What conversions come to in one forward pass.

    Attributes:
        count: conversions.
        nbytes: read and written by them.
        seconds: that they take.
        bound_s: that would be saved at most if they were gone.
        tokens: of the pass.
        step_s: seconds of the whole pass.
    """

    count: int
    nbytes: int
    seconds: float
    bound_s: float
    tokens: int
    step_s: float

    @property
    def share(self) -> float:
        """Of the pass's time."""
        return min(1.0, self.seconds / self.step_s)

    @property
    def gain(self) -> float:
        """The part of the pass's time that is saved at most."""
        return min(1.0, self.bound_s / self.step_s)


@dataclass(frozen=True)
class Site:
    """Where conversions of one kind happen."""

    path: str
    source: torch.dtype
    target: torch.dtype
    how: How
    size: Size

    def __str__(self) -> str:
        return f"{self.path}: {name_of(self.source)} to {name_of(self.target)}, {self.how}, {self.size}-sized"


@dataclass(frozen=True)
class Finding:
    """Conversions of one kind at one place; amounts by phase."""

    site: Site
    judgement: Judgement
    amounts: Mapping[str, Amount]

    @property
    def gain(self) -> float:
        """In the phase where it is the most."""
        return max(amount.gain for amount in self.amounts.values())


@dataclass(frozen=True)
class Fix:
    """What one remedy does to all the places that it is for; amounts by phase."""

    remedy: str
    sites: tuple[Site, ...]
    amounts: Mapping[str, Amount]

    @property
    def gain(self) -> float:
        """In the phase where it is the most."""
        return max(amount.gain for amount in self.amounts.values())


Conversions = dict[Site, dict[str, list[Conversion]]]
"""By place and phase."""


@dataclass(frozen=True)
class Found:
    """All findings, those to be fixed first and then by what they gain at most; and the remedies, best first."""

    findings: tuple[Finding, ...]
    fixes: tuple[Fix, ...]


def findings_of(recording: Recording, device: Device) -> Found:
    """Everything that is converted."""
    grouped = _grouped(recording, device)
    measure = _Measure(recording, device)
    causes = _causes(grouped, measure)
    of_weights = {_place(site) for site in grouped if site.size is Size.WEIGHT}
    findings = []
    for site, phases in grouped.items():
        amounts = {phase: measure.at(site, phase, each) for phase, each in phases.items()}
        alike = causes.get(_cause(site), amounts)
        goes_with = site.size is Size.ACTIVATION and _place(site) in of_weights
        case = _case(site, phases, alike, recording)
        findings.append(Finding(site, judge(case, goes_with=goes_with, native=device.native), amounts))
    findings.sort(key=lambda finding: (finding.judgement.verdict.rank, -finding.gain))
    return Found(tuple(findings), _fixes(findings, causes))


Cause = tuple[torch.dtype, torch.dtype, How, Size]
"""What conversions have in common that one remedy is for."""


def _causes(grouped: Conversions, measure: "_Measure") -> dict[Cause, dict[str, Amount]]:
    """What conversions of weights, cache and logits come to, wherever they are."""
    together: dict[Cause, dict[str, list[Conversion]]] = {}
    for site, phases in grouped.items():
        if site.size is not Size.ACTIVATION:
            for phase, each in phases.items():
                together.setdefault(_cause(site), {}).setdefault(phase, []).extend(each)
    return {
        cause: {phase: measure.of(phase, each) for phase, each in phases.items()} for cause, phases in together.items()
    }


def _fixes(findings: Sequence[Finding], causes: Mapping[Cause, Mapping[str, Amount]]) -> tuple[Fix, ...]:
    sites: dict[Cause, list[Finding]] = {}
    for finding in findings:
        if finding.judgement.verdict is Verdict.FIX and _cause(finding.site) in causes:
            sites.setdefault(_cause(finding.site), []).append(finding)
    fixes = [
        Fix(alike[0].judgement.reason, tuple(finding.site for finding in alike), causes[cause])
        for cause, alike in sites.items()
    ]
    return tuple(sorted(fixes, key=lambda fix: -fix.gain))


def _cause(site: Site) -> Cause:
    return site.source, site.target, site.how, site.size


def _place(site: Site) -> tuple[str, torch.dtype, torch.dtype]:
    return site.path, site.source, site.target


def _grouped(recording: Recording, device: Device) -> Conversions:
    """The conversions by place and phase. Decode comes first: it tells a cache from an activation."""
    found: Conversions = {}
    for phase in sorted(recording.calls, key=lambda phase: phase != DECODE):
        for conversion in _conversions(recording.calls[phase], device):
            site = _site(conversion, recording.vocabulary, found)
            found.setdefault(site, {}).setdefault(phase, []).append(conversion)
    return found


def _conversions(calls: Iterable[Call], device: Device) -> Iterable[Conversion]:
    for call in calls:
        yield from conversions_of(call)
        if (emulated := emulated_in(call, device.native_types)) is not None:
            yield emulated


def _site(conversion: Conversion, vocabulary: int, known: Conversions) -> Site:
    source, target, how = conversion.source, conversion.target, conversion.how
    if how is How.EMULATED:
        return Site(EVERY_PRODUCT, source.dtype, target, how, Size.WEIGHT)
    site = Site(conversion.call.path, source.dtype, target, how, size_of(source, vocabulary))
    of_cache = Site(site.path, site.source, site.target, how, Size.CACHE)
    # A prompt's keys and values are not known as such before they have been kept.
    return of_cache if site.size is Size.ACTIVATION and site not in known and of_cache in known else site


def _case(
    site: Site, phases: Mapping[str, list[Conversion]], amounts: Mapping[str, Amount], recording: Recording
) -> Case:
    rows = 0
    if site.size is Size.VOCABULARY:
        rows = max(each.source.elements for found in phases.values() for each in found) // recording.vocabulary
    share = max(amount.share for amount in amounts.values())
    return Case(site.size, site.how, site.source, site.target, share, rows_too_many=rows > recording.work.batch)


class _Measure:
    """What conversions come to."""

    def __init__(self, recording: Recording, device: Device) -> None:
        self._recording = recording
        self._device = device
        self._logits = Logits(recording.vocabulary, recording.work.batch)

    def at(self, site: Site, phase: str, conversions: Sequence[Conversion]) -> Amount:
        """Of one place, with what is tied to it there; logits are made in one place and converted in another."""
        calls = self._recording.calls[phase]
        everywhere = site.size is Size.VOCABULARY
        return self._amount(phase, conversions, [call for call in calls if everywhere or call.path == site.path])

    def of(self, phase: str, conversions: Sequence[Conversion]) -> Amount:
        """Of several places, with whatever is tied to them."""
        return self._amount(phase, conversions, self._recording.calls[phase])

    def _amount(self, phase: str, conversions: Sequence[Conversion], calls: Sequence[Call]) -> Amount:
        own = own_s(conversions, on_cpu=self._device.kind == "cpu")
        if conversions[0].how is How.EMULATED:
            bound = own - self._streaming_s(phase, conversions[0])
        else:
            bound = own + tied_s(conversions, calls, self._logits)
        return Amount(
            count=len(conversions),
            nbytes=sum(each.nbytes for each in conversions),
            seconds=own,
            bound_s=max(0.0, bound),
            tokens=self._recording.tokens(phase),
            step_s=self._recording.step_s(phase),
        )

    def _streaming_s(self, phase: str, emulated: Conversion) -> float:
        """What it takes at least, emulated or not: reading the weights once, in the type that is used instead."""
        instead: torch.dtype = getattr(torch, native_instead(self._device.native))
        streamed = streamed_bytes(self._recording.calls[phase], self._recording.stored)
        return streamed * instead.itemsize / emulated.source.dtype.itemsize / self._device.bandwidth
