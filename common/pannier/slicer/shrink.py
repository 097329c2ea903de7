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
from typing import Any

from transformers import PretrainedConfig

LENGTH = 40  # tokens in each of the proof's sequences
MOST_LAYERS = 12
FEW_LAYERS = 3

Config = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """One set of small sizes; where a model's sizes must agree in a way that one set doesn't meet, another may.

    Attributes:
        hidden: width of the residual.
        heads: query heads.
        head: size of a head, where the configuration names it.
        value: size of a value head, where it is named apart.
        experts: experts of a mixture.
        all_layers: keep the number of layers.
    """

    hidden: int = 64
    heads: int = 4
    head: int = 16
    value: int = 12
    experts: int = 8
    all_layers: bool = False


RECIPES = (
    Recipe(),
    Recipe(value=16),
    Recipe(hidden=128, heads=8, value=16),
    Recipe(hidden=128, head=32, value=32),
    Recipe(value=16, all_layers=True),
)

# What is never a length or a width.
NEITHER = re.compile(r"layer(s|_idx|_ids)?$|^num_.*layers|_layers_|(^|_)(index|seed|type_vocab_size)$|pad|truncate")
TOKEN = re.compile(r"(^|_)(id|ids|index)$")
LENGTHS = re.compile(
    r"window|position|n_ctx|seq_len|max_length|context_length|chunk|topk$|extent|floor|distance|block_size|"
    r"local_attention|prompt_length"
)
LONGEST = re.compile(r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_target_positions)$")
PERIODS = re.compile(r"period|pattern$|interval|every|sparse_step|first_k|num_dense|offset|layer_group|start_index")


def shrink(config: PretrainedConfig, max_model_len: int, recipe: Recipe) -> PretrainedConfig:
    """A small configuration of the same type as `config`.

    Args:
        config: of any size.
        max_model_len: decides which of their frequencies rotary embeddings that vary are frozen at.
        recipe: the sizes.

    Raises:
        ValueError: the type's own checks refuse the sizes.
    """
    small = _small(config.to_dict(), recipe)
    _scale_rotary(small, config.to_dict(), max_model_len)
    return type(config).from_dict(small)


def _small(config: Config, recipe: Recipe) -> Config:
    small = copy.deepcopy(config)
    layers = _number_of_layers(config)
    keep = layers if recipe.all_layers or layers is None else _layers_to_keep(config, layers)
    tokens = iter(range(0, 32))
    for name, value in config.items():
        small[name] = _setting(name, value, config, recipe, tokens)
        if layers is not None and isinstance(value, list) and len(value) == layers:
            small[name] = small[name][:keep]
        elif layers is not None and value == layers and name in LAYER_NUMBERS:
            small[name] = keep
    return small


LAYER_NUMBERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers")


def _number_of_layers(config: Config) -> int | None:
    return next((config[name] for name in LAYER_NUMBERS if isinstance(config.get(name), int)), None)


def _layers_to_keep(config: Config, layers: int) -> int:
    """The shortest beginning of the model that has every kind of layer which the whole has."""
    kinds = list(zip(*(map(str, value) for value in config.values() if _is_per_layer(value, layers)), strict=True))
    first_seen = [kinds.index(kind) for kind in kinds]
    periods = [v for k, v in config.items() if PERIODS.search(k) and isinstance(v, int) and v <= MOST_LAYERS]
    keep = max([FEW_LAYERS, *(i + 1 for i in first_seen), *(period + 1 for period in periods)])
    if shared := config.get("num_kv_shared_layers"):
        keep = max(keep, layers - shared + 2)
    return min(layers, keep)


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers


def _setting(name: str, value: Any, config: Config, recipe: Recipe, tokens: Iterator[int]) -> Any:
    """The small value of one setting."""
    if isinstance(value, bool) or name in ("id2label", "label2id", "rope_parameters", "rope_scaling"):
        return value
    if isinstance(value, dict):
        return _small(value, recipe)
    if isinstance(value, list):
        return [_setting(name, item, config, recipe, tokens) for item in value]
    if not isinstance(value, int) or value <= 0 or (NEITHER.search(name) and not TOKEN.search(name)):
        return value
    if TOKEN.search(name):
        return value if value < 32 else next(tokens)
    if LENGTHS.search(name):
        return LENGTH if LONGEST.search(name) else min(value, 6)
    return _size(name, value, config, recipe)


def _size(name: str, value: int, config: Config, recipe: Recipe) -> int:
    for pattern, size in _sizes(recipe):
        if re.search(pattern, name):
            return size if value > 1 else 1
    if re.search(r"(key_value_heads|kv_heads)$", name):
        return _kv_heads(value, config, recipe)
    if re.search(r"per_tok|topk|top_k|moe_k$", name):
        return min(value, 2)
    if re.search(r"group", name):
        return min(value, 2 if name.startswith("n") else 1)
    return value if value <= 16 else 16


def _sizes(recipe: Recipe) -> tuple[tuple[str, int], ...]:
    """Kinds of sizes; the first pattern that a setting's name holds decides."""
    return (
        (r"vocab", 256),
        (r"hidden_size_per_layer_input", 16),
        (r"qk_head_dim", recipe.head + 8),
        (r"rope_head_dim|^rotary_dim$", 8),
        (r"v_head_dim|value_head_dim", recipe.value),
        (r"head_dim|head_size|kv_channels|^d_kv$|^d_head$|query_pre_attn_scalar", recipe.head),
        (r"lora_rank", 24),
        (r"(?<!value)(?<!kv)(?<!kv_n)_heads$|^n_heads?$|^num_heads$|heads_per_layer$", recipe.heads),
        (r"intermediate|ffn|feed_forward|^d_ff$|^dff$|^n_inner$|mlp_dim|intermediate_size", 2 * recipe.hidden),
        (r"hidden|^d_model$|^n_embd$|embed|^dim$|emb_dim", recipe.hidden),
        (r"shared_experts?$|zero_expert", 1),
        (r"experts?$|expert_num$", recipe.experts),
    )


def _kv_heads(value: int, config: Config, recipe: Recipe) -> int:
    """As many KV heads as query heads, or one, or in between: as in the large configuration."""
    heads = [v for k, v in config.items() if re.search(r"^(num_(attention_)?heads|n_heads?)$", k)]
    if value == 1 or not heads:
        return min(value, 2)
    return recipe.heads if value == heads[0] else recipe.heads // 2


def _scale_rotary(small: Config, config: Config, max_model_len: int) -> None:
    """Sets up rotary kinds that vary so that the proof's length lies on the same side as `max_model_len`."""
    small["rope_parameters"] = _rotary(config.get("rope_parameters"), config, small, max_model_len)
    if small["rope_parameters"] is None:
        del small["rope_parameters"]
    original = config.get("original_max_position_embeddings")
    if isinstance(original, int):
        small["original_max_position_embeddings"] = _original(original, max_model_len)


def _rotary(rotary: Any, config: Config, small: Config, max_model_len: int) -> Any:
    if not isinstance(rotary, dict):
        return rotary
    if "rope_type" not in rotary:
        return {name: _rotary(one, config, small, max_model_len) for name, one in rotary.items()}
    if "dynamic" in rotary["rope_type"]:
        small["max_position_embeddings"] = _original(config["max_position_embeddings"], max_model_len)
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
