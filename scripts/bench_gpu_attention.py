#!/usr/bin/env python
"""Decode attention on a GPU: its share of the memory's read bandwidth, beside torch's own on dense tensors.

64 sequences of 4,096 tokens unless told otherwise. Engines alternate; figures are medians over the repeats. The stream
that a share is of is the best sum of 1 GiB in the same run; what the memory's clock says at most is printed too, where
torch knows it. With --json the last line is one object.
"""

import argparse
import json
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pannier.ops import CallShape, KVCache, PagedBatch, PagedSegment, paged_attention, store_kv
from pannier.ops.gpu import gpu_form

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KEPT = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DENSE = "torch SDPA"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="bfloat16 where the GPU has it, else float16")
    parser.add_argument("--kv-dtype", choices=KEPT, default=None, help="of the blocks; as --dtype")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="in a repeat")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@dataclass(frozen=True)
class Engine:
    """One way to compute it."""

    attend: Callable[[], Tensor]
    num_bytes: int
    """Of keys and values, which it reads."""


def engines(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Engine]:
    """Attention of one row per sequence, over the same keys in blocks and in one dense tensor."""
    scale = given.size**-0.5
    q = torch.randn(given.sequences, given.q_heads, given.size, device=device).to(dtype)
    shape = (2, given.sequences, given.length, given.kv_heads, given.size)
    k, v = torch.randn(shape, device=device).to(dtype)
    cache, batch = stored(given, k, v)
    keys, values, scales = cache.keys(0), cache.values(0), cache.scales(0)
    k, v = (rows.transpose(1, 2).contiguous() for rows in (k, v))

    def in_blocks(attend: Callable[..., tuple[Tensor, Tensor]]) -> Engine:
        how = {"scale": scale, "window": 0, "softcap": 0.0, "scales": scales}
        num_bytes = cache.shapes[0].token_bytes(cache.dtype) * given.sequences * given.length
        return Engine(lambda: attend(q, keys, values, batch, **how)[0], num_bytes)

    def dense() -> Tensor:
        return scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True).squeeze(2)

    found = {f"pannier ({gpu_form(device).name})": in_blocks(paged_attention)}
    if find_spec("flashinfer") and scales is None and gpu_form(device).name != "flashinfer":
        from pannier.ops.paged_attention import flashinfer

        found["pannier (flashinfer)"] = in_blocks(flashinfer.paged_attention)
    return {**found, DENSE: Engine(dense, k.nbytes + v.nbytes)}


def stored(given: argparse.Namespace, k: Tensor, v: Tensor) -> tuple[KVCache, PagedBatch]:
    """Keys and values [sequences, length, G, size] in shuffled blocks, and the batch of the last tokens' rows."""
    blocks = -(-given.length // given.block_size)
    kept = KEPT[given.kv_dtype] if given.kv_dtype else k.dtype
    shape = CallShape(given.kv_heads, given.size, given.size)
    cache = KVCache([shape], given.sequences * blocks, given.block_size, kept, k.device)
    tables = torch.randperm(cache.num_blocks).view(given.sequences, blocks)
    token = torch.arange(given.length)
    for table, own_k, own_v in zip(tables, k, v, strict=True):
        slots = table[token // given.block_size] * given.block_size + token % given.block_size
        store_kv(cache.keys(0), cache.values(0), slots.to(k.device), own_k, own_v, cache.scales(0))
    segments = [PagedSegment(table, given.length, 0, given.length - 1, 1) for table in tables.tolist()]
    return cache, PagedBatch.build(segments, k.device)


def seconds_per_call(call: Callable[[], Tensor], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes per second by the memory's clock (two transfers each) and width, if torch says them."""
    found = torch.cuda.get_device_properties(device)
    clock_khz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2e3 * clock_khz * bits / 8 if clock_khz and bits else None


def main() -> int:
    given = options()
    if not torch.cuda.is_available():
        print("this needs a GPU; torch finds none here (for the CPU there is `pannier bench kernel`)", file=sys.stderr)
        return 1
    device = torch.device(given.device)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = DTYPES[given.dtype or ("bfloat16" if has_bf16 else "float16")]
    timed = engines(given, device, dtype)
    stream = torch.zeros(1 << 28, dtype=torch.float32, device=device)
    expected = timed[DENSE].attend().float()
    errors = {name: float((each.attend().float() - expected).abs().max()) for name, each in timed.items()}  # compiles
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(given.repeats):
        taken["stream"].append(seconds_per_call(stream.sum, given.calls))
        for name, each in timed.items():
            taken[name].append(seconds_per_call(each.attend, given.calls))
    bandwidth = stream.nbytes / min(taken["stream"])
    rates = {name: each.num_bytes / statistics.median(taken[name]) for name, each in timed.items()}
    kept = f" over {given.kv_dtype}" if given.kv_dtype else ""
    heads = f"{given.q_heads}/{given.kv_heads}x{given.size}"
    case = f"decode {given.sequences}x{given.length}, {heads} {str(dtype).removeprefix('torch.')}{kept}"
    print_table(case, device, bandwidth, {name: (timed[name].num_bytes, rates[name], errors[name]) for name in timed})
    if given.json:
        print(as_json(case, device, bandwidth, rates, taken))
    return 0


def print_table(case: str, device: torch.device, bandwidth: float, found: dict[str, tuple[int, float, float]]) -> None:
    """For each engine bytes, bytes per second and the largest difference from SDPA."""
    peak = peak_bandwidth(device)
    known = f", {peak / 1e9:.0f} by its clock" if peak else ""
    print(f"{case} on {torch.cuda.get_device_name(device)}, whose memory gives {bandwidth / 1e9:.0f} GB/s{known}")
    for name, (num_bytes, rate, error) in found.items():
        time_us, share = num_bytes / rate * 1e6, rate / bandwidth
        print(
            f"  {name:22} {time_us:9.1f} us {rate / 1e9:7.0f} GB/s {share:6.1%} of it   off SDPA by {error:.1e} at most"
        )


def as_json(
    case: str, device: torch.device, bandwidth: float, rates: dict[str, float], taken: dict[str, list[float]]
) -> str:
    shares = {"case": case, "metric": "share_of_bandwidth"}
    rows = [{**shares, "engine": name, "value": rate / bandwidth, "unit": ""} for name, rate in rates.items()]
    times = [
        {"case": case, "metric": "time", "engine": name, "value": statistics.median(taken[name]), "unit": "s"}
        | {"repeats": taken[name]}
        for name in rates
    ]
    ratios = [
        {"case": case, "metric": "time", "of": name, "to": DENSE}
        | {"value": statistics.median(taken[name]) / statistics.median(taken[DENSE])}
        for name in rates
        if name != DENSE
    ]
    machine = {"gpu": torch.cuda.get_device_name(device), "bandwidth": bandwidth, "peak": peak_bandwidth(device)}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    found = {"command": "bench gpu_attention", "machine": machine, "versions": versions, "rows": [*rows, *times]}
    return json.dumps({**found, "ratios": ratios})


if __name__ == "__main__":
    sys.exit(main())
