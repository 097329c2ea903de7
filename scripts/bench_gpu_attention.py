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
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pannier.ops import CallShape, KVCache, PagedBatch, PagedSegment, paged_attention
from pannier.ops.gpu import gpu_form

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Engine = Callable[[], Tensor]


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="in a repeat")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def engines(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Engine]:
    """Attention of one row per sequence, over the same keys in blocks and in one dense tensor."""
    blocks = -(-given.length // given.block_size)
    shape = CallShape(given.kv_heads, given.size, given.size)
    cache = KVCache([shape], given.sequences * blocks, given.block_size, dtype, device)
    keys, values = cache.keys(0).normal_(), cache.values(0).normal_()
    tables = torch.randperm(cache.num_blocks).view(given.sequences, blocks)
    segments = [PagedSegment(table, given.length, 0, given.length - 1, 1) for table in tables.tolist()]
    batch = PagedBatch.build(segments, device)
    q = torch.randn(given.sequences, given.q_heads, given.size, device=device).to(dtype)
    scale = given.size**-0.5
    dense_k, dense_v = (
        stored[tables.flatten().to(device)]
        .unflatten(0, tables.shape)
        .transpose(1, 2)
        .flatten(2, 3)[:, :, : given.length]
        .contiguous()
        for stored in (keys, values)
    )

    def dense() -> Tensor:
        return scaled_dot_product_attention(q.unsqueeze(2), dense_k, dense_v, scale=scale, enable_gqa=True).squeeze(2)

    found: dict[str, Engine] = {
        f"pannier ({gpu_form(device).name})": lambda: paged_attention(
            q, keys, values, batch, scale=scale, window=0, softcap=0.0
        )[0],
        "torch SDPA": dense,
    }
    if find_spec("flashinfer") and gpu_form(device).name != "flashinfer":
        from pannier.ops.paged_attention import flashinfer

        found["pannier (flashinfer)"] = lambda: flashinfer.paged_attention(
            q, keys, values, batch, scale=scale, window=0, softcap=0.0
        )[0]
    return found


def seconds_per_call(engine: Engine, calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        engine()
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
    expected = timed["torch SDPA"]().float()
    errors = {name: float((engine().float() - expected).abs().max()) for name, engine in timed.items()}  # compiles, too
    taken: dict[str, list[float]] = {name: [] for name in ("stream", *timed)}
    for _ in range(given.repeats):
        taken["stream"].append(seconds_per_call(stream.sum, given.calls))
        for name, engine in timed.items():
            taken[name].append(seconds_per_call(engine, given.calls))
    report(given, device, dtype, taken, errors, stream.nbytes)
    return 0


def report(
    given: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    taken: dict[str, list[float]],
    errors: dict[str, float],
    stream_bytes: int,
) -> None:
    read = given.sequences * given.length * given.kv_heads * given.size * 2 * dtype.itemsize
    bandwidth = stream_bytes / min(taken["stream"])
    peak = peak_bandwidth(device)
    case = f"decode {given.sequences}x{given.length}, {given.q_heads}/{given.kv_heads}x{given.size} {dtype}"
    name = torch.cuda.get_device_name(device)
    known = f", {peak / 1e9:.0f} by its clock" if peak else ""
    print(
        f"{case} on {name}: {read / 1e9:.2f} GB of keys and values; the memory gives {bandwidth / 1e9:.0f} GB/s{known}"
    )
    rows = []
    for engine, error in errors.items():
        rate = read / statistics.median(taken[engine])
        rows.append(
            {"case": case, "engine": engine, "metric": "share_of_bandwidth", "value": rate / bandwidth, "unit": ""}
        )
        print(
            f"  {engine:22} {read / rate * 1e6:9.1f} us {rate / 1e9:8.0f} GB/s {rate / bandwidth:7.1%} of the stream"
            f"   largest difference from SDPA {error:.1e}"
        )
    if given.json:
        values = {row["engine"]: row["value"] for row in rows}
        ratios = [
            {"case": case, "metric": "share_of_bandwidth", "of": engine, "to": "torch SDPA", "value": value}
            for engine, value in ((engine, values[engine] / values["torch SDPA"]) for engine in values)
            if engine != "torch SDPA"
        ]
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        print(
            json.dumps(
                {
                    "command": "bench gpu_attention",
                    "machine": {"gpu": name, "bandwidth": bandwidth, "peak_bandwidth": peak},
                    "versions": versions,
                    "rows": rows,
                    "ratios": ratios,
                }
            )
        )


if __name__ == "__main__":
    sys.exit(main())
