"""With FlashInfer's kernels, where they are asked for (see `pannier.ops.gpu`).

They know two kinds of rows: those that see all keys, and those that are the last keys themselves, so that each sees the
keys up to its own. These are decode rows, and chunks behind their past but for a window.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pannier.ops.paged_attention.batch import PagedBatch
from pannier.ops.paged_attention.plan import existing_views
from pannier.ops.paged_attention.segment import View

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's manual recommends for what it splits and merges."""


class Kind(NamedTuple):
    """What of a call decides its plan."""

    scale: float
    window: int
    softcap: float
    q_heads: int
    num_blocks: int
    kv_heads: int
    block_size: int
    size: int
    dtype: torch.dtype


class Part(NamedTuple):
    """Rows of one of the two kinds."""

    wrapper: Any
    """Planned."""
    rows: Tensor
    """int64: which of the batch."""


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.paged_attention`. Raises ValueError for what FlashInfer can't do.

    It can't do keys and values of unlike size, other dtypes than fp16 and bf16, equal in q and cache, and rows between
    its two kinds.
    """
    _check(q, keys, values)
    assert scales is None, "only 8 bits have any"
    rows, heads, size = q.shape
    num_blocks, kv_heads, block_size, _ = keys.shape
    kind = Kind(scale, window, softcap, heads, num_blocks, kv_heads, block_size, size, q.dtype)
    o = torch.zeros(rows, heads, size, dtype=torch.float32, device=q.device)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
    for part in batch.kept(kind, lambda: _plan(batch, kind)):
        part_o, part_lse = part.wrapper.run(q[part.rows], (keys, values), return_lse=True)
        o[part.rows] = part_o.float()
        lse[part.rows] = part_lse * math.log(2)
    return o, lse


def _check(q: Tensor, keys: Tensor, values: Tensor) -> None:
    if keys.shape[3] != values.shape[3]:
        raise ValueError(
            f"keys have size {keys.shape[3]} and values {values.shape[3]}; FlashInfer needs them to be equal"
            " (PANNIER_GPU_FORM=triton does without)"
        )
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"q is {q.dtype}, the cache {keys.dtype}; FlashInfer needs both to be torch.float16 or torch.bfloat16"
            " (PANNIER_GPU_FORM=triton does without)"
        )


def _plan(batch: PagedBatch, kind: Kind) -> list[Part]:
    views, _ = existing_views(batch.segments, kind.window, kind.block_size, kind.num_blocks)
    last = [view for view in views if _are_last(view)]
    others = [view for view in views if not _are_last(view)]
    for view in others:
        if kind.window or view.row_position < view.key_position + view.num_keys - 1:
            raise ValueError(
                f"rows at {view.row_position} on see a part of the keys at {view.key_position} to"
                f" {view.key_position + view.num_keys - 1}; FlashInfer can't do that (PANNIER_GPU_FORM=triton does)"
            )
    return [_part(group, kind, batch, causal=causal) for group, causal in ((last, True), (others, False)) if group]


def _are_last(view: View) -> bool:
    """Whether the rows are those of the last keys."""
    return view.row_position + view.num_rows == view.key_position + view.num_keys


def _part(views: Sequence[View], kind: Kind, batch: PagedBatch, *, causal: bool) -> Part:
    import flashinfer

    workspace = batch.scratch.take(
        "flashinfer", WORKSPACE_BYTES, torch.empty(1, dtype=torch.uint8, device=batch.device)
    )
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace.view(-1), "HND")
    blocks = torch.tensor([block for view in views for block in view.blocks], dtype=torch.int32)
    wrapper.plan(
        _starts(view.num_rows for view in views),
        _starts(len(view.blocks) for view in views),
        blocks.to(batch.device),
        torch.tensor([(view.num_keys - 1) % kind.block_size + 1 for view in views], dtype=torch.int32),
        kind.q_heads,
        kind.kv_heads,
        kind.size,
        kind.block_size,
        causal=causal,
        sm_scale=kind.scale,
        window_left=kind.window - 1,  # -1: none
        logits_soft_cap=kind.softcap,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
    )
    rows = [row for view in views for row in range(view.first_row, view.first_row + view.num_rows)]
    return Part(wrapper, torch.tensor(rows).to(batch.device))


def _starts(counts: Iterable[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
