"""One audit: a recording, what was found in it, and what stands above that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from pannier.audit.device import Device, describe
from pannier.audit.drive import Workload
from pannier.audit.findings import Finding, Fix, findings_of
from pannier.audit.header import (
    Budget,
    Dtypes,
    attention_of,
    budget_of,
    dtypes_of,
    fallbacks_of,
    graph_says,
    profiler_says,
)
from pannier.audit.record import Recording, record, storage_dtypes
from pannier.audit.static import Graph


@dataclass(frozen=True)
class Audit:
    """What one model does with element types on one device."""

    model: str
    device: Device
    recording: Recording
    findings: tuple[Finding, ...]
    """Those to be fixed first, then by what removing them gains at most."""
    fixes: tuple[Fix, ...]
    """Remedies for all the places that they are for, best first."""
    dtypes: Dtypes
    attention: str
    fallbacks: tuple[str, ...]
    budget: Budget
    checks: tuple[str, ...]
    """What others say who count casts, one sentence each."""


def audit(
    model: PreTrainedModel,
    work: Workload = Workload(),
    *,
    name: str = "",
    storage: str = "",
    device: Device | None = None,
    make_cache: Callable[[], Any] | None = None,
    graph: Graph | None = None,
) -> Audit:
    """Run a model of transformers as it is, and report what it converts.

    Args:
        name: what the report calls it; its class when empty.
        storage: the element type of its files, if there are any.
        device: what its device does natively; measured where not given.
        make_cache: what keeps keys and values, in place of the model's own choice.
        graph: the same model traced, whose casts are compared with those of the run.

    Raises:
        CannotRun: it isn't a model that continues a text.
    """
    model.train(False)
    recording = record(model, work, make_cache)
    device = device or describe(model.device)
    dtypes = dtypes_of(recording, storage_dtypes(model), storage)
    found = findings_of(recording, device)
    return Audit(
        model=name or type(model).__name__,
        device=device,
        recording=recording,
        findings=found.findings,
        fixes=found.fixes,
        dtypes=dtypes,
        attention=attention_of(recording),
        fallbacks=tuple(fallbacks_of(recording, device, dtypes.compute, model.named_buffers())),
        budget=budget_of(recording, device),
        checks=(profiler_says(recording), *([graph_says(graph, recording)] if graph is not None else [])),
    )
