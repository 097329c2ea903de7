#!/usr/bin/env python
"""What the gateway costs for each step, and how much of that a compute worker waits for.

    scripts/bench gateway [--sequences 256] [--seconds 5] [--json]

The real engine with the embedded model's tokenizer, two lanes, every sequence in the middle of its output and streamed
to its client; messages are decoded and encoded as on the wire, but there are no sockets. The second table plays the
measured times against a compute worker that never rests: what it waits for is the part that is exposed.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pannier.gateway.admission import Admission
from pannier.gateway.engine import Engine
from pannier.gateway.entries import Session, Standing
from pannier.gateway.fleet import Fleet, FleetConfig
from pannier.gateway.text import Text
from pannier.runtime.model_source import EMBEDDED
from pannier.scheduler import Output, Scheduler, SchedulerConfig, Step
from pannier.wire import Decoder, Dtype, GatewayToClient, WorkerToGatewayData, encode
from pannier.wire import messages as m

LANES = 2
BLOCK_SIZE = 64
PROMPT = 100
WINDOW = 4096
LIFE, SESSION, COMPUTE = 1, 0, "compute-0"
PARTS = ("receive", "commit", "deliver", "plan", "send")
"""Decode `StepDone`; advance sequences; detokenise and encode what clients get; schedule; encode the next `Step`."""
STEPS_MS = (1, 2, 5, 10, 20, 50)
TEXT = Path(__file__).parent.parent / "README.md"


class Stopwatch:
    """Adds up seconds by part."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent[part] += time.perf_counter() - started


watch = Stopwatch()


class TimedScheduler(Scheduler):
    """The scheduler with a stopwatch."""

    def schedule(self, lane: int) -> Step | None:
        with watch("plan"):
            return super().schedule(lane)

    def commit(self, step: int, drawn: Sequence[m.Drawn], scored: Sequence[m.Scored] = ()) -> list[Output]:
        with watch("commit"):
            return super().commit(step, drawn, scored)


class TimedEngine(Engine):
    """The engine with a stopwatch."""

    def deliver(self, outputs: Iterable[Output], *, code: str = "unavailable") -> None:
        with watch("deliver"):
            super().deliver(outputs, code=code)

    def _send(self, step: Step, names: Iterable[str]) -> None:
        with watch("send"):
            super()._send(step, names)


class Bench:
    """The engine between a client that only counts and a compute worker that continues a text."""

    def __init__(self, sequences: int) -> None:
        self.sent: dict[int, deque[m.Step]] = {lane: deque() for lane in range(LANES)}
        self.delta_bytes = 0
        text = Text.load(EMBEDDED)
        self._tokens = text.encode_bare(TEXT.read_text(encoding="utf-8"))
        self._decoder: Decoder[WorkerToGatewayData] = Decoder(WorkerToGatewayData)
        config = SchedulerConfig(
            max_model_len=WINDOW,
            max_batch_tokens=sequences * PROMPT,
            max_sequences=sequences,
            max_waiting=sequences,
            block_size=BLOCK_SIZE,
        )
        self.engine = TimedEngine(
            TimedScheduler(config),
            _fleet(config.max_batch_tokens),
            Admission(model="embedded", text=text, vocab_size=3072, max_model_len=WINDOW, max_sequences=sequences),
            self._send_step,
            self._send_client,
        )
        for lane in range(LANES):
            self.engine.scheduler.add_lane(lane)
        self.engine.scheduler.add_group(0, sequences * (WINDOW // BLOCK_SIZE))
        params = m.SamplingParams(max_tokens=WINDOW - PROMPT, ignore_eos=True)
        for number in range(sequences):
            prompt = self._tokens[number : number + PROMPT]
            self.engine.generate(b"http", m.Generate(str(number), None, None, prompt, None, params))

    def round(self) -> list[tuple[dict[str, float], float]]:
        """A step of every lane is done: for each the seconds by part, and of all of it."""
        return [self._lane_step(lane) for lane in range(LANES)]

    def _lane_step(self, lane: int) -> tuple[dict[str, float], float]:
        frames = encode(self._done(self.sent[lane].popleft()))
        watch.spent.clear()
        started = time.perf_counter()
        with watch("receive"):
            done, _ = self._decoder.decode(frames)
        assert isinstance(done, m.StepDone)
        self.engine.commit(lane, done)
        return dict(watch.spent), time.perf_counter() - started

    def _done(self, step: m.Step) -> m.StepDone:
        tokens, last = self._tokens, len(self._tokens)
        drawn = tuple(
            m.Drawn(each.sequence, tokens[(each.sequence * 101 + each.position) % last], None, ())
            for each in step.samples
        )
        return m.StepDone(LIFE, SESSION, step.step, step.lane, drawn, (), m.StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))

    def _send_step(self, _: str, message: m.Step, payload: bytearray) -> None:
        encode(message, payload)
        self.sent[message.lane].append(message)

    def _send_client(self, _: bytes, message: GatewayToClient, is_end: bool) -> None:
        assert not is_end
        self.delta_bytes += sum(map(len, encode(message)))


def _fleet(max_batch_tokens: int) -> Fleet:
    calls = (m.CallGeometry(4, 4, 8, 8, 1.0, 0, 0.0),)
    facts = m.ComputeFacts("embedded", "d", "cpu", "float32", Dtype.FLOAT32, LANES, calls, 3072, WINDOW, 0)
    fleet = Fleet(FleetConfig(LIFE, "embedded", "d", 1, 1, BLOCK_SIZE, None, None, max_batch_tokens))
    fleet.accept(m.Hello(m.PROTOCOL, COMPUTE, 1, 1, "host", "loop", facts, None))
    entry = fleet.compute[COMPUTE]
    entry.session = Session(1, (entry,), Standing.READY)
    return fleet


def measure(sequences: int, seconds: float) -> list[tuple[dict[str, float], float]]:
    """Lane-steps, two to a round, once every prompt is computed."""
    bench = Bench(sequences)
    for _ in range(3):
        bench.round()
    gc.collect()
    gc.freeze()
    steps: list[tuple[dict[str, float], float]] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop and len(steps) < LANES * (WINDOW - PROMPT - 8):
        steps += bench.round()
    gc.unfreeze()
    assert bench.delta_bytes > 0
    return steps


def exposed(handling: Iterable[float], step_s: float, in_flight: int) -> float:
    """The share of the gateway's time for which a compute worker without any pause of its own has nothing to do.

    A step takes `step_s`; each lane has `in_flight` steps, the running one counted, and gets its next one when the
    gateway has handled what it has done.
    """
    sent = deque([0.0] * (LANES * in_flight))
    worker = gateway = waited = spent = 0.0
    for each in handling:
        arrived = sent.popleft()
        waited += max(0.0, arrived - worker)
        worker = max(worker, arrived) + step_s
        gateway = max(gateway, worker) + each
        sent.append(gateway)
        spent += each
    return waited / spent


def main() -> int:
    """Print the tables; the exit status is always 0: how fast is fast enough is for the reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    steps = measure(options.sequences, options.seconds)
    rows = [*_cost_rows(options.sequences, steps), *_exposure_rows(options.sequences, [whole for _, whole in steps])]
    if options.json:
        versions = {"python": platform.python_version()}
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": versions, "rows": rows}))
    return 0


def _cost_rows(sequences: int, steps: list[tuple[dict[str, float], float]]) -> Iterator[dict[str, object]]:
    """Median and p90 of each part and of all, of a round of both lanes and of a lane-step."""
    print(f"{sequences} sequences, {len(steps) // LANES} rounds of {LANES} lanes; ms")
    print(f"{'':>8}  {'round: median':>13}  {'p90':>6}  {'lane-step: median':>17}  {'p90':>6}")
    for part in (*PARTS, "whole"):
        each = [whole if part == "whole" else spent[part] for spent, whole in steps]
        rounds = [sum(each[first : first + LANES]) for first in range(0, len(each), LANES)]
        found = [figure * 1e3 for times in (rounds, each) for figure in (statistics.median(times), _p90(times))]
        print("{:>8}  {:>13.3f}  {:>6.3f}  {:>17.3f}  {:>6.3f}".format(part, *found))
        for metric, value in zip(("round", "round_p90", "lane_step", "lane_step_p90"), found, strict=True):
            yield _row(sequences, f"{part}_{metric}_ms", value, "ms")


def _exposure_rows(sequences: int, handling: list[float]) -> Iterator[dict[str, object]]:
    """The share of the gateway's time that is exposed, by how long a lane's step takes."""
    print("\nshare of it that a compute worker waits for, with one step planned ahead, and without")
    for step_ms in STEPS_MS:
        ahead, without = (exposed(handling, step_ms / 1e3, in_flight) for in_flight in (2, 1))
        print(f"  steps of {step_ms:>2} ms: {ahead:>6.1%}  {without:>6.1%}")
        yield _row(sequences, f"exposed_at_{step_ms}_ms_steps", ahead, "of the gateway's time")
        yield _row(sequences, f"exposed_at_{step_ms}_ms_steps_without_planning_ahead", without, "of the gateway's time")


def _p90(times: list[float]) -> float:
    return sorted(times)[len(times) * 9 // 10]


def _row(sequences: int, metric: str, value: float, unit: str) -> dict[str, object]:
    return {"case": f"{sequences} sequences", "engine": "gateway", "metric": metric, "value": value, "unit": unit}


if __name__ == "__main__":
    sys.exit(main())
