"""Cuts any transformers decoder at its attention calls, and proves that what is left is still the same model.

    model = load("path/to/model", dtype=torch.bfloat16, device="cuda")
    logits = yield from model.run(ids, positions, rows)   # yields Attend, is sent attention outputs

Shape letters: T packed rows, R rows whose logits are wanted, H query heads, G KV heads, Dk and Dv the sizes of a key
and a value head, V vocabulary.
"""

from pannier.slicer.cache import default_cache_dir
from pannier.slicer.cut import Call
from pannier.slicer.load import CannotLoad, Progress, load, slice_model
from pannier.slicer.model import Attend, Run, SlicedModel
from pannier.slicer.refusal import CannotSlice
from pannier.slicer.stage import WHOLE, Stage

__all__ = [
    "WHOLE",
    "Attend",
    "Call",
    "CannotLoad",
    "CannotSlice",
    "Progress",
    "Run",
    "SlicedModel",
    "Stage",
    "default_cache_dir",
    "load",
    "slice_model",
]
