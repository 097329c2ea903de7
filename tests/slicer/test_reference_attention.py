"""The proof's attention is the usual one."""

from itertools import pairwise

import pytest
import torch

from pannier.slicer import Call
from pannier.slicer.reference_attention import Past, attend


def call(window: int = 0, softcap: float = 0.0) -> Call:
    return Call(0, q_heads=4, kv_heads=2, k_size=8, v_size=6, scale=0.3, window=window, softcap=softcap, sinks=None)


def inputs(tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(tokens, *shape, generator=random) for shape in ((4, 8), (2, 8), (2, 6)))  # type: ignore[return-value]


@pytest.mark.parametrize("window", [0, 1, 4, 99])
def test_agrees_with_torch(window: int) -> None:
    q, k, v = inputs()
    distance = torch.arange(9)[:, None] - torch.arange(9)[None]
    visible = (distance >= 0) & (distance < (window or 9))
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q4, k4, v4, visible, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(call(window), q, k, v, None), want[0].transpose(0, 1))


def test_in_pieces_or_at_once_is_the_same() -> None:
    q, k, v = inputs()
    past, limits = Past(), (0, 4, 5, 9)
    pieces = [
        past.attend(call(window=3, softcap=2.0), q[start:stop], k[start:stop], v[start:stop], None)
        for start, stop in pairwise(limits)
    ]
    torch.testing.assert_close(torch.cat(pieces), attend(call(window=3, softcap=2.0), q, k, v, None))


def test_sinks_take_a_share() -> None:
    q, k, v = inputs(tokens=1)
    sinks = torch.tensor([float("-inf"), 0.0, 1.0, 50.0])
    alone, shared = attend(call(), q, k, v, None), attend(call(), q, k, v, sinks)
    torch.testing.assert_close(shared[:, 0], alone[:, 0])
    scores = torch.einsum("qhd,shd->hq", q, k.repeat_interleave(2, 1))[:, 0] * 0.3
    torch.testing.assert_close(shared[0], alone[0] * (scores - sinks).sigmoid()[:, None])
