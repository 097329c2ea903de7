"""Operators of attention offloading, on plain tensors.

Each operator is a folder: `__init__` has the signature and picks a form from the tensors' device, `reference` is slow
and obvious, the others are fast. Nothing here knows messages, sequences or sockets.

Letters used in shapes:

=====  ==============================================================
S      segments: consecutive query rows of one sequence
T      packed rows of several chunks
M      query rows
N      stored rows
R      rows of one segment
H, G   query heads, KV heads; H is a multiple of G
Dk/Dv  key size, value size of a head
P, K   blocks, tokens in a block
L      keys of a segment
V      vocabulary
=====  ==============================================================

A *partial* is (o, l): the normalised output and the log-sum-exp of the scores, both fp32; an empty one is (0, -inf).
"""

from pannier.ops.chunk_attention import chunk_attention
from pannier.ops.kv_cache import CallShape, KVCache, block_bytes
from pannier.ops.merge_partials import merge_partials, merge_sinks
from pannier.ops.native import CpuIsa, cpu_isa
from pannier.ops.paged_attention import PagedBatch, PagedSegment, Scratch, paged_attention
from pannier.ops.store_kv import store_kv

__all__ = [
    "CallShape",
    "CpuIsa",
    "KVCache",
    "PagedBatch",
    "PagedSegment",
    "Scratch",
    "block_bytes",
    "chunk_attention",
    "cpu_isa",
    "merge_partials",
    "merge_sinks",
    "paged_attention",
    "store_kv",
]
