#!/usr/bin/env python
"""Prefill floods in both directions through queues of one message: does a step complete all the time?

Compute and attention workers run their real data loops, each in a thread with a ZeroMQ context of its own, over real
sockets whose queues hold one message and whose buffers are far smaller than a frame (of plain TCP there are no queues).
A gateway by hand keeps two steps planned in every lane: fresh prompts (one-way pieces of up to 256 rows, a megabyte
each) together with chunks behind a past (requests and answers as large) and decode rows. At the end it plans no more
and waits for what is planned. Fails when no step of some lane completes for 10 seconds.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
import zmq
import zmq.asyncio
from transformers import LlamaConfig, LlamaForCausalLM

from pannier.attention.core import AttentionCore
from pannier.attention.worker import AttentionWorker
from pannier.compute.worker import ComputeWorker
from pannier.net import Server, SocketOptions
from pannier.runtime.tasks import first_end
from pannier.runtime.threads import DataThread, StopSignal
from pannier.slicer import SlicedModel, slice_model
from pannier.wire import Dtype, WorkerToGatewayData, lay_out, payload_bytes
from pannier.wire import messages as m
from pannier.wire.messages import SegmentKind

LIFE, SESSION = 1, 1
BLOCK_SIZE = 64
STALL_S = 10.0
PLANNED = 2
TEXTS = 2
"""Of each lane."""
OPTIONS = SocketOptions(queue=1, buffer_bytes=16 << 10)
SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=4096,
)
"""Little to compute and much to send: 4 KiB of keys and values per token and call."""


class Stalled(Exception):
    """Nothing has completed for too long."""


@dataclass
class Text:
    """A sequence that begins anew in its own blocks when they are full."""

    first_block: int
    num_blocks: int
    stored: int = 0


@dataclass
class Lane:
    """What one lane works on, and how far it is."""

    lane: int
    texts: list[Text]
    planned: int = 0
    completed: int = 0
    last_completed: float = 0.0
    longest_gap_s: float = 0.0


@dataclass
class Flood:
    """A gateway by hand."""

    server: Server[Any]
    calls: tuple[m.CallGeometry, ...]
    lanes: dict[str, list[Lane]]
    shards: tuple[m.ShardAddress, ...]
    num_blocks: int
    max_rows: int
    random: Random = field(default_factory=lambda: Random(0))
    ends: float = 0.0
    elapsed_s: float = 0.0
    bytes_to_attention: int = 0
    bytes_to_compute: int = 0
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def run(self, seconds: float) -> None:
        """Set the workers up, flood them for so long, wait for the rest. Raises `Stalled`, or what can't be done."""
        self._incoming = aiter(self.server)
        await self._collect(m.Join, {shard.name for shard in self.shards} | set(self.lanes))
        for number, shard in enumerate(self.shards):
            assign = m.AttentionAssign(
                LIFE, 0, number, self.calls, shard.heads, self.num_blocks, BLOCK_SIZE, Dtype.FLOAT32, Dtype.FLOAT32
            )
            self.server.send(shard.name.encode(), assign)
        await self._collect(m.Ready, {shard.name for shard in self.shards})
        for name in self.lanes:
            groups = (m.GroupAddress(0, self.shards),)
            rows = TEXTS * self.max_rows
            self.server.send(name.encode(), m.ComputeAssign(LIFE, SESSION, groups, rows, BLOCK_SIZE))
        await self._collect(m.Ready, set(self.lanes))
        started = time.monotonic()
        self.ends = started + seconds
        await first_end(self._flood(), self._watch())
        self.elapsed_s = time.monotonic() - started

    async def _collect(self, kind: type[m.Message], names: set[str]) -> None:
        while names:
            peer, message, _ = await anext(self._incoming)
            assert isinstance(message, kind), message
            names = names - {peer.decode()}

    async def _flood(self) -> None:
        for name, lanes in self.lanes.items():
            for lane in lanes:
                lane.last_completed = time.monotonic()
                for _ in range(PLANNED):
                    self._send(name, lane)
        async for peer, message, _ in self._incoming:
            if not isinstance(message, m.StepDone):
                raise RuntimeError(f"{peer.decode()} answers {message}")
            lane = self.lanes[peer.decode()][message.lane]
            now = time.monotonic()
            lane.longest_gap_s = max(lane.longest_gap_s, now - lane.last_completed)
            lane.last_completed, lane.completed, lane.planned = now, lane.completed + 1, lane.planned - 1
            if now < self.ends:
                self._send(peer.decode(), lane)
            elif not any(lane.planned for lanes in self.lanes.values() for lane in lanes):
                return

    async def _watch(self) -> None:
        while True:
            waiting = [lane for lanes in self.lanes.values() for lane in lanes if lane.planned]
            if waiting and time.monotonic() - min(lane.last_completed for lane in waiting) > STALL_S:
                done = {name: [lane.completed for lane in lanes] for name, lanes in self.lanes.items()}
                raise Stalled(f"no step of a lane has completed for {STALL_S:.0f} s; completed are {done}")
            await asyncio.sleep(0.1)

    def _send(self, name: str, lane: Lane) -> None:
        """Plan one step: more of both texts, whatever kind of rows that makes, in the order that steps have."""
        wanted = []
        for text in lane.texts:
            room = text.num_blocks * BLOCK_SIZE - text.stored
            if room == 0:
                text.stored, room = 0, text.num_blocks * BLOCK_SIZE
            kind = SegmentKind.DECODE if text.stored and self.random.random() < 0.1 else SegmentKind.CHUNK
            rows = 1 if kind is SegmentKind.DECODE else min(room, self.random.randint(1, self.max_rows))
            wanted.append((kind, text.stored == 0, text, rows))
        wanted.sort(key=lambda one: one[:2])
        segments: list[m.Segment] = []
        blocks: list[int] = []
        for kind, _, text, rows in wanted:
            start = segments[-1].query_start + segments[-1].num_queries if segments else 0
            stored = text.stored
            segments.append(m.Segment(kind, 0, 0, len(blocks), text.num_blocks, stored, stored, start, rows))
            blocks += range(text.first_block, text.first_block + text.num_blocks)
            text.stored += rows
        self._count(segments)
        lane.planned += 1
        self._send_step(name, lane, tuple(segments), blocks)

    def _send_step(self, name: str, lane: Lane, segments: tuple[m.Segment, ...], blocks: list[int]) -> None:
        rows = sum(segment.num_queries for segment in segments)
        samples = (m.Sample(rows - 1, 0, 1, 0, 0, m.Filters(), -1, 0, -1),)
        parts = lay_out((Dtype.INT32, shape) for shape in [(rows,), (len(blocks),), (0,), (0, 0)])
        payload = torch.zeros(payload_bytes(parts), dtype=torch.uint8)
        table = payload[parts[1].offset :][: parts[1].nbytes]
        table[:] = torch.tensor(blocks, dtype=torch.int32).view(torch.uint8)
        step = m.Step(LIFE, SESSION, next(self._numbers), lane.lane, segments, (), samples, (), (), (), parts)
        self.server.send(name.encode(), step, payload.numpy().data)

    def _count(self, segments: list[m.Segment]) -> None:
        for segment in segments:
            for call in self.calls:
                stored = call.kv_heads * (call.k_size + call.v_size)
                asked, answered = call.q_heads * call.k_size, call.q_heads * call.v_size
                self.bytes_to_attention += 4 * segment.num_queries * (stored + asked * segment.answers)
                self.bytes_to_compute += 4 * segment.num_queries * answered * segment.answers


class DataLoop(Protocol):
    """A worker's data loop."""

    def join(self, welcome: m.Welcome) -> None: ...
    def loop(self, stop: StopSignal) -> None: ...
    def close(self) -> None: ...


@contextmanager
def in_thread(worker: DataLoop, name: str, gateway: str) -> Iterator[DataThread]:
    """Run a worker's data loop beside this one; its thread, which ends with the block."""
    worker.join(m.Welcome(LIFE, gateway, 1.0))
    thread = DataThread(name, worker.loop)
    thread.start()
    yield thread
    thread.stop()  # not when the block fails: a loop that stands still would not end either
    worker.close()


@asynccontextmanager
async def gateway() -> AsyncIterator[Server[Any]]:
    """Where workers report, with queues as narrow as theirs."""
    context = zmq.asyncio.Context()
    server: Server[Any] = Server(context, WorkerToGatewayData, "tcp://127.0.0.1:0", OPTIONS)
    yield server
    await server.close()
    context.term()


def endpoints(transport: str, number: int, folder: str) -> list[str]:
    """Where attention workers listen: tcp, ipc, or both in turn."""
    kinds = ["tcp", "ipc"] if transport == "both" else [transport]
    return ["tcp://127.0.0.1:0" if kinds[i % len(kinds)] == "tcp" else f"ipc://{folder}/a{i}" for i in range(number)]


def head_ranges(kv_heads: int, shards: int) -> list[m.HeadRange]:
    """Contiguous ranges, as even as may be."""
    bounds = [kv_heads * i // shards for i in range(shards + 1)]
    return [m.HeadRange(start, stop) for start, stop in pairwise(bounds)]


async def flood(model: SlicedModel, options: argparse.Namespace) -> Flood:
    """Everything set up, run for so long, and taken down again."""
    calls = tuple(
        m.CallGeometry(c.q_heads, c.kv_heads, c.k_size, c.v_size, c.scale, c.window, c.softcap) for c in model.calls
    )
    ranges = head_ranges(calls[0].kv_heads, options.attention)
    num_texts, text_blocks = options.compute * options.lanes * TEXTS, -(-3 * options.rows // BLOCK_SIZE)
    texts = [Text(i * text_blocks, text_blocks) for i in range(num_texts)]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = await stack.enter_async_context(gateway())
        shards, threads = [], []
        for i, endpoint in enumerate(endpoints(options.transport, options.attention, folder)):
            core = AttentionCore(torch.device("cpu"))
            attention = AttentionWorker(zmq.Context(), f"a{i}", core, endpoint, OPTIONS)
            shards.append(m.ShardAddress(f"a{i}", attention.endpoint, (ranges[i],) * len(calls), tcp=attention.tcp))
            threads.append(stack.enter_context(in_thread(attention, f"a{i}", server.endpoint)))
        lanes: dict[str, list[Lane]] = {}
        for i in range(options.compute):
            compute = ComputeWorker(zmq.Context(), f"c{i}", model, options.lanes, OPTIONS, link=options.link)
            lanes[f"c{i}"] = [Lane(lane, [texts.pop() for _ in range(TEXTS)]) for lane in range(options.lanes)]
            threads.append(stack.enter_context(in_thread(compute, f"c{i}", server.endpoint)))
        running = Flood(server, calls, lanes, tuple(shards), num_texts * text_blocks, options.rows)
        await first_end(running.run(options.seconds), *[thread.wait() for thread in threads])
    return running


def report(done: Flood, case: str) -> dict[str, Any]:
    lanes = [lane for lanes in done.lanes.values() for lane in lanes]
    figures = [
        ("steps", sum(lane.completed for lane in lanes), "steps"),
        ("steps_per_s", sum(lane.completed for lane in lanes) / done.elapsed_s, "steps/s"),
        ("fewest_steps_of_a_lane", min(lane.completed for lane in lanes), "steps"),
        ("longest_wait_of_a_lane", max(lane.longest_gap_s for lane in lanes), "s"),
        ("to_attention", done.bytes_to_attention / done.elapsed_s / 1e6, "MB/s"),
        ("to_compute", done.bytes_to_compute / done.elapsed_s / 1e6, "MB/s"),
    ]
    return {
        "command": "scripts/bench_deadlock.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
        "rows": [
            {"case": case, "engine": "offloaded", "metric": metric, "value": round(value, 3), "unit": unit}
            for metric, value, unit in figures
        ],
        "ratios": [],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compute", type=int, default=2, help="compute workers")
    parser.add_argument("--attention", type=int, default=2, help="attention workers, one group")
    parser.add_argument("--lanes", type=int, default=4, help="of each compute worker")
    parser.add_argument("--rows", type=int, default=512, help="of one chunk at most")
    parser.add_argument("--transport", choices=["tcp", "ipc", "both"], default="both", help="under ZeroMQ")
    parser.add_argument("--link", choices=["zmq", "tcp"], default="zmq")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as cache:
        model = slice_model(LlamaForCausalLM(SHAPE).eval(), cache_dir=Path(cache))
    try:
        done = asyncio.run(flood(model, options))
    except Stalled as stalled:
        print(stalled, flush=True)
        os._exit(1)  # the workers' threads don't end any more
    way = options.transport if options.link == "zmq" else "plain tcp"
    case = f"{options.compute}x{options.lanes} lanes, {options.attention} shards, {way}, queues of 1"
    result = report(done, case)
    for row in result["rows"]:
        print(f"{row['metric']:24} {row['value']:10.2f} {row['unit']}")
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
