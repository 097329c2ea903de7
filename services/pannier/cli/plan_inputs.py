"""What a plan is given on the command line: model, lengths, pools."""

from itertools import islice
from pathlib import Path

from pannier.planner.catalogue import Catalogue
from pannier.planner.devices import Kind, Shares, choose_dtype, kind_of
from pannier.planner.lamina import MODELS
from pannier.planner.mix import Mix
from pannier.planner.profile import Profile
from pannier.planner.search import COUNTS
from pannier.planner.sizes import CallSize, ModelSizes
from pannier.planner.trace import read_trace
from pannier.runtime.errors import ConfigError, ModelError
from pannier.runtime.model_source import EMBEDDED, resolve
from pannier.runtime.random_models import RandomShape

NUMBERS = {"weights_gb", "layers", "width", "queries_per_kv", "head"}
MODEL_HELP = (
    "A folder with a config.json (weights aren't needed), random:SHAPE, a model of the Lamina paper (LLaMA3-70B, ...), "
    "or numbers: weights_gb=16,layers=32,width=4096,queries_per_kv=4,head=128."
)


def model_sizes(specification: str) -> ModelSizes:
    """The sizes that a specification names. Raises `ModelError`."""
    if specification in MODELS:
        return MODELS[specification]
    if "=" in specification:
        return _from_numbers(specification)
    if specification.startswith("random:"):
        source = resolve(specification)
        assert source.shape is not None
        return shape_sizes(source.name, source.shape)
    folder = EMBEDDED if specification == "embedded" else Path(specification).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model {specification!r} is no folder with a config.json; give one, or {MODEL_HELP[2:]}")
    from pannier.slicer.load import CannotLoad
    from pannier.slicer.sizes import sizes_of

    try:
        return sizes_of(folder)
    except CannotLoad as error:
        raise ModelError(str(error)) from error


def shape_sizes(name: str, shape: RandomShape) -> ModelSizes:
    """The sizes of a Llama, without making it, and without importing torch."""
    hidden, head = shape.hidden_size, shape.head_dim
    attention = 2 * hidden * head * (shape.num_attention_heads + shape.num_key_value_heads)
    layer = attention + 3 * hidden * shape.intermediate_size + 2 * hidden
    table = shape.vocab_size * hidden
    read = shape.num_hidden_layers * layer + hidden + table
    call = CallSize(shape.num_attention_heads, shape.num_key_value_heads, head, head)
    parameters = read if shape.tie_word_embeddings else read + table
    return ModelSizes(name=name, parameters=parameters, read=read, calls=(call,) * shape.num_hidden_layers)


def mix_of(prompt: int, output: int, trace: Path | None, limit: int | None) -> Mix:
    """Requests of one length, or a trace's."""
    return Mix.equal(prompt, output) if trace is None else Mix.of(trace.stem, islice(read_trace(trace), limit))


def pool_of(option: str, given: str) -> tuple[str, tuple[int, ...]]:
    """An instance and how many of it: `g6.xlarge` for any number, `4xg6.xlarge` for four. Raises `ConfigError`."""
    count, times, name = given.partition("x")
    if times and count.isdecimal():
        if not int(count):
            raise ConfigError(f"{option} is {given!r}; a pool has at least 1 instance")
        return name, (int(count),)
    return given, COUNTS


def kinds_of(
    catalogue: Catalogue, names: tuple[str, str], wanted: str, shares: Shares, profiles: tuple[Profile, ...]
) -> tuple[Kind, Kind, str, str]:
    """The kinds of both pools, the dtype, and why it is this one. Raises `ConfigError`."""
    accelerators = [catalogue.accelerator(catalogue.instance(name).accelerator) for name in names]
    dtype, why = choose_dtype([(each.name, each.native) for each in accelerators], wanted)
    compute, attention = (kind_of(catalogue, name, dtype, shares, profiles) for name in names)
    if compute.device.flops is None:
        raise ConfigError(f"{names[0]}: how fast an {compute.device.name} multiplies {dtype} isn't established")
    return compute, attention, dtype, why


def candidates(catalogue: Catalogue) -> list[str]:
    """Of each family of GPU instances the size that is cheapest per accelerator; what lacks a figure is left out."""
    best: dict[str, tuple[float, str]] = {}
    for each in catalogue.instances.values():
        device = catalogue.accelerator(each.accelerator)
        known = (each.usd_per_hour, each.network_mbps, device.memory_gb_per_s, device.memory_gib)
        if not each.accelerators or None in known or device.architecture == "Neuron":
            continue
        assert each.usd_per_hour is not None
        price = each.usd_per_hour / each.accelerators
        best[each.family] = min(best.get(each.family, (price, each.name)), (price, each.name))
    return [name for _, name in best.values()]


def _from_numbers(specification: str) -> ModelSizes:
    try:
        given = {key: float(value) for key, _, value in (part.partition("=") for part in specification.split(","))}
    except ValueError as error:
        raise ModelError(f"the model {specification!r} has something that is no number") from error
    if unknown := given.keys() - NUMBERS:
        raise ModelError(f"the model has no {', '.join(sorted(unknown))}; numbers are {', '.join(sorted(NUMBERS))}")
    if missing := {"weights_gb", "layers", "width"} - given.keys():
        raise ModelError(f"the model lacks {', '.join(sorted(missing))}")
    if min(given.values()) <= 0:
        raise ModelError(f"the model {specification!r} has a number that isn't positive")
    return ModelSizes.dense(
        specification,
        weights_bytes=given["weights_gb"] * 1e9,
        layers=int(given["layers"]),
        width=int(given["width"]),
        queries_per_kv=int(given.get("queries_per_kv", 1)),
        head_size=int(given.get("head", 128)),
    )
