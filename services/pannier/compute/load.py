"""From a configuration to a sliced model, in an element type that the device computes and the model allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch

from pannier.compute.extremes import range_of
from pannier.runtime.config import ComputeConfig
from pannier.runtime.dtype_policy import (
    NARROW,
    Choice,
    choose_compute,
    choose_logits,
    choose_storage,
    in_range,
    out_of_range,
)
from pannier.runtime.errors import ModelError
from pannier.runtime.kernels import log_kernels
from pannier.runtime.machine import native_dtypes, open_device, product_s
from pannier.runtime.model_source import ModelSource
from pannier.runtime.random_models import build
from pannier.runtime.weight_files import Stored, stored_in
from pannier.slicer import CannotLoad, CannotSlice, SlicedModel, Stage, load, slice_model
from pannier.slicer.packed import can_pack, linear
from pannier.wire import Dtype
from pannier.wire.tensors import TORCH_DTYPES

ROWS = 8
"""Of the products by which types are compared, as in a decode step of a few sequences."""
COLD_BYTES = 48 << 20
"""Of weights in float32, so that they come from memory and not from caches."""
log = structlog.get_logger()


@dataclass(frozen=True)
class Loaded:
    """A model, and its element types by role."""

    model: SlicedModel
    dtypes: Mapping[str, Choice]


def load_model(config: ComputeConfig, source: ModelSource) -> Loaded:
    """The sliced model on its device, with progress in the log. Raises `ModelError`, `DeviceError`."""
    device = open_device(config.device)
    log_kernels(device, "attention inside prompts takes several times as long")
    stored = None if source.path is None else stored_in(source.path)
    files = None if stored is None else _wire_name(stored.dtype)
    compute = _choose(config, source, stored, device)
    model = _sliced(config, source, device, compute)
    if compute.dtype is Dtype.FLOAT16:
        found = range_of(model)
        reason = out_of_range(found)
        if reason is None:
            compute = Choice(compute.dtype, f"{compute.reason}; {in_range(found)}")
        elif config.dtype != "auto":
            raise ModelError(f"{source.name} can't be computed in float16: {reason}; set dtype to float32 or auto")
        else:
            del model  # make room
            compute = Choice(Dtype.FLOAT32, reason)
            model = _sliced(config, source, device, compute)
    dtypes = {"compute": compute, "storage": choose_storage(compute, files), "logits": choose_logits()}
    for role, choice in dtypes.items():
        log.info("dtype", what=role, dtype=choice.dtype.name.lower(), reason=choice.reason)
    return Loaded(model, dtypes)


def _choose(config: ComputeConfig, source: ModelSource, stored: Stored | None, device: torch.device) -> Choice:
    only, shape = config.emulate_dtypes, _usual_matrix(source, stored)
    native = native_dtypes(device) if only is None else (Dtype.FLOAT32, *(WIRE_NAMES[name] for name in only))
    wanted = None if config.dtype == "auto" else _wire_name(config.dtype)
    is_here = wanted is None and only is None and device.type == "cpu"
    measured = products_s(shape, native) if is_here and shape is not None and len(native) > 1 else {}
    return choose_compute(wanted, None if stored is None else _wire_name(stored.dtype), native, measured)


def products_s(shape: tuple[int, int], dtypes: Sequence[Dtype]) -> dict[Dtype, float]:
    """Seconds of a product with a weight [out, in] on this CPU, as slices make it."""
    cpu = torch.device("cpu")
    copies = max(1, COLD_BYTES // (4 * shape[0] * shape[1]))
    found = {}
    with torch.inference_mode():
        for dtype in dtypes:
            own = TORCH_DTYPES[dtype]
            x = torch.ones(ROWS, shape[1], dtype=own)
            weights = [torch.ones(shape, dtype=own) for _ in range(copies)]
            if can_pack(own, cpu):
                weights = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
            found[dtype] = product_s(lambda weight, x=x: linear(x, weight), weights)  # type: ignore[misc]
    return found


def _usual_matrix(source: ModelSource, stored: Stored | None) -> tuple[int, int] | None:
    if stored is not None:
        return stored.usual_matrix
    assert source.shape is not None
    return source.shape.intermediate_size, source.shape.hidden_size


def _sliced(config: ComputeConfig, source: ModelSource, device: torch.device, compute: Choice) -> SlicedModel:
    dtype, length, cache_dir = TORCH_DTYPES[compute.dtype], config.max_model_len, config.cache_dir
    stage = Stage(config.stage, config.stages)
    try:
        if source.path is not None:
            return load(
                source.path,
                dtype=dtype,
                device=device,
                max_model_len=length,
                stage=stage,
                cache_dir=cache_dir,
                progress=_say,
            )
        assert source.shape is not None
        _say(f"drawing random weights for {source.name}")
        model = build(source.shape, source.seed, dtype)
        return slice_model(model, device=device, max_model_len=length, stage=stage, cache_dir=cache_dir)
    except (CannotLoad, CannotSlice, ValueError) as error:
        raise ModelError(str(error)) from error


def _wire_name(name: str) -> Dtype | None:
    """The wire's name of one of torch's; None for types that don't cross it."""
    return WIRE_NAMES.get(name)


WIRE_NAMES = {dtype.name.lower(): dtype for dtype in (*NARROW, Dtype.FLOAT32)}


def _say(step: str) -> None:
    log.info("loading", step=step)
