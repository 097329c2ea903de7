"""Run by the test of the sanitizers: a build in a folder, through awkward shapes."""

import sys
from itertools import product
from pathlib import Path

import torch

from pannier.ops import PagedBatch, PagedSegment, native
from pannier.ops.chunk_attention import cpu as chunk_cpu
from pannier.ops.chunk_attention import reference as chunk_reference
from pannier.ops.paged_attention import cpu, cpu_plan, reference
from pannier.ops.quantise import is_scaled
from pannier.ops.store_kv import cpu as store_cpu

BLOCKS = 12
SIZES = ((64, 128), (80, 96), (5, 33))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def _segments(block_size: int) -> list[PagedSegment]:
    """The last key of the last block, a lone key, an empty segment, and rows in the middle of the keys."""
    room = 6 * block_size
    return [
        PagedSegment(range(6, 12), room, 0, room - 1, 1),
        PagedSegment([0], 1, 0, 0, 1),
        PagedSegment([], 0, 0, 0, 2),
        PagedSegment(range(1, 6), 5 * block_size - 1, 3, 4 * block_size, 2),
    ]


def check_paged(
    built: native.Library, sizes: tuple[int, int], block_size: int, heads_per_kv: int, dtype: torch.dtype
) -> None:
    """Store into every slot, then attend; raises where the reference has something else."""
    keys, values = (torch.empty(BLOCKS, 2, block_size, size, dtype=dtype) for size in sizes)
    scales = (torch.empty(BLOCKS, 2, block_size), torch.empty(BLOCKS, 2, block_size)) if is_scaled(dtype) else None
    k, v = (torch.randn(BLOCKS * block_size, 2, size).clamp(-1, 1) for size in sizes)
    store_cpu.store_with(built, keys, values, torch.randperm(BLOCKS * block_size), k, v, scales)
    batch = PagedBatch.build(_segments(block_size), "cpu")
    q_dtypes = (torch.float32, torch.bfloat16) if dtype in EIGHT_BITS else (dtype,)
    for (window, softcap), q_dtype in product(((0, 0.0), (7, 0.0), (0, 5.0)), q_dtypes):
        q = torch.randn(batch.num_rows, 2 * heads_per_kv, sizes[0]).to(q_dtype)
        scale = sizes[0] ** -0.5
        actual = cpu.attend_with(built, q, keys, values, batch, scale, window, softcap, scales)
        expected = reference.paged_attention(
            q, keys, values, batch, scale=scale, window=window, softcap=softcap, scales=scales
        )
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


def check_chunks(built: native.Library, sizes: tuple[int, int], heads_per_kv: int, dtype: torch.dtype) -> None:
    """The same for attention inside chunks."""
    lengths = [1, 0, 67, 3]
    q, k, v = (
        torch.randn(sum(lengths), heads, size).clamp(-1, 1).to(dtype)
        for heads, size in ((2 * heads_per_kv, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    )
    for window, softcap in ((0, 0.0), (7, 0.0), (0, 5.0)):
        scale = sizes[0] ** -0.5
        actual = chunk_cpu.attend_with(built, q, k, v, lengths, scale, window, softcap)
        expected = chunk_reference.chunk_attention(q, k, v, lengths, scale=scale, window=window, softcap=softcap)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


def check_stream(built: native.Library) -> None:
    """The rate of reading is measured by reading to the last byte and no further."""
    for size in (0, 1, 511, 4096, 2**20 + 3):
        data = torch.zeros(size, dtype=torch.uint8)
        built.read_stream(built.parallel, 1, data.data_ptr(), size)


def main() -> None:
    """In one go, then in parts for several threads."""
    torch.manual_seed(0)
    # One thread takes what is planned for three: nobody waits for busy cores.
    built = native.load(sys.argv[1], Path(sys.argv[2]))._replace(parallel=0)
    for threads, shared_bytes in ((1, 2**40), (3, 0)):
        torch.set_num_threads(threads)
        cpu_plan.SHARED_BYTES = shared_bytes
        check_stream(built)
        for sizes in SIZES:
            heads_per_kv = (1, 3, 20)[sizes[0] % 3]
            for dtype in DTYPES:
                check_chunks(built, sizes, heads_per_kv, dtype)
            for block_size, dtype in product((1, 16, 64), (*DTYPES, *EIGHT_BITS)):
                check_paged(built, sizes, block_size, heads_per_kv, dtype)
    print("all agree")  # noqa: T201


if __name__ == "__main__":
    main()
