import torch

from pannier.attention.past import DrawnCache
from pannier.ops.kv_cache import CallShape


def test_a_drawn_cache_has_random_numbers_everywhere() -> None:
    """In every block of every call, of a size as keys and values have it."""
    cache = DrawnCache([CallShape(2, 8, 4)] * 2, 5, 16, torch.bfloat16, "cpu")
    for call in range(2):
        for stored in (cache.keys(call), cache.values(call)):
            assert all(block.float().std() > 0.5 for block in stored)
            assert stored.isfinite().all()
