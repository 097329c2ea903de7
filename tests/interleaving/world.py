"""A whole stack in one thread: chance decides what arrives, what advances, and what goes wrong."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from pannier.gateway.entries import Standing
from pannier.net import PeerGone
from pannier.runtime.config import GatewayConfig
from pannier.slicer import WHOLE, Call, Stage
from pannier.wire import Buffer, Dtype
from pannier.wire import messages as m
from pannier.wire.tensors import unpack

from .channels import Channel, Process
from .gateway import Gateway, Send
from .stamp_model import VOCABULARY, StampModel, continuation
from .violation import Violation
from .watch import Watch
from .workers import AnyWorker, AttentionProcess, ComputeProcess, running

DIGEST = "0" * 64
ROUNDS_TO_SETTLE = 12
LONGEST_HOLD = 400
"""Ticks."""


@dataclass(frozen=True)
class Shape:
    """What a run is made of."""

    calls: tuple[Call, ...]
    num_compute: int
    num_stages: int
    num_lanes: int
    """Of each worker."""
    num_attention: int
    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_model_len: int

    @classmethod
    def draw(cls, chance: Random) -> "Shape":
        """Any of them."""
        kv_heads = chance.choice([(1, 1), (2, 2), (2, 3), (3, 3)])
        calls = tuple(
            Call(
                index=index,
                q_heads=heads * chance.choice([1, 2]),
                kv_heads=heads,
                k_size=1 + index,
                v_size=2,
                scale=1.0,
                window=chance.choice([0, 0, 3]),
                softcap=0.0,
                sinks=chance.choice([None, "sinks"]),
            )
            for index, heads in enumerate(kv_heads)
        )
        num_stages = chance.choice([1, 1, 2])
        return cls(
            calls=calls,
            num_compute=chance.choice([1, 2, 2, 3]) if num_stages == 1 else chance.choice([2, 4]),
            num_stages=num_stages,
            num_lanes=chance.choice([1, 2]) * num_stages,
            num_attention=chance.choice([1, 2, 2, 3, 4]),
            num_blocks=chance.randint(5, 14),
            block_size=chance.choice([2, 4]),
            max_batch_tokens=chance.choice([4, 6, 12]),
            max_model_len=32,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all heads and calls."""
        return sum(call.kv_heads * (call.k_size + call.v_size) * 4 for call in self.calls)


@dataclass
class Order:
    """One request as its client sees it."""

    name: str
    expected: list[int]
    """The tokens that it must get if it isn't cancelled."""
    reason: str
    """And why it ends then."""
    num_outputs: int = 1
    """All the same: they are the best tokens."""
    got: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: set[int] = field(default_factory=set)
    is_over: bool = False
    is_forgotten: bool = False
    """Its client has cancelled it, or left."""


class World:
    """The network, the gateway, the workers and the clients. `tick` lets one thing happen."""

    def __init__(self, shape: Shape, chance: Random) -> None:
        self.shape = shape
        self.chance = chance
        self.watch = Watch()
        self.tick_number = 0
        self.channels: dict[Channel, None] = {}
        """Those with frames under way."""
        self.workers: dict[str, AnyWorker] = {}
        self.orders: dict[str, Order] = {}
        self.prompts: list[tuple[int, ...]] = []
        self._starts = count()
        self.excuses = {
            "the model is not ready yet",
            "no attention workers are ready",
            "more than the groups of attention workers have",
        }
        """What may be said to a client whose request fails, after all that was done."""
        config = GatewayConfig(
            model="random:llama-135m",
            control_endpoint="ipc://control",
            client_endpoint="ipc://clients",
            data_endpoint="ipc://data",
            attention_workers=shape.num_attention,
            compute_workers=shape.num_compute,
            max_batch_tokens=shape.max_batch_tokens,
            max_sequences=shape.max_batch_tokens,
        ).model_copy(update={"block_size": shape.block_size})
        sends: dict[str, Send] = {"control": self._control, "data": self._data, "clients": self._client}
        self.eos_token = chance.randrange(VOCABULARY)
        self.gateway = Gateway(config, self.eos_token, sends)

    # --- what workers need (see `Network`) -------------------------------------------------------------------------

    def channel(
        self, name: str, deliver: Callable[[Any, Any], None], receiver: Process | None, *, ordered: bool
    ) -> Channel:
        """A new channel."""
        return Channel(name, ordered, deliver, self.channels, receiver)

    def to_gateway(self, name: str, kind: str) -> Channel:
        """A new channel to the gateway's `control` or `data`."""

        def deliver(message: Any, _: Any) -> None:
            self._hand(kind, name, message)

        return self.channel(f"{kind} from {name}", deliver, None, ordered=True)

    def attention(self, name: str) -> AttentionProcess | None:
        """The process of that name that lives now."""
        worker = self.workers.get(name)
        return worker if isinstance(worker, AttentionProcess) and worker.is_alive else None

    def compute(self, name: str) -> ComputeProcess | None:
        """The process of that name that lives now."""
        worker = self.workers.get(name)
        return worker if isinstance(worker, ComputeProcess) and worker.is_alive else None

    def begin(self) -> None:
        """Start every process, and let some time pass, often until all are ready."""
        for number in range(self.shape.num_attention):
            self.start(f"attention-{number}")
        for number in range(self.shape.num_compute):
            self.start(f"compute-{number}")
        for _ in range(self.chance.choice([0, 20, 10_000, 10_000])):
            if not self.tick():
                return

    # --- one thing after the other ---------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Deliver a frame or resume a compute worker; False if there is nothing to do."""
        self.tick_number += 1
        ready = [channel for channel in self.channels if channel.can_deliver(self.tick_number)]
        able = [w for w in self.workers.values() if isinstance(w, ComputeProcess) and w.is_running and w.can_advance]
        if not ready and not able:
            return False
        chosen = self.chance.randrange(len(ready) + len(able))
        if chosen < len(ready):
            self.watch.counts["frames"] += 1
            ready[chosen].deliver_one(self.chance)
        else:
            able[chosen - len(ready)].advance()
        return True

    def settle(self) -> None:
        """Nothing more goes wrong: everything ends, all blocks are free, all workers are ready."""
        self.tick_number += LONGEST_HOLD
        for worker in self.workers.values():
            worker.is_stopped = False
        for _ in range(ROUNDS_TO_SETTLE):
            self._run_until_quiet()
            if self._is_settled():
                break
            for name, worker in list(self.workers.items()):
                if worker.is_alive:
                    worker.beat()
                else:
                    self.start(name)
        self._check_end()

    def close(self) -> None:
        """End what runs."""
        self.gateway.close()

    def _run_until_quiet(self) -> None:
        for _ in range(100_000):
            if not self.tick():
                return
        raise Violation("frames go back and forth for ever")

    def _is_settled(self) -> bool:
        engine = self.gateway.engine
        return (
            all(order.is_over for order in self.orders.values())
            and engine is not None
            and engine.scheduler.is_idle
            and list(self._standings().values()) == [Standing.READY] * len(self.workers)
        )

    def _standings(self) -> dict[str, Standing]:
        fleet = self.gateway.service.fleet
        computes = {name: entry.standing for name, entry in fleet.compute.items()}
        return computes | {name: entry.standing for name, entry in fleet.attention.items()}

    def _check_end(self) -> None:
        if not self._is_settled():
            live = [order.name for order in self.orders.values() if not order.is_over]
            raise Violation(f"it never comes to rest: requests {live}, workers {self._standings()}")
        assert self.gateway.engine is not None
        for group, pool in self.gateway.engine.scheduler.pools.items():
            if pool.used:
                raise Violation(f"group {group}: {pool.used} blocks are never freed")
        if len(self.gateway.engine.streams):
            raise Violation("streams are left over")
        self.watch.check_free_blocks()

    # --- the gateway's sockets -------------------------------------------------------------------------------------

    def _hand(self, socket: str, peer: str, message: Any) -> None:
        self.gateway.hand(socket, peer, message)
        self._look()

    def _look(self) -> None:
        engine = self.gateway.engine
        if engine is not None:
            engine.scheduler.check()
            self.watch.counts["preemptions"] += len(engine.scheduler.take_preemptions())
            self.watch.follow(engine.scheduler.pools)

    def _control(self, peer: bytes, message: Any, _: Buffer | None) -> None:
        worker = self.workers[peer.decode()]
        if not worker.is_alive:
            raise PeerGone("its process has ended")
        worker.control_in.send(message)

    def _data(self, peer: bytes, message: Any, payload: Buffer | None) -> None:
        worker = self.workers[peer.decode()]
        if not worker.is_alive or not worker.has_joined:
            raise PeerGone("its process has ended")
        tensors = unpack(message.parts, memoryview(payload)) if payload is not None else []
        if isinstance(message, m.Step):
            self.watch.planned(message, tensors[1].tolist())
            self.watch.counts["blocks copied"] += len(message.copies)
        if isinstance(message, m.Fence):
            self.watch.counts["fences"] += 1
        worker.data_in.send(message, tensors)

    def _client(self, _: bytes, message: m.Delta | m.Failed, __: Buffer | None) -> None:
        order = self.orders[message.request]
        if order.is_forgotten:
            raise PeerGone("nobody is there")
        if order.is_over:
            raise Violation(f"request {order.name} has ended, and is sent {message}")
        if isinstance(message, m.Failed):
            self._fail(order, message)
            return
        got = order.got[message.index]
        got.extend(message.tokens)
        if message.index in order.ended or got != order.expected[: len(got)]:
            raise Violation(f"request {order.name} got {got} for {message.index}, its text is {order.expected}")
        if message.usage is not None and message.usage.cached_tokens:
            self.watch.counts["prefixes found"] += 1
        if message.finish_reason is not None:
            self._finish(order, message)

    def _fail(self, order: Order, failed: m.Failed) -> None:
        excuse = next((excuse for excuse in self.excuses if excuse in failed.reason), None)
        self.watch.counts[f"error: {excuse}"] += 1
        order.is_over = True
        if excuse is None:
            raise Violation(f"request {order.name} failed for no good reason: {failed.reason}")

    def _finish(self, order: Order, last: m.Delta) -> None:
        self.watch.counts[f"ended with {last.finish_reason}"] += 1
        order.ended.add(last.index)
        order.is_over = len(order.ended) == order.num_outputs
        if order.is_over != (last.usage is not None):
            raise Violation(f"request {order.name} has ended {len(order.ended)} of {order.num_outputs}: {last}")
        if last.finish_reason != order.reason or len(order.got[last.index]) != len(order.expected):
            raise Violation(f"request {order.name} ended with {last} at {order.got} of {order.expected}")

    # --- what may happen -------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a process, or its successor."""
        if name.startswith("attention"):
            self.workers[name] = AttentionProcess(self, self._hello(name, None, self._attention_facts(name)))
        else:
            stage = Stage(int(name.partition("-")[2]) % self.shape.num_stages, self.shape.num_stages)
            span = None if stage == WHOLE else range(1) if stage.is_first else range(1, len(self.shape.calls) + 1)
            model = StampModel(self.shape.calls, self.shape.max_model_len, span)
            hello = self._hello(name, self._compute_facts(stage, model), None)
            self.workers[name] = ComputeProcess(self, hello, model, self.shape.num_lanes, stage)

    def end(self, worker: AnyWorker) -> None:
        """A process ends at once; what it sent may arrive or not, what it was sent is lost."""
        worker.is_alive = False
        self.watch.counts["processes ended"] += 1
        for channel in list(self.channels):
            if channel.receiver is worker and channel.ordered:
                channel.lose_all()
            elif channel.receiver is worker or channel in (worker.control_out, worker.data_out):
                channel.lose_some(self.chance)

    def _hello(self, name: str, compute: m.ComputeFacts | None, attention: m.AttentionFacts | None) -> m.Hello:
        return m.Hello(m.PROTOCOL, name, next(self._starts), 1, "here", "none", compute, attention)

    def _attention_facts(self, name: str) -> m.AttentionFacts:
        memory = self.shape.num_blocks * self.shape.block_size * self.shape.token_bytes
        return m.AttentionFacts("cpu", memory, 1e9, (Dtype.FLOAT32,), f"ipc://{name}")

    def _compute_facts(self, stage: Stage, model: StampModel) -> m.ComputeFacts:
        calls = m.CallRange(model.span.start, min(model.span.stop, len(model.calls)))
        return m.ComputeFacts(
            model="llama-135m",
            digest=self.gateway.service.fleet.config.digest,
            device="cpu",
            dtype="float32",
            wire_dtype=Dtype.FLOAT32,
            lanes=self.shape.num_lanes,
            calls=tuple(
                m.CallGeometry(c.q_heads, c.kv_heads, c.k_size, c.v_size, c.scale, c.window, c.softcap)
                for c in self.shape.calls
            ),
            vocab_size=VOCABULARY,
            max_model_len=self.shape.max_model_len,
            weight_bytes=0,
            stage=None if stage == WHOLE else m.StageFacts(stage.number, stage.count, calls, "ipc://stage"),
        )

    def ask(self) -> None:
        """A client of its own sends a request."""
        chance = self.chance
        length = chance.choice([1, 2, 3, 5, 9, 17])
        known = chance.choice(self.prompts)[:length] if self.prompts and chance.random() < 0.5 else ()
        prompt = known + tuple(chance.randrange(VOCABULARY) for _ in range(length - len(known)))
        self.prompts.append(prompt)
        max_tokens, ignore_eos = chance.randint(1, 10), chance.random() < 0.5
        expected, reason = continuation(self.shape.calls, prompt, max_tokens), "length"
        if not ignore_eos and self.eos_token in expected:
            expected, reason = expected[: expected.index(self.eos_token) + 1], "stop"
        num_outputs = chance.choice([1, 1, 1, 2, 3])
        self.watch.counts["several outputs"] += num_outputs > 1
        order = Order(f"request-{len(self.orders)}", expected, reason, num_outputs)
        self.orders[order.name] = order
        self.watch.counts["requests"] += 1
        params = m.SamplingParams(
            max_tokens=max_tokens,
            n=num_outputs,
            temperature=0.0,
            ignore_eos=ignore_eos,
            stop=("never",) if chance.random() < 0.2 else (),
            logprobs=chance.choice([None, 2]),
        )
        self._hand("clients", order.name, m.Generate(order.name, None, None, prompt, None, params))

    def cancel(self) -> None:
        """A client cancels a request; or leaves, which is noticed when it is sent something."""
        live = [order for order in self.orders.values() if not order.is_over]
        if not live:
            return
        order = self.chance.choice(live)
        order.is_forgotten = order.is_over = True
        self.watch.counts["cancels"] += 1
        if self.chance.random() < 0.7:
            self._hand("clients", order.name, m.Cancel(order.name))

    def stop(self) -> None:
        """A compute worker is stopped where it stands; what it has sent last may be stopped with it."""
        computes = [worker for worker in running(self.workers.values()) if isinstance(worker, ComputeProcess)]
        if not computes:
            return
        worker = self.chance.choice(computes)
        worker.is_stopped = True
        self.watch.counts["stops"] += 1
        if self.chance.random() < 0.7:
            for channel in self.channels:
                if channel.name.startswith(f"link of {worker.name} "):
                    self._hold(channel)

    def go_on(self) -> None:
        """A stopped worker continues."""
        stopped = [worker for worker in self.workers.values() if worker.is_stopped]
        if stopped:
            self.chance.choice(stopped).is_stopped = False

    def hold(self) -> None:
        """Nothing arrives on a channel for a while."""
        if self.channels:
            self._hold(self.chance.choice(list(self.channels)))

    def _hold(self, channel: Channel) -> None:
        channel.held_until = self.tick_number + self.chance.randint(1, self.chance.choice([20, 80, LONGEST_HOLD]))

    def silence(self) -> None:
        """The gateway misses a worker's heartbeats, a stopped one's rather than another's.

        Often a client has lost its patience by then, and the fence takes longer to some attention workers.
        """
        if self.chance.random() < 0.5:
            self.cancel()
        stopped = [name for name, worker in self.workers.items() if worker.is_stopped]
        name = self.chance.choice(stopped or [name for name in self.workers if name.startswith("compute")])
        self.watch.counts["silences"] += 1
        self.gateway.silent(name)
        self._look()
        for channel in self.channels:
            if channel.name.startswith("data to attention") and self.chance.random() < 0.3:
                self._hold(channel)

    def silence_attention(self) -> None:
        """The gateway misses an attention worker's heartbeats; that group is lost."""
        self._excuse_losses()
        self.watch.counts["silences"] += 1
        self.gateway.silent(self.chance.choice([name for name in self.workers if name.startswith("attention")]))
        self._look()

    def _excuse_losses(self) -> None:
        self.excuses |= {"was lost, and the others have not enough blocks for it"}

    def beat(self) -> None:
        """A worker shows that it lives."""
        alive = running(self.workers.values())
        if alive:
            self.chance.choice(alive).beat()

    def end_compute(self) -> None:
        """A compute worker's process ends."""
        computes = [w for w in self.workers.values() if isinstance(w, ComputeProcess) and w.is_alive]
        if computes:
            self.end(self.chance.choice(computes))

    def end_attention(self) -> None:
        """An attention worker's process ends."""
        attentions = [w for w in self.workers.values() if isinstance(w, AttentionProcess) and w.is_alive]
        if attentions:
            self._excuse_losses()
            self.end(self.chance.choice(attentions))

    def restart(self) -> None:
        """A process that has ended gets a successor."""
        ended = [name for name, worker in self.workers.items() if not worker.is_alive]
        if ended:
            self.start(self.chance.choice(ended))

    def fail(self) -> None:
        """An attention worker runs out of memory in its next read or write."""
        attentions = [w for w in self.workers.values() if isinstance(w, AttentionProcess) and w.is_alive]
        if attentions:
            self.excuses.add("out of memory on cpu: as ordered")
            self.watch.counts["failed steps"] += 1
            self.chance.choice(attentions).fail_next()
