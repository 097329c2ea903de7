"""The models of the Lamina paper (arXiv 2405.01814v2), and the set-up of it that a simulation runs on by default.

LLaMA3-70B in 16 bits, one replica of 2 H100, one group of 4 H20, 400 Gbit/s a compute device: tables 1, 3 and 5.
"""

from pannier.planner.cost import ModelCost, Rates, Roofline
from pannier.planner.sizes import ModelSizes

MODELS = {
    name: ModelSizes.dense(name, weights_bytes=gb * 1e9, layers=layers, width=width, queries_per_kv=group)
    for name, gb, layers, width, group in (
        ("LLaMA-33B", 64.7, 60, 6656, 1),
        ("LLaMA-65B", 130.1, 80, 8192, 1),
        ("LLaMA3-70B", 137.5, 80, 8192, 8),
    )
}
"""Table 3; heads of 128, as these models have."""

LLAMA3_70B = ModelCost.dense(weights_bytes=137.5e9, layers=80, width=8192, queries_per_kv=8, itemsize=2)

GROUP_BYTES = 0.9 * 4 * 96e9
"""For K and V: nine tenths of the memory of 4 H20."""

RATES = Rates(
    # Shares of the advertised rates that bring the step times of this formula into the ranges of the paper's figures
    # 12 and 14; read off by eye, so good for orders of magnitude.
    compute_flops=0.45 * 2 * 989e12,
    compute_bandwidth=0.6 * 2 * 3.35e12,
    attention_flops=0.45 * 4 * 148e12,
    attention_bandwidth=0.8 * 4 * 4.0e12,
    # Measured in the paper (figure 13): peak and round trip of its own network stack.
    link_bandwidth=2 * 45.7e9,
    round_trip_s=33.0e-6,
)

LLAMA3_70B_ON_2_H100_AND_4_H20 = Roofline(LLAMA3_70B, RATES)


def group_blocks(block_size: int) -> int:
    """Blocks that the group has room for."""
    return int(GROUP_BYTES // (LLAMA3_70B.kv_bytes * block_size))
