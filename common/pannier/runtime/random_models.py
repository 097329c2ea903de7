"""Models with random weights in named shapes: for measuring where no weights can be had. They have no tokenizer."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class RandomShape:
    """The sizes of a Llama, by their names in transformers' configuration."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int = 8192


SHAPES = {
    "llama-135m": RandomShape(30, 576, 9, 3, 64, 1536, 49152, tie_word_embeddings=True),
    "llama-1b": RandomShape(16, 2048, 32, 8, 64, 8192, 128256, tie_word_embeddings=True),
    "llama-8b": RandomShape(32, 4096, 32, 8, 128, 14336, 128256, tie_word_embeddings=False),
}


def build(shape: RandomShape, seed: int, dtype: "torch.dtype") -> "PreTrainedModel":
    """A model on the CPU whose weights depend on shape and seed only; another dtype rounds the same numbers."""
    # Here, because naming a shape must not cost importing torch.
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
    from transformers.initialization import no_init_weights

    config = LlamaConfig(**asdict(shape), eos_token_id=None, bos_token_id=None)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:  # the vectors are norms, which start as ones
            _fill(weight.detach(), generator)
    model.eval()
    return model


def _fill(weight: "torch.Tensor", generator: "torch.Generator") -> None:
    """Uniform values of standard deviation `WEIGHT_STD`, four out of each 64 random bits: quicker than `normal_`."""
    import torch

    scale = WEIGHT_STD * 3**0.5 / 2**15
    bits = torch.empty(1 << 20, dtype=torch.int64)
    for part in weight.view(-1).split(4 * bits.numel()):
        values = bits.random_(-(2**63), None, generator=generator).view(torch.int16)
        part.copy_(values[: part.numel()]).mul_(scale)
