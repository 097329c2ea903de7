"""One step of one lane under way: the slices, and what happens at every attention call between them."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from pannier.compute.activations import activations, values_of
from pannier.compute.emulated_device import EmulatedDevice
from pannier.compute.link import InProcessLink, Tensors
from pannier.compute.rows import GroupRows, chunk_lengths, positions_of
from pannier.compute.sampling import State, draw, report_drawn
from pannier.compute.scores import score
from pannier.compute.share import Share
from pannier.compute.step_clock import StepClock
from pannier.compute.wire_dtype import WireDtype
from pannier.ops.chunk_attention import chunk_attention
from pannier.ops.merge_partials import merge_partials, merge_sinks
from pannier.runtime.tracing import StepSpans
from pannier.slicer import WHOLE, Attend, SlicedModel, Stage
from pannier.slicer.export import IDS, POSITIONS
from pannier.slicer.model import Head, Values
from pannier.wire import StageToStage
from pannier.wire import messages as m

PassOn = Callable[[StageToStage, Tensors], None]
"""Sends to the next stage, or from the last one to the first."""


@dataclass(frozen=True)
class Outcome:
    """What a step has drawn: for the lane's next step (on the device), and for the gateway."""

    tokens: torch.Tensor
    drawn: tuple[m.Drawn, ...]
    scored: tuple[m.Scored, ...]


@dataclass(frozen=True)
class Inputs:
    """What a step is given beside its message.

    Attributes:
        token_ids: int64 [T], on the device.
        scored_tokens: int32 [S].
        masks: of allowed tokens, int32 [M, W].
        states: of its samples; None where one needs none.
    """

    token_ids: torch.Tensor
    scored_tokens: torch.Tensor
    masks: torch.Tensor
    states: Sequence[State | None]


class StepRun:
    """A step that runs: `going` yields whenever it can't go on before something arrives.

    It returns the outcome, by when every write of the step is acknowledged; or None once the step is aborted, by when
    nothing of it will be written any more.
    """

    def __init__(
        self,
        model: SlicedModel,
        step: m.Step,
        inputs: Inputs,
        groups: Sequence[tuple[GroupRows, list[Share]]],
        wire_dtype: WireDtype,
        clock: StepClock,
        stage: Stage = WHOLE,
        pass_on: PassOn | None = None,
        device: EmulatedDevice | None = None,
        spans: StepSpans | None = None,
    ) -> None:
        self.step = step
        self.spans = spans
        """Of the traces that it is a part of, if there are any."""
        self.given: tuple[m.Activations, Tensors] | None = None
        """What the stage before it has passed on, once that is here."""
        self._stage = stage
        self._pass_on = pass_on
        self.clock = clock
        self.wake_at: float | None = None
        """When an emulated device will have done what the step waits for."""
        self._device = device
        self.shares = {share.link.name: share for _, shares in groups for share in shares}
        self._model = model
        self._inputs = inputs
        self._groups = groups
        self._wire_dtype = wire_dtype
        self._chunks = chunk_lengths(step.segments)
        self._first_chunk_row = len(inputs.token_ids) - sum(self._chunks)
        span = model.span
        self._calls = None if stage == WHOLE else m.CallRange(span.start, min(span.stop, len(model.calls)))
        self.going: Generator[None, None, Outcome | None] = self._run()

    def abort(self) -> None:
        """From here on only have every worker drop the step."""
        self.going.close()
        self.going, self.wake_at = self._abort(), None

    def _run(self) -> Generator[None, None, Outcome]:
        for share in self.shares.values():
            share.begin(self.step.copies, self._calls, () if self.spans is None else self.spans.traces)
        values = yield from self._begin_values()
        yield from self._forward(values)
        for share in self.shares.values():
            share.end()  # all pieces are sent: while they are written, tokens are drawn or the next stage goes on
        outcome = self._outcome(values) if self._stage.is_last else self._hand_over(values)
        self._wire_dtype.settle()
        yield from self._emulate_slice()
        while not all(share.written for share in self.shares.values()):
            yield
        self.clock.waited(time.perf_counter())
        return outcome

    def _begin_values(self) -> Generator[None, None, Values]:
        """What is alive before the first slice."""
        device = self._model.device
        positions = torch.tensor(positions_of(self.step.segments), dtype=torch.int64, device=device)
        if self._stage.is_first:
            return {IDS: self._inputs.token_ids, POSITIONS: positions}
        while self.given is None:
            yield
        self.clock.begun(time.perf_counter())
        return {**values_of(*self.given, self._model.takes_on, device), POSITIONS: positions}

    def _hand_over(self, values: Values) -> Outcome:
        """The next stage goes on; this one has drawn nothing."""
        assert self._pass_on is not None
        self._pass_on(*activations(self.step, self._model.passes_on, values))
        return Outcome(torch.empty(0, dtype=torch.int64), (), ())

    def _outcome(self, values: Values) -> Outcome:
        head = self._model.head(values)
        tokens, drawn = self._draw(head)
        if self._pass_on is not None and drawn:
            step = self.step
            self._pass_on(m.DrawnTokens(step.life, step.session, step.step, step.lane, ()), [tokens])
        scored = score(head, self.step.scores, self._inputs.scored_tokens, self._model.vocab_size)
        return Outcome(tokens, drawn, scored)

    def _draw(self, head: Head) -> tuple[torch.Tensor, tuple[m.Drawn, ...]]:
        """Tokens int64 [samples] on the device, by which the samplers' states go on, and what is reported of them."""
        samples, states = self.step.samples, self._inputs.states
        if not samples:  # a prompt's chunk before the last: nobody asks what follows it
            return torch.empty(0, dtype=torch.int64, device=self._model.device), ()
        place = {row: i for i, row in enumerate(sorted({sample.row for sample in samples}))}
        logits = head(torch.tensor(list(place), dtype=torch.int64))
        places = [place[sample.row] for sample in samples]  # a row may be sampled several times
        tokens = draw(logits, places, samples, states, self._inputs.masks)
        numbers: list[int] = tokens.tolist()
        for state, token in zip(states, numbers, strict=True):
            if state is not None:
                state.append(token)
        return tokens, report_drawn(logits, places, samples, numbers)

    def _abort(self) -> Generator[None, None, None]:
        for share in self.shares.values():
            share.abort()
        while not all(share.aborted for share in self.shares.values()):
            yield

    def _forward(self, values: Values) -> Generator[None, None, None]:
        """The stage's slices and their attention calls, through which `values` goes on."""
        forward = self._model.run_stage(values)
        ask = next(forward)
        while True:
            yield from self._emulate_slice()
            output = yield from self._attend(ask)
            try:
                ask = forward.send(output)
            except StopIteration:
                return

    def _emulate_slice(self) -> Generator[None, None, None]:
        """What a slice gives is there at once; the device that would compute it takes its time."""
        if self._device is None:
            return
        start, self.wake_at = self._device.launch(len(self._inputs.token_ids))
        self.clock.computed(start, self.wake_at)
        while time.perf_counter() < self.wake_at:
            yield
        self.wake_at = None

    def _attend(self, ask: Attend) -> Generator[None, None, torch.Tensor]:
        """Attention output [T, H, Dv] of one call: the chunks' own part here, the rest from the workers."""
        call, sinks = ask.call.index, self._model.sinks(ask.call)
        q, k, v = self._wire_dtype.sent(ask.q, ask.k, ask.v)
        for rows, shares in self._groups:
            for share in shares:
                share.request(call, q, k, v, 0 if sinks is not None else rows.num_alone)
        own = self._attend_inside_chunks(ask)
        for share in self.shares.values():
            yield from share.ship(call, k, v)
        while any(share.waiting for share in self.shares.values()):
            yield
        self._note_wait()
        answers = [(rows, *_join_heads(shares)) for rows, shares in self._groups if rows.num_queries]
        if own is None and sinks is None and len(answers) == 1 and not self._chunks:
            return self._wire_dtype.received(answers[0][1], self._model.device, self._model.dtype)
        if own is not None and sinks is None and not answers and self._first_chunk_row == 0:
            return own[0].to(self._model.dtype)
        return self._merge(ask, own, answers, sinks)

    def _note_wait(self) -> None:
        """The lane has waited for the answers of a call, of which the last one counts; or for credits."""
        asked = [share for share in self.shares.values() if share.rows.num_queries]
        last = max(asked, key=lambda share: share.answered_at, default=None)
        if last is None:
            self.clock.waited(time.perf_counter())
        elif last.link.kind == InProcessLink.kind:
            self.clock.attended(last.call_s)
            self.clock.waited(last.answered_at)
        else:
            self.clock.waited(last.answered_at, last.call_s)

    def _attend_inside_chunks(self, ask: Attend) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._chunks:
            return None
        start, call = self._first_chunk_row, ask.call
        if self._device is not None:
            o = ask.q.new_zeros(len(ask.q) - start, call.q_heads, call.v_size, dtype=torch.float32)
            return o, o.new_zeros(o.shape[:2])
        return chunk_attention(
            ask.q[start:],
            ask.k[start:],
            ask.v[start:],
            self._chunks,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
        )

    def _merge(
        self,
        ask: Attend,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        answers: Sequence[tuple[GroupRows, torch.Tensor, torch.Tensor]],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, num_heads, _ = ask.q.shape
        o = ask.q.new_zeros(num_rows, num_heads, ask.v.shape[-1], dtype=torch.float32)
        lse = o.new_full((num_rows, num_heads), -torch.inf)
        if own is not None:
            o[self._first_chunk_row :], lse[self._first_chunk_row :] = own
        for rows, answer, answer_lse in answers:
            # Rows without a log-sum-exp have no other part: any finite weight makes the answer their whole.
            alone = answer_lse.new_zeros(len(answer) - len(answer_lse), num_heads)
            part = (self._wire_dtype.received(answer, o.device, o.dtype), torch.cat([alone, answer_lse]).to(o.device))
            o[rows.queries], lse[rows.queries] = merge_partials(o[rows.queries], lse[rows.queries], *part)
        if sinks is not None:
            o, lse = merge_sinks(o, lse, sinks)
        return o.to(self._model.dtype)


def _join_heads(shares: Sequence[Share]) -> tuple[torch.Tensor, torch.Tensor]:
    """The shards' answers side by side: o [M, H, Dv] and LSE [M - lse_from, H] of all heads."""
    answers = [share.take_answer() for share in shares]
    if len(answers) == 1:
        o, lse = answers[0]
        return o, lse
    return torch.cat([o for o, _ in answers], 1), torch.cat([lse for _, lse in answers], 1)
