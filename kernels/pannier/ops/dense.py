"""Attention over dense keys and values: what the paged and the chunk form have in common."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """One partial per row of `q`; every row must see at least one key.

    q [B, H, R, Dk], k [B, H, L, Dk], v [B, H, L, Dv], any strides but the last; mask: None or fp32 that broadcasts to
    [B, H, R, L], 0 where a key is seen and -inf where not. `causal` (instead of a mask): row r sees keys 0 to r.
    Masked keys and values must be finite. Returns o [B, H, R, Dv] in the inputs' dtype or fp32, l [B, H, R] fp32.
    """
    q, k, v = _same_dtype(q, k, v)
    if softcap == 0.0 and q.device.type == "cpu":
        return _flash(q, k, v, mask, scale, causal)
    return _plain(q, k, v, _causal_mask(q.shape[2], q.device) if causal else mask, scale, softcap)


def _same_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's own kernel: scores and sums in fp32, whatever the inputs; wants keys and values of one size."""
    v_size = v.shape[3]
    size = max(q.shape[3], v_size)
    q, k, v = (_widen(tensor, size) for tensor in (q, k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return o[..., :v_size], lse


def _widen(tensor: Tensor, size: int) -> Tensor:
    """Zeros behind a head's elements change neither scores nor the outputs that are kept."""
    return tensor if tensor.shape[3] == size else pad(tensor, (0, size - tensor.shape[3]))


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q.float() * scale, k.float().transpose(2, 3))
    if softcap != 0.0:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights, v.float()), lse


def _causal_mask(rows: int, device: torch.device) -> Tensor:
    return torch.full((rows, rows), float("-inf"), device=device).triu_(1)
