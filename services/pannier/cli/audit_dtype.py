"""`pannier audit dtype`: where a model converts between element types, what that costs, and what to do about it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.runtime.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from pannier.audit import Audit, Workload
    from pannier.runtime.model_source import ModelSource

FAILING = ("fix", "fuse")


def dtype(
    model: Annotated[str, typer.Argument(help="A folder, a hub's OWNER/NAME, 'embedded', or random:SHAPE.")],
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="What weights are loaded as; auto is as they are stored.")] = "auto",
    autocast: Annotated[str | None, typer.Option(metavar="DTYPE", help="Run every pass under autocast.")] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="sdpa|eager|...", help="transformers' attention, if not its own choice.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are timed, in each repeat.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Of timing and watching, in turns.")] = 3,
    graph: Annotated[bool, typer.Option("--graph/--no-graph", help="Trace it too, and compare the casts.")] = True,
    target: Annotated[
        str | None, typer.Option(metavar="INSTANCE", help="Predict for an instance of AWS instead; loads no weights.")
    ] = None,
    catalogue: Annotated[Path | None, typer.Option(help="A file whose rows replace or add to the catalogue's.")] = None,
    fail_on: Annotated[
        str | None, typer.Option(metavar="fix|fuse", help="Exit with 1 if there is such a verdict, or a worse one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Run a model of transformers as it is and report its conversions, or predict them for a device elsewhere."""
    if fail_on is not None and fail_on not in FAILING:
        raise typer.BadParameter(f"it is {fail_on!r}; it must be {' or '.join(FAILING)}", param_hint="--fail-on")
    from pannier.audit import Workload
    from pannier.cli.audit_report import print_audit, report_of

    work = Workload(prompt, steps, batch, repeats, None if autocast is None else _torch_dtype(autocast))
    if target is not None:
        found = _predict(model, target, dtype, work, catalogue)
    else:
        found = _run(model, device, dtype, attention, work, with_graph=graph)
    print_audit(found)
    if as_json:
        print(report_of(found).to_json())
    if fail_on is not None and any(str(each.judgement.verdict) in _as_bad(fail_on) for each in found.findings):
        raise typer.Exit(1)


def _as_bad(verdict: str) -> tuple[str, ...]:
    return FAILING[: FAILING.index(verdict) + 1]


def _run(model: str, device: str, dtype: str, attention: str | None, work: "Workload", *, with_graph: bool) -> "Audit":
    from pannier.audit import CannotRun, audit
    from pannier.audit.static import CannotTrace, trace
    from pannier.runtime.machine import open_device
    from pannier.runtime.model_source import resolve
    from pannier.runtime.weight_files import stored_in

    source = resolve(model)
    loaded = _loaded(source, dtype, attention).to(open_device(device))  # type: ignore[arg-type]  # of PreTrainedModel
    storage = "" if source.path is None else stored_in(source.path).dtype
    graph = None
    if with_graph:
        try:
            graph = trace(loaded.config, loaded.dtype)
        except CannotTrace as error:
            print(f"{error}: only what runs is reported", file=sys.stderr)
    try:
        return audit(loaded, work, name=source.name, storage=storage, graph=graph)
    except CannotRun as error:
        raise ModelError(str(error)) from error


def _loaded(source: "ModelSource", dtype: str, attention: str | None) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, PreTrainedModel

    from pannier.runtime.random_models import build

    if source.path is None:
        assert source.shape is not None
        model = build(source.shape, source.seed, _torch_dtype("bfloat16" if dtype == "auto" else dtype))
    else:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                source.path, dtype="auto" if dtype == "auto" else _torch_dtype(dtype)
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"{source.name} can't be loaded by transformers: {error}") from error
        assert isinstance(loaded, PreTrainedModel)
        model = loaded
    if attention is not None:
        model.set_attn_implementation(attention)
    return model.requires_grad_(False)


def _predict(model: str, instance: str, dtype: str, work: "Workload", catalogue: Path | None) -> "Audit":
    from pannier.audit.predict import audit_elsewhere
    from pannier.audit.static import CannotTrace
    from pannier.planner.catalogue import load_catalogue
    from pannier.runtime.model_source import resolve

    source = resolve(model, weights=False)
    config = _config(source)
    stored = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    known = load_catalogue(catalogue)
    accelerator = known.accelerator(known.instance(instance).accelerator)
    wanted = _torch_dtype(stored if dtype == "auto" else dtype)
    try:
        return audit_elsewhere(config, wanted, accelerator, work, name=source.name, instance=instance)
    except CannotTrace as error:
        raise ModelError(str(error)) from error


def _config(source: "ModelSource") -> "PretrainedConfig":
    from dataclasses import asdict

    from transformers import AutoConfig, LlamaConfig, PretrainedConfig

    if source.path is None:
        assert source.shape is not None
        return LlamaConfig(**asdict(source.shape))
    config = AutoConfig.from_pretrained(source.path)
    assert isinstance(config, PretrainedConfig)
    return config


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype is {name!r}; it must be auto, bfloat16, float16 or float32")
    return found
