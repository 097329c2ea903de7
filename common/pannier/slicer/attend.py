"""The two operators that mark attention in a graph, and the hooks through which a model calls them.

Shape letters of the slicer: T packed rows, R rows whose logits are wanted, H query heads, G KV heads, Dk and Dv the
sizes of a key and a value head, V vocabulary.

Nothing here computes. A model that runs under the attention implementation `pannier` is only ever traced: its graph
then names each attention call, and the mask that each call was given, and `cut` takes them out.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pannier.slicer.refusal import Unsupported

IMPLEMENTATION = "pannier"

# Passed along to every attention call, and of no consequence to its result.
HARMLESS = {
    "cache_position",
    "deterministic",
    "dropout",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


@torch.library.custom_op("pannier::attend", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Marks an attention call: q [T, H, Dk], k [T, G, Dk], v [T, G, Dv], mask [1, 1, T, T], sinks [H] -> [T, H, Dv]."""
    raise RuntimeError("pannier::attend marks a place in a graph, it can't be run")


@attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("pannier::causal_mask", mutates_args=())
def causal_mask(length: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Marks a causal mask [1, 1, length, length]; a row sees `window` tokens, itself included, or all if that is 0."""
    raise RuntimeError("pannier::causal_mask marks a place in a graph, it can't be run")


@causal_mask.register_fake
def _(length: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1, 1, length, length, dtype=dtype)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that a model calls: query [1, H, T, Dk], key [1, G, T, Dk], value [1, G, T, Dv].

    Returns:
        the attention output [1, T, H, Dv], and no attention weights.

    Raises:
        Unsupported: the call asks for more than causal attention with scale, window, soft-cap and sinks.
    """
    if is_causal is False:
        raise Unsupported("asks for attention that isn't causal")
    if attention_mask is None:
        raise Unsupported("attends without a mask")
    for name, given in others.items():
        if given is not None and name not in HARMLESS:
            raise Unsupported(f"gives attention a {name}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = s_aux if sinks is None else sinks
    output = attend(q, k, v, attention_mask, sinks, scale, sliding_window or 0, float(softcap or 0))
    return output[None], None


def mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], dtype: torch.dtype, **_: Any
) -> torch.Tensor:
    """The mask function that a model calls: marks what kind of mask it asked for.

    Raises:
        Unsupported: it asked for anything but a causal mask, with or without a window.
    """
    marked: torch.Tensor = causal_mask(q_length, window_of(mask_function), dtype)
    return marked


def window_of(mask_function: Callable[..., Any]) -> int:
    """The window that a mask function describes, 0 for plain causal.

    The library builds masks by wrapping functions in functions, so what a mask does is read from what it wraps.

    Raises:
        Unsupported: it describes something else.
    """
    if mask_function is masking_utils.causal_mask_function:
        return 0
    if _made_by(mask_function, masking_utils.remap_positions_for_packed_sequence, None, None):
        return window_of(_enclosed(mask_function, "mask_function"))
    if _made_by(mask_function, masking_utils.and_masks):
        return _window_of_all(_enclosed(mask_function, "mask_functions"))
    if mask_function is masking_utils.bidirectional_mask_function:
        raise Unsupported("is not a causal decoder as it is configured, it asks for a bidirectional mask")
    raise Unsupported(f"asks for a mask that is neither causal nor a window ({_names([mask_function])})")


def _window_of_all(parts: tuple[Callable[..., Any], ...]) -> int:
    """The window of a conjunction: causal, at most one window, and the split of packed rows into their sequences."""
    parts = tuple(p for p in parts if not _made_by(p, masking_utils.packed_sequence_mask_function, None))
    windows = [p for p in parts if _made_by(p, masking_utils.sliding_window_overlay, 1)]
    others = [p for p in parts if p not in windows]
    if len(others) != 1 or len(windows) > 1 or (windows and window_of(others[0]) != 0):
        raise Unsupported(f"asks for a mask that is neither causal nor a window ({_names(parts)})")
    return int(_enclosed(windows[0], "sliding_window")) if windows else window_of(others[0])


def _names(mask_functions: Iterable[Callable[..., Any]]) -> str:
    return " and ".join(function.__qualname__.split(".")[0] for function in mask_functions)


def _made_by(function: Callable[..., Any], maker: Callable[..., Callable[..., Any]], *example: Any) -> bool:
    """Whether `function` is a closure that `maker` returns."""
    return getattr(function, "__code__", None) is getattr(maker(*example), "__code__", None)


def _enclosed(function: Callable[..., Any], name: str) -> Any:
    """What the closure `function` holds under `name`."""
    closure = getattr(function, "__closure__", ())
    cells = dict(zip(function.__code__.co_freevars, closure, strict=True))
    return cells[name].cell_contents


def register() -> None:
    """Makes `set_attn_implementation("pannier")` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)


register()
