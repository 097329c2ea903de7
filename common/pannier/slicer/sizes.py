"""The sizes of a model from its configuration alone: it runs once over tensors that have shapes and no contents.

So they hold for whatever the library can build, without its weights, and whether or not it could be sliced.
"""

from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pannier.planner.sizes import CallSize, ModelSizes
from pannier.slicer.attend import window_of
from pannier.slicer.load import CannotLoad
from pannier.slicer.refusal import Unsupported, one_line

IMPLEMENTATION = "pannier-sizes"
ROWS = 5
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def sizes_of(path: Path) -> ModelSizes:
    """The sizes of the model in a folder, of which only config.json is read. Raises `CannotLoad`."""
    try:
        config = AutoConfig.from_pretrained(path)
        with FakeTensorMode():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            return _sizes(path.resolve().name, model, _calls(model))
    except Unsupported as reason:
        raise CannotLoad(f"{path}: its attention can't be offloaded, it {reason}") from reason
    except Exception as error:
        # This runs the model's own code, which may raise anything.
        raise CannotLoad(f"{path}: its sizes can't be found ({one_line(error)})") from error


def _calls(model: PreTrainedModel) -> tuple[CallSize, ...]:
    """Every attention call of one step. Raises `Unsupported` if there is none that the library would let us make."""
    calls: list[CallSize] = []
    windows: list[tuple[torch.Tensor, int]] = []  # the masks are kept, for each to be known again

    def attention(
        _: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        """q [1, H, T, Dk], k [1, G, T, Dk], v [1, G, T, Dv]."""
        window = given.get("sliding_window") or next((window for known, window in windows if known is mask), 0)
        calls.append(CallSize(q.shape[1], k.shape[1], k.shape[3], v.shape[3], window))
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]), None

    def mask(*, q_length: int, kv_length: int, mask_function: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        made = torch.empty(1, 1, q_length, kv_length, dtype=dtype)
        windows.append((made, window_of(mask_function)))
        return made

    if not model._can_set_attn_implementation():
        raise Unsupported("has attention of its own, outside the library's attention interface")
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)
    model.set_attn_implementation(IMPLEMENTATION)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, ROWS, dtype=torch.int64), use_cache=False)
    if not calls:
        raise Unsupported("makes no attention call")
    return tuple(calls)


def _sizes(name: str, model: PreTrainedModel, calls: tuple[CallSize, ...]) -> ModelSizes:
    weights = dict(model.named_parameters())  # tied ones once
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is table.weight
    experts, chosen = _setting(model.config, EXPERTS), _setting(model.config, CHOSEN)
    routed = [w for path, w in weights.items() if experts and ".experts." in path and w.shape[0] == experts]
    expert = sum(weight.numel() for weight in routed)
    parameters = sum(weight.numel() for weight in weights.values())
    looked_up = 0 if is_tied else sum(weight.numel() for weight in table.parameters())
    return ModelSizes(
        name=name,
        parameters=parameters,
        read=parameters - looked_up - expert,
        expert=expert,
        experts=experts if routed else 0,
        chosen=chosen if routed else 0,
        calls=calls,
    )


def _setting(config: PretrainedConfig, names: tuple[str, ...]) -> int:
    """The first of these settings that the text decoder has; 0 for none."""
    decoder = config.get_text_config(decoder=True)
    return next((int(getattr(decoder, name)) for name in names if isinstance(getattr(decoder, name, None), int)), 0)
