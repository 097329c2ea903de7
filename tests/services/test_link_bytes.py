"""What a decode step moves over links is what the model's sizes say, to the byte, and little else comes with it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from pannier.attention.core import AttentionCore
from pannier.attention.worker import AttentionWorker
from pannier.compute.worker import ComputeWorker
from pannier.net import SocketOptions, bind, close_bound
from pannier.net.shm import CannotShare, functions
from pannier.runtime.config import LinkKind
from pannier.runtime.model_source import EMBEDDED
from pannier.runtime.threads import DataThread
from pannier.slicer import SlicedModel, load, slice_model
from pannier.wire import Buffer, Decoder, WorkerToGatewayData, encode
from pannier.wire import messages as m
from pannier.wire.tensors import WIRE_DTYPES, encode_with
from tests.slicer.small import SIZES, small_model

LIFE = 1 << 61
"""As large as those that are drawn: it is in every header."""
PROMPT, BLOCK_SIZE = 3, 16
WAIT_MS = 30_000
MOST_HEADERS = 0.02
OPTIONS = SocketOptions()
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("llama", {}),
    "a KV head for each query head": ("gpt2", {}),
    "heads wider than the model": ("qwen3", {"head_dim": 12}),
    "unequal K and V": ("deepseek_v3", EXPERTS | {
        "num_key_value_heads": 6, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    }),
    "sinks": ("gpt_oss", {"head_dim": 16, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _links() -> list[LinkKind]:
    try:
        functions()
    except CannotShare:  # as on a machine without a compiler
        return ["zmq"]
    return ["shm", "zmq"]


@dataclass
class Moved:
    """Bytes that one step moved, both ways and over all links."""

    tensors: int
    headers: int


class Rig:
    """A compute worker and attention workers, each with the thread it has as a process, and their gateway by hand."""

    def __init__(self, model: SlicedModel, link: LinkKind, num_shards: int, num_rows: int, folder: Path) -> None:
        self._num_rows, self._step = num_rows, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateway, self._endpoint = bind(self._context, zmq.ROUTER, f"ipc://{folder}/gateway")
        self._decoder: Decoder[Any] = Decoder(WorkerToGatewayData)
        self._stack = ExitStack()
        shards = [
            AttentionWorker(self._context, f"a{n}", AttentionCore(model.device), f"ipc://{folder}/a{n}", OPTIONS)
            for n in range(num_shards)
        ]
        compute = ComputeWorker(self._context, "c", model, 1, OPTIONS, link=link)
        self._workers: dict[str, ComputeWorker | AttentionWorker] = {"c": compute}
        self._workers |= {f"a{n}": shard for n, shard in enumerate(shards)}
        for name, worker in self._workers.items():
            self._start(name, worker)
        heads = [_split(call.kv_heads, num_shards) for call in model.calls]
        addresses = []
        for number, shard in enumerate(shards):
            own = tuple(of_call[number] for of_call in heads)
            self._tell(f"a{number}", _attention_assign(model, number, own, num_rows))
            addresses.append(m.ShardAddress(f"a{number}", shard.endpoint, own, shard.door))
        group = m.GroupAddress(0, tuple(addresses))
        ready = self._tell("c", m.ComputeAssign(LIFE, 1, (group,), num_rows * PROMPT, BLOCK_SIZE))
        assert ready.detail.startswith(link)

    def step(self, kind: m.SegmentKind, position: int, count: int) -> Moved:
        """One step with so many rows of every sequence, and what it moved."""
        before = self._counted()
        self._step += 1
        segments = tuple(
            m.Segment(kind, 0, 0, n, 1, position, position, n * count, count) for n in range(self._num_rows)
        )
        samples = tuple(
            m.Sample((n + 1) * count - 1, n, position + count, 0, 0, m.Filters(), -1, 0, -1)
            for n in range(self._num_rows)
        )
        step = m.Step(LIFE, 1, self._step, 0, segments, (), samples, (), (), (), ())
        tokens = torch.randint(3, SIZES["vocab_size"], (self._num_rows * count,))
        parts = (tokens, torch.arange(self._num_rows), torch.empty(0), torch.empty(0, 0))
        done = self._ask("c", encode_with(step, [part.to(torch.int32) for part in parts]))
        assert isinstance(done, m.StepDone), done
        after = self._counted()
        return Moved(after.tensors - before.tensors, after.headers - before.headers)

    def close(self) -> None:
        """Stop the threads, and close what they left."""
        self._stack.close()
        close_bound(self._gateway, self._endpoint)
        self._context.term()

    def _start(self, name: str, worker: ComputeWorker | AttentionWorker) -> None:
        worker.join(m.Welcome(LIFE, self._endpoint, 1.0))
        thread = DataThread(name, worker.loop)
        thread.start()
        self._stack.callback(worker.close)
        self._stack.callback(thread.stop)
        assert self._received() == m.Join(LIFE)

    def _counted(self) -> Moved:
        counters = [worker.counters() for worker in self._workers.values()]
        return Moved(*(int(sum(each[f"link_{what}_bytes"] for each in counters)) for what in ("tensor", "header")))

    def _tell(self, name: str, message: m.AttentionAssign | m.ComputeAssign) -> m.Ready:
        ready = self._ask(name, encode(message))
        assert isinstance(ready, m.Ready)
        return ready

    def _ask(self, name: str, frames: Sequence[Buffer]) -> Any:
        self._gateway.send_multipart([name.encode(), *frames])
        return self._received()

    def _received(self) -> Any:
        assert self._gateway.poll(WAIT_MS), "nothing came"
        return self._decoder.decode(self._gateway.recv_multipart()[1:])[0]


def _split(kv_heads: int, num_shards: int) -> list[m.HeadRange]:
    bounds = [-(-kv_heads * n // num_shards) for n in range(num_shards + 1)]
    return [m.HeadRange(*pair) for pair in pairwise(bounds)]


def _attention_assign(
    model: SlicedModel, number: int, heads: tuple[m.HeadRange, ...], num_blocks: int
) -> m.AttentionAssign:
    calls = tuple(
        m.CallGeometry(c.q_heads, c.kv_heads, c.k_size, c.v_size, c.scale, c.window, c.softcap) for c in model.calls
    )
    dtype = WIRE_DTYPES[model.dtype]
    return m.AttentionAssign(LIFE, 0, number, calls, heads, num_blocks, BLOCK_SIZE, dtype, dtype)


@contextmanager
def _decoding(model: SlicedModel, link: LinkKind, num_shards: int, num_rows: int, folder: Path) -> Iterator[Rig]:
    """So many sequences whose prompts are stored."""
    folder.mkdir()
    rig = Rig(model, link, num_shards, num_rows, folder)
    try:
        rig.step(m.SegmentKind.CHUNK, 0, PROMPT)
        yield rig
    finally:
        rig.close()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slices")


def _sliced(kind: str, cache_dir: Path, dtype: torch.dtype = torch.bfloat16) -> SlicedModel:
    model_type, settings = KINDS[kind]
    return slice_model(small_model(model_type, dtype, **settings), cache_dir=cache_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_moves_exactly_what_the_models_sizes_say(kind: str, cache_dir: Path, tmp_path: Path) -> None:
    """e B times the sum over calls of H (Dk + Dv) + G (Dk + Dv), and a log-sum-exp where there are sinks to merge."""
    model = _sliced(kind, cache_dir)
    per_row = sum(model.dtype.itemsize * (c.q_heads + c.kv_heads) * (c.k_size + c.v_size) for c in model.calls)
    lse = sum(4 * c.q_heads for c in model.calls if model.sinks(c) is not None)
    assert (lse > 0) == (kind == "sinks")
    for num_rows in (1, 33):
        with _decoding(model, "zmq", 1, num_rows, tmp_path / str(num_rows)) as rig:
            moved = rig.step(m.SegmentKind.DECODE, PROMPT, 1)
        assert moved.tensors == num_rows * (per_row + lse)


@pytest.mark.parametrize("kind", ["grouped heads", "a KV head for each query head"])
def test_where_heads_are_as_wide_as_the_model_it_is_what_the_paper_says(
    kind: str, cache_dir: Path, tmp_path: Path
) -> None:
    """(2 + 2/G) e d B L, with G query heads for each KV head."""
    model, num_rows, width = _sliced(kind, cache_dir), 32, SIZES["hidden_size"]
    call = model.calls[0]
    assert call.q_heads * call.k_size == call.q_heads * call.v_size == width
    with _decoding(model, "zmq", 1, num_rows, tmp_path / "run") as rig:
        moved = rig.step(m.SegmentKind.DECODE, PROMPT, 1)
    share = call.q_heads // call.kv_heads
    assert share == (3 if kind == "grouped heads" else 1)
    assert moved.tensors == (2 + 2 / share) * model.dtype.itemsize * width * num_rows * len(model.calls)


@pytest.mark.parametrize("link", _links())
def test_uneven_shards_move_together_what_one_would(link: LinkKind, cache_dir: Path, tmp_path: Path) -> None:
    """The embedded model over every kind of link. Each shard has headers of its own: at most 2 % from 32 rows on.

    The prompts are short: for every block of its context a row has four bytes more in the header of each step.
    """
    model = load(EMBEDDED, dtype=torch.bfloat16, device="cpu", cache_dir=cache_dir)
    for num_rows in (32, 64):
        moved = {}
        for num_shards in (1, 2):
            with _decoding(model, link, num_shards, num_rows, tmp_path / f"{num_rows}.{num_shards}") as rig:
                moved[num_shards] = rig.step(m.SegmentKind.DECODE, PROMPT, 1)
        assert moved[1].tensors == moved[2].tensors
        assert moved[1].headers < moved[2].headers <= MOST_HEADERS * moved[2].tensors
