"""What FlashInfer is given, checked with its wrapper played in plain torch: its kernels need a GPU.

The stand-in follows the wrapper's manual: with `causal` the rows are the last keys, and `window_left` keys before its
own are seen; the log-sum-exp is to the base of 2.
"""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pannier.ops import PagedBatch, PagedSegment, store_kv
from pannier.ops.paged_attention import flashinfer, reference

from .shapes import Extent, Heads, Scoring, assert_partials_close, nan_cache, random_segments, slots_of


class Wrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper` in so far as it is used."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.data_ptr() % 16 == 0
        assert layout == "HND"

    def plan(
        self, rows: Tensor, tables: Tensor, blocks: Tensor, last: Tensor, q_heads: int, kv_heads: int, size: int,
        block_size: int, **how: Any,
    ) -> None:  # fmt: skip
        self._rows, self._tables, self._blocks, self._last = rows.tolist(), tables.tolist(), blocks, last.tolist()
        self._heads, self._block_size, self._how = (q_heads, kv_heads, size), block_size, how

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse
        assert self._heads == (q.shape[1], cache[0].shape[1], q.shape[2])
        parts = [self._attend(q, *cache, number) for number in range(len(self._last))]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, number: int) -> tuple[Tensor, Tensor]:
        q = q[self._rows[number] : self._rows[number + 1]].float()
        table = self._blocks[self._tables[number] : self._tables[number + 1]]
        num_keys = (len(table) - 1) * self._block_size + self._last[number]
        k, v = (
            cache[table]
            .transpose(1, 2)
            .flatten(0, 1)[:num_keys]
            .float()
            .repeat_interleave(q.shape[1] // cache.shape[1], 1)
            for cache in (keys, values)
        )
        scores = torch.einsum("rhd,nhd->rhn", q, k) * self._how["sm_scale"]
        if cap := self._how["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        distance = num_keys - len(q) + torch.arange(len(q)).unsqueeze(1) - torch.arange(num_keys)
        if self._how["causal"]:
            left = self._how["window_left"]
            hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
            scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        else:
            assert self._how["window_left"] == -1
        o = torch.einsum("rhn,nhd->rhd", scores.softmax(dim=2), v)
        return o.to(keys.dtype), scores.logsumexp(dim=2) / math.log(2)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))


def _attend(listed: list[Extent], how: Scoring) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What it gives, and what the reference does."""
    shape, generator = Heads(2, 3, 64, 64), torch.Generator().manual_seed(1)
    segments, num_blocks = random_segments(listed, 16, generator)
    keys, values = (cache.half() for cache in nan_cache(num_blocks, 16, shape))
    _, k, v = shape.qkv(sum(extent.num_keys for extent in listed), generator)
    store_kv(keys, values, slots_of(segments, 16), k, v.clamp(-1, 1))
    q = shape.qkv(sum(extent.num_queries for extent in listed), generator)[0].half()
    batch = PagedBatch.build(segments, "cpu")
    given = flashinfer.paged_attention(q, keys, values, batch, **how)
    return given, reference.paged_attention(q, keys, values, batch, **how)


@pytest.mark.parametrize("window", [0, 20])
def test_decode_rows_are_the_last_keys(window: int) -> None:
    """Ragged lengths, rows that see nothing, a window that begins inside a block, a cap."""
    listed = [Extent(70, 0, 69, 1), Extent(0, 0, 0, 2), Extent(1, 0, 0, 1), Extent(33, 0, 30, 3)]
    given, expected = _attend(listed, Scoring(scale=0.125, window=window, softcap=20.0))
    assert_partials_close(given, expected, 3e-3)


def test_chunks_see_their_whole_past() -> None:
    """Beside decode rows, in one batch."""
    listed = [Extent(50, 0, 50, 9), Extent(70, 0, 69, 1), Extent(17, 64, 90, 3)]
    given, expected = _attend(listed, Scoring(scale=0.125, window=0, softcap=0.0))
    assert_partials_close(given, expected, 3e-3)


@pytest.mark.parametrize(("listed", "window"), [([Extent(50, 0, 50, 9)], 20), ([Extent(50, 0, 45, 9)], 0)])
def test_rows_between_the_two_kinds_are_refused(listed: list[Extent], window: int) -> None:
    """The error says which rows, and what does it."""
    with pytest.raises(ValueError, match=r"FlashInfer can't do that \(PANNIER_GPU_FORM=triton does\)"):
        _attend(listed, Scoring(scale=1.0, window=window, softcap=0.0))


@pytest.mark.parametrize(
    ("v_size", "dtype", "message"),
    [
        (32, torch.float16, "keys have size 64 and values 32; FlashInfer needs them to be equal"),
        (64, torch.float32, "q is torch.float32, the cache torch.float32; FlashInfer needs both to be torch.float16"),
    ],
)
def test_what_it_cannot_compute_is_refused(v_size: int, dtype: torch.dtype, message: str) -> None:
    """Nothing is converted behind one's back."""
    keys, values = torch.zeros(1, 1, 16, 64, dtype=dtype), torch.zeros(1, 1, 16, v_size, dtype=dtype)
    batch = PagedBatch.build([PagedSegment([0], 3, 0, 2, 1)], "cpu")
    with pytest.raises(ValueError, match=message):
        flashinfer.paged_attention(keys[:, 0, :1], keys, values, batch, scale=1.0, window=0, softcap=0.0)
