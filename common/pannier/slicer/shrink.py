"""Makes a small configuration out of a large one that still has every kind of layer.

Sizes become small, each kind of size the same small number whatever the model: so two configurations that differ in
sizes only shrink to the same one. Lengths become shorter than the proof's sequences: a window, or a setting that
starts to matter at some position, would otherwise hide. An integer of unknown meaning might be such a length, so none
stays that is larger than the sequences, other than token ids.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Any

from transformers import PretrainedConfig

LENGTH = 40  # tokens in each of the proof's sequences
SHORT = 6  # what a window, and any other length, becomes
FEW_LAYERS = 3
LONG_PERIOD = 12  # layers that repeat after more than this aren't looked for

Settings = dict[str, Any]


class Kind(Enum):
    """What an integer in a configuration counts."""

    TOKEN = auto()
    LAYER = auto()
    LONGEST = auto()
    LENGTH = auto()
    VOCABULARY = auto()
    CHOSEN = auto()
    GROUPS = auto()
    KV_HEADS = auto()
    HEADS = auto()
    ROTARY_HEAD = auto()
    JOINED_HEAD = auto()
    VALUE_HEAD = auto()
    HEAD = auto()
    RANK = auto()
    EXPERTS = auto()
    SHARED = auto()
    INNER = auto()
    HIDDEN = auto()
    UNKNOWN = auto()


# The first pattern that a setting's name holds decides.
NAMES = (
    (Kind.TOKEN, r"(^|_)(id|ids|index)$|^vocab_offset$"),
    (Kind.VOCABULARY, r"vocab"),
    (Kind.HEAD, r"per_layer_input$"),
    (Kind.LAYER, r"layers?$|layers?_|^depth$|period|pattern|interval|every|step$|offset|first_k|num_dense|seed|^pad"),
    (Kind.LONGEST, r"position|^n_ctx$|seq_len|max_length|context_length"),
    (Kind.LENGTH, r"window|chunk|index_topk|extent|floor|distance|block_size|local_attention|prompt_length"),
    (Kind.GROUPS, r"groups?$"),
    (Kind.CHOSEN, r"per_tok|topk|top_k|moe_k$"),
    (Kind.KV_HEADS, r"(key_value|kv|kv_n)_heads$"),
    (Kind.HEADS, r"heads$|^n_head$|heads_per_layer$"),
    (Kind.ROTARY_HEAD, r"rope_head_dim|rotary_dim"),
    (Kind.JOINED_HEAD, r"qk_head_dim"),
    (Kind.VALUE_HEAD, r"v_head_dim|value_head_dim"),
    (Kind.HEAD, r"head_dim|head_size|d_head|dim_head|kv_channels|^d_kv$|query_pre_attn_scalar"),
    (Kind.RANK, r"rank"),
    (Kind.SHARED, r"shared_experts?$|zero_expert"),
    (Kind.EXPERTS, r"experts?$|expert_num$"),
    (Kind.INNER, r"intermediate|ffn|feed_forward|^d_?ff$|^n_inner$|mlp_dim"),
    (Kind.HIDDEN, r"hidden|model$|embd?|^dim$"),
)
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers")
KV_SHARED = "num_kv_shared_layers"
AS_THEY_ARE = ("id2label", "label2id", "rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Recipe:
    """One set of small sizes; where a model's sizes must agree in a way that one set doesn't meet, another may.

    Attributes:
        hidden: width of the residual.
        heads: query heads.
        head: size of a head, where the configuration names it.
        value: size of a value head, where it is named apart.
        divide: 0 for the sizes above; else sizes of vectors are divided by this, and heads stay as many as they are.
        all_layers: keep the number of layers.
    """

    hidden: int = 64
    heads: int = 4
    head: int = 16
    value: int = 12
    divide: int = 0
    all_layers: bool = False

    def size(self, kind: Kind, value: int) -> int:
        """The small size of a kind; `value` is the large one."""
        vector = kind in (Kind.HEAD, Kind.JOINED_HEAD, Kind.VALUE_HEAD, Kind.ROTARY_HEAD, Kind.HIDDEN, Kind.INNER)
        if self.divide and vector:
            return max(value // self.divide, 1)
        if self.divide and kind in (Kind.HEADS, Kind.KV_HEADS):
            return value
        sizes = {
            Kind.LONGEST: LENGTH + 8,  # some models count positions from a few on
            Kind.LENGTH: min(value, SHORT),
            Kind.VOCABULARY: 256,
            Kind.CHOSEN: min(value, 2),
            Kind.GROUPS: min(value, 2),
            Kind.HEADS: self.heads if value > 1 else 1,
            Kind.ROTARY_HEAD: self.head // 2,
            Kind.JOINED_HEAD: self.head + self.head // 2,
            Kind.VALUE_HEAD: self.value,
            Kind.HEAD: self.head,
            Kind.RANK: 24,
            Kind.SHARED: min(value, 2),
            Kind.EXPERTS: 8,
            Kind.INNER: 2 * self.hidden,
            Kind.HIDDEN: self.hidden,
        }
        return sizes.get(kind, min(value, 16))


RECIPES = (
    Recipe(),
    Recipe(value=16),
    Recipe(hidden=128, heads=8, value=16),
    Recipe(divide=16),
    Recipe(divide=8),
    Recipe(value=16, all_layers=True),
)


def shrink(config: PretrainedConfig, max_model_len: int, recipe: Recipe) -> PretrainedConfig:
    """A small configuration of the same type as `config`.

    Args:
        config: of any size.
        max_model_len: decides which of their frequencies rotary embeddings that vary are frozen at.
        recipe: the sizes.

    Raises:
        ValueError: the type's own checks refuse the sizes.
    """
    large = config.to_dict()
    small = _small(large, recipe, count())
    _scale_rotary(small, large, max_model_len)
    return type(config).from_dict(small)


def kind_of(name: str) -> Kind:
    """What the setting `name` counts, as far as its name tells."""
    return next((kind for kind, pattern in NAMES if re.search(pattern, name)), Kind.UNKNOWN)


def _small(large: Settings, recipe: Recipe, tokens: Iterator[int]) -> Settings:
    small = {name: _setting(name, value, large, recipe, tokens) for name, value in large.items()}
    counts = [name for name in LAYER_COUNTS if isinstance(large.get(name), int)]
    if not counts or recipe.all_layers:
        return small
    layers = large[counts[0]]
    keep = _layers_to_keep(large, layers)
    if large.get(KV_SHARED):
        keep, small[KV_SHARED] = min(layers, 2 * keep), min(layers // 2, keep)
    small |= {name: _first_layers(small[name], keep) for name, value in large.items() if _is_per_layer(value, layers)}
    return small | {name: keep for name in counts if large[name] == layers}


def _layers_to_keep(large: Settings, layers: int) -> int:
    """The shortest beginning of the model that has every kind of layer which the whole has."""
    columns = [_column(value, layers) for value in large.values() if _is_per_layer(value, layers)]
    kinds = list(zip(*columns, strict=True))
    first_seen = [kinds.index(kind) for kind in kinds]
    periods = [v for name, v in large.items() if kind_of(name) is Kind.LAYER and type(v) is int and v <= LONG_PERIOD]
    return min(layers, max([FEW_LAYERS, *(i + 1 for i in first_seen), *(period + 1 for period in periods)]))


def _is_per_layer(value: Any, layers: int) -> bool:
    """Whether a setting says something about each layer: a list as long, or a mapping from their numbers."""
    if isinstance(value, dict):
        return bool(value) and all(str(key).isdigit() and int(key) < layers for key in value)
    return isinstance(value, list) and len(value) == layers


def _column(value: Any, layers: int) -> list[str]:
    if isinstance(value, dict):
        value = {int(layer): item for layer, item in value.items()}
        return [str(value.get(layer)) for layer in range(layers)]
    return [str(item) for item in value]


def _first_layers(value: Any, keep: int) -> Any:
    if isinstance(value, dict):
        return {layer: item for layer, item in value.items() if int(layer) < keep}
    return value[:keep]


def _setting(name: str, value: Any, large: Settings, recipe: Recipe, tokens: Iterator[int]) -> Any:
    """The small value of one setting."""
    if isinstance(value, dict) and name not in AS_THEY_ARE:
        return _small(value, recipe, tokens)
    if isinstance(value, list):
        return [_setting(name, item, large, recipe, tokens) for item in value]
    if type(value) is not int or value <= 0:
        return copy.deepcopy(value)
    match kind_of(name):
        case Kind.LAYER if value <= LENGTH or name in LAYER_COUNTS:
            return value
        case Kind.TOKEN:
            return value if value < LENGTH else next(tokens) % LENGTH
        case Kind.KV_HEADS:
            return _kv_heads(value, large, recipe)
        case Kind.HEAD if value == large.get("qk_rope_head_dim"):
            return recipe.size(Kind.ROTARY_HEAD, value)
        case kind:
            return recipe.size(kind, value)


def _kv_heads(value: int, large: Settings, recipe: Recipe) -> int:
    """As many KV heads as query heads, or one, or in between: as in the large configuration."""
    heads = [v for name, v in large.items() if kind_of(name) is Kind.HEADS and type(v) is int and v > 0]
    if value == 1 or recipe.divide:
        return value
    return recipe.heads if value in heads else recipe.heads // 2


def _scale_rotary(small: Settings, large: Settings, max_model_len: int) -> None:
    """Sets up rotary kinds that vary so that the proof's length lies on the same side as `max_model_len`."""
    if isinstance(rotary := large.get("rope_parameters"), dict):
        small["rope_parameters"] = _rotary(rotary, large, small, max_model_len)
    if isinstance(original := large.get("original_max_position_embeddings"), int):
        small["original_max_position_embeddings"] = _original(original, max_model_len)


def _rotary(rotary: Settings, large: Settings, small: Settings, max_model_len: int) -> Settings:
    if "rope_type" not in rotary:
        return {
            name: _rotary(one, large, small, max_model_len) if isinstance(one, dict) else one
            for name, one in rotary.items()
        }
    if "dynamic" in rotary["rope_type"]:
        small["max_position_embeddings"] = _original(large["max_position_embeddings"], max_model_len)
    if rotary["rope_type"] != "longrope":
        return rotary
    head = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
    pairs = int(head * rotary.get("partial_rotary_factor", 1.0)) // 2
    return rotary | {
        "original_max_position_embeddings": _original(rotary["original_max_position_embeddings"], max_model_len),
        "short_factor": _spread(rotary["short_factor"], pairs),
        "long_factor": _spread(rotary["long_factor"], pairs),
    }


def _original(original: int, max_model_len: int) -> int:
    return LENGTH // 2 if max_model_len > original else LENGTH * 2


def _spread(values: list[float], count: int) -> list[float]:
    """`count` of the values, the first and the last among them."""
    return [values[i * (len(values) - 1) // max(count - 1, 1)] for i in range(count)]
