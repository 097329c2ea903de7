"""The Lamina paper (arXiv 2405.01814v2) recomputed: its figures beside those of the cost model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from statistics import mean
from typing import Any

import msgspec

from pannier.planner.check import Check, Outcome, exact, within
from pannier.planner.devices import IDEAL, Device, Kind, Shares
from pannier.planner.homogeneous import Homogeneous
from pannier.planner.mix import Mix
from pannier.planner.offloaded import Offloaded, Wire
from pannier.planner.sensitivity import paper_bandwidth
from pannier.planner.sizes import ModelSizes
from pannier.planner.trace import TraceRequest

GB, TERA = 1e9, 1e12
KV_SHARE = 0.97
"""Of the attention devices' memory: with it the mean ratio of batches is the paper's, which doesn't say it."""
VLLM_SHARE = 0.9
"""Of the memory for weights, K and V: vLLM's default."""
DIVISIONS = ((2, 1), (2, 2), (2, 4), (2, 8), (4, 8), (8, 8))
"""Of figure 11, as compute and attention devices."""


@dataclass(frozen=True)
class Paper:
    """What the paper says: data/lamina.json."""

    says: dict[str, Any]

    @classmethod
    def read(cls) -> "Paper":
        """The file that comes with Pannier."""
        return cls(msgspec.json.decode((files("pannier.planner") / "data" / "lamina.json").read_bytes()))

    @cached_property
    def models(self) -> dict[str, ModelSizes]:
        """Table 3."""
        return {
            name: ModelSizes.dense(
                name,
                weights_bytes=each["weights_gb"] * GB,
                layers=each["layers"],
                width=each["hidden"],
                queries_per_kv=each["gqa_group"],
            )
            for name, each in self.says["models"].items()
        }

    def mix(self, trace: str) -> Mix:
        """A trace of table 4, with the mean context lp + lg / 2."""
        lengths = self.says["traces"][trace]
        return Mix.unbiased(trace, lengths["mean_prompt"], lengths["mean_generated"])

    def kind(self, name: str, shares: Shares) -> Kind:
        """A device of table 1, eight in a node, one network card each."""
        given = self.says["devices"][name]
        device = Device(
            name=name,
            flops=shares.flops * given["bf16_tflops"] * TERA,
            weight_bandwidth=shares.weights * given["memory_tb_per_s"] * TERA,
            kv_bandwidth=shares.attention * given["memory_tb_per_s"] * TERA,
            memory_bytes=shares.memory * given["memory_gb"] * GB,
            network=self.says["peak_gb_per_s"] * GB,
            usd_per_hour=given["usd_per_hour"],
        )
        return Kind(name=name, device=device, devices=8, native=("bfloat16", "float16", "float32"))

    def lamina(self, model: str, trace: str, division: Iterable[int], shares: Shares) -> Offloaded:
        """Compute devices that share each slice, attention devices of an H20, two batches, no prompts."""
        compute, attention = division
        return Offloaded(
            model=self.models[model],
            mix=self.mix(trace),
            compute=self.kind("H100", shares),
            attention=self.kind("H20", shares),
            compute_devices=compute,
            attention_devices=attention,
            stages=compute,
            is_tensor_parallel=True,
            wire=Wire(round_trip_s=self.says["round_trip_us"] / 1e6),
            has_prefill=False,
            block_size=1,
        )

    def vllm(self, model: str, trace: str, devices: int, shares: Shares) -> Homogeneous:
        """H100s that share each step."""
        kind = self.kind("H100", shares)
        return Homogeneous(
            model=self.models[model], mix=self.mix(trace), kind=kind, devices=devices, has_prefill=False, waste=0.0
        )

    # --- what is checked -------------------------------------------------------------------------------------------

    def costs(self) -> Iterator[Check]:
        """Every division that the paper shows, by the prices of table 1."""
        h100, h20 = (self.says["devices"][name]["usd_per_hour"] for name in ("H100", "H20"))
        for model, equal in self.says["equal_cost"].items():
            compute, attention = equal["lamina"]
            ours = compute * h100 + attention * h20
            yield exact(f"$/h, {model} on {compute} H100 + {attention} H20", equal["lamina_usd_per_hour"], ours)
            yield exact(f"$/h, {model} on {equal['h100s']} H100", equal["vllm_usd_per_hour"], equal["h100s"] * h100)
        for compute, attention in DIVISIONS:
            ours = f"{compute * h100 + attention * h20:.2f}"
            yield Check(f"$/h of ({compute}, {attention}) in figure 11", "", ours, Outcome.OURS, "by table 1")
        yield Check("$/h of 8 H100 in figure 11", "", f"{8 * h100:.2f}", Outcome.OURS, "by table 1")

    def bytes(self) -> Iterator[Check]:
        """K and V of a token, and the payload of a row, against the paper's formulas."""
        for name, given in self.says["models"].items():
            model = self.models[name]
            width, layers, group = given["hidden"], given["layers"], given["gqa_group"]
            yield exact(f"K and V of a token, {name}: 2 e d L / G", 4 * width * layers / group, model.kv_bytes, 0)
            payload = (2 + 2 / group) * 2 * width * layers
            yield exact(
                f"payload of a row, {name}: (2 + 2/G) e d L", payload, model.sent_bytes + model.returned_bytes, 0
            )
        fills = self.says["devices"]["H100"]["memory_gb"] * GB / (8192 * self.models["LLaMA3-70B"].kv_bytes)
        wanted = self.says["requests_of_8192_in_one_h100"]
        yield within("requests of 8,192 tokens whose K and V fill an H100", wanted, fills, 0.02)

    def batches(self) -> Iterator[Check]:
        """How many sequences there is room for, here and there."""
        layout = self.lamina("LLaMA3-70B", "Azure-Conv", (2, 4), IDEAL)
        why = "nine tenths of the memory for K and V, mean context lp + lg / 2"
        yield within("batch of LLaMA3-70B at (2, 4), Azure-Conv", self.says["batch_70b_at_2_4"], layout.room, 0.05, why)
        why = f"with {KV_SHARE:.0%} of the attention devices' memory for K and V, {VLLM_SHARE:.0%} of vLLM's"
        yield within("mean batch, of vLLM's", self.says["mean_batch_ratio"], self.batch_ratio(KV_SHARE), 0.03, why)
        ours = f"{self.batch_ratio(VLLM_SHARE):.3g}"
        yield Check("the same with 90 % of both memories", "", ours, Outcome.OURS, "the paper names no share")

    def batch_ratio(self, share: float) -> float:
        """Mean over the models of table 3 at equal cost; contexts cancel out, so it is the same for every trace."""
        h100, h20 = (self.says["devices"][name]["memory_gb"] for name in ("H100", "H20"))
        ratios: list[float] = []
        for model, equal in self.says["equal_cost"].items():
            rest = VLLM_SHARE * h100 * equal["h100s"] - self.says["models"][model]["weights_gb"]
            ratios.append(share * h20 * equal["lamina"][1] / rest)
        return mean(ratios)

    def network(self) -> Iterator[Check]:
        """The smallest bandwidth of figure 4 at its largest batch."""
        for division in ((2, 2), (2, 4)):
            layout = replace(
                self.lamina("LLaMA3-70B", "Azure-Conv", division, Shares()), mix=Mix.equal(4096, 1), lanes_per_stage=1
            )
            batch, limit = self.says["largest_bandwidth_batch"], self.says["largest_bandwidth_gb_per_s"]
            needed = paper_bandwidth(layout, batch) / division[0] / GB
            outcome = Outcome.REPRODUCED if needed <= limit else Outcome.NOT_REPRODUCED
            what = f"smallest bandwidth of {division}, {batch} rows of 4,096 tokens, alpha 0.2"
            yield Check(what, f"<= {limit} GB/s", f"{needed:.3g} GB/s", outcome, "of each H100, both ways together")

    def gains(self) -> Iterator[Check]:
        """Throughput at equal cost, of vLLM's: what the model predicts where the paper measured."""
        low, high = self.says["gain_percent"]
        published = f"+{low} to +{high} %"
        why = (
            "a symmetric roofline has half of the H100s stream all of the weights; what it leaves out (vLLM's own "
            "overheads, all-reduces, launches) must be in the published gains"
        )
        for name, shares in (("ideal rates", IDEAL), ("achieved rates", Shares())):
            found = [self.gain(model, trace, shares) for model in self.models for trace in self.says["traces"]]
            ours = f"{min(found):+.0%} to {max(found):+.0%}"
            yield Check(f"throughput, of vLLM's, {name}", published, ours, Outcome.NOT_DERIVABLE, why)

    def gain(self, model: str, trace: str, shares: Shares) -> float:
        """Tokens per second at equal cost, above vLLM's."""
        equal = self.says["equal_cost"][model]
        offloaded = self.lamina(model, trace, equal["lamina"], shares).figures()
        homogeneous = self.vllm(model, trace, equal["h100s"], shares).figures()
        assert offloaded is not None
        assert homogeneous is not None
        return offloaded.tokens_per_s / homogeneous.tokens_per_s - 1

    def trace(self, requests: Iterable[TraceRequest]) -> Iterator[Check]:
        """A file's means against table 4; which trace it is its number of requests says."""
        found = Mix.of("a trace", requests)
        for name, given in self.says["traces"].items():
            if given["requests"] == found.requests:
                yield exact(f"mean prompt of {name}", given["mean_prompt"], found.prompt, 1)
                yield exact(f"mean output of {name}", given["mean_generated"], found.output, 1)
                ours = f"{found.context:.1f}"
                why = "what a step meets; the paper's figures agree with lp + lg / 2"
                yield Check(f"length-biased context of {name}", "", ours, Outcome.OURS, why)
                return
        yield Check("a trace", "table 4", f"{found.requests} requests", Outcome.NOT_REPRODUCED, "it is none of these")

    def all(self) -> Iterator[Check]:
        """Everything that needs no file."""
        yield from self.costs()
        yield from self.bytes()
        yield from self.batches()
        yield from self.network()
        yield from self.gains()
