"""Pool, links and scheduler under delays, cancels, stops, losses and restarts; and that the test itself can fail."""

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from pannier.attention.core import AttentionCore
from pannier.compute.share import Share
from pannier.gateway.engine import Engine
from pannier.gateway.entries import ComputeEntry, Session, Standing
from pannier.gateway.sessions import Sessions
from pannier.scheduler import Scheduler
from pannier.wire import messages as m

from .runs import run, run_many

NUM_RUNS = 120
SEEDS_TO_FAIL = range(300)
HAPPENINGS = (
    "fences",
    "cancels",
    "stops",
    "processes ended",
    "failed steps",
    "stale frames",
    "late writes refused",
    "ended with length",
    "ended with stop",
    "error: the model is not ready yet",
    "error: out of memory on cpu: as ordered",
    "error: was lost, and the others have not enough blocks for it",
    "preemptions",
    "prefixes found",
    "passed on",
    "blocks copied",
    "several outputs",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_request_ends_with_its_text_or_one_error_and_nothing_is_written_late() -> None:
    """Whatever is delayed, cancelled, stopped, lost or started again; and all of that did happen."""
    counts = run_many(range(NUM_RUNS))
    assert not [each for each in HAPPENINGS if not counts[each]], counts


def _free_before_fences_are_acknowledged(patch: pytest.MonkeyPatch) -> None:
    fence = Sessions.fence

    def hasty(self: Sessions, session: Session) -> None:
        fence(self, session)
        if session.standing is Standing.FENCING:
            session.fences.clear()
            self._end_if_fenced(session)

    patch.setattr(Sessions, "fence", hasty)


def _acknowledge_fences_and_ignore_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttentionCore, "fence", lambda _, fence: m.Fenced(fence.life, fence.compute, fence.session))


def _ignore_session_numbers(patch: pytest.MonkeyPatch) -> None:
    lane = AttentionCore._lane

    def blind(self: AttentionCore, compute: str, message: Any) -> Any:
        return lane(self, compute, msgspec.structs.replace(message, session=1 << 40))

    patch.setattr(AttentionCore, "_lane", blind)


def _free_blocks_that_planned_steps_name(patch: pytest.MonkeyPatch) -> None:
    retire = Scheduler._retire

    def hasty(self: Scheduler, sequence: Any) -> None:
        steps, sequence.num_steps = sequence.num_steps, 0
        retire(self, sequence)
        if steps:  # so that it is still there for the steps that name it, without what it has given back
            sequence.num_steps = steps
            sequence.blocks, sequence.spare, sequence.copied = array("i"), array("i"), None
            self._sequences[sequence.number] = sequence

    patch.setattr(Scheduler, "_retire", hasty)


def _take_steps_for_written_when_they_end(patch: pytest.MonkeyPatch) -> None:
    end = Share.end

    def hasty(self: Share) -> None:
        end(self)
        self.written = True

    patch.setattr(Share, "end", hasty)


def _acknowledge_steps_before_all_pieces_are_there(patch: pytest.MonkeyPatch) -> None:
    work = AttentionCore._work

    def hasty(self: AttentionCore, lane: Any, running: Any, message: Any, tensors: Any) -> Iterable[Any]:
        if isinstance(message, m.EndStep):
            message = msgspec.structs.replace(message, num_pieces=lane.pieces)
        return work(self, lane, running, message, tensors)

    patch.setattr(AttentionCore, "_work", hasty)


def _copy_the_blocks_of_all_calls_in_every_stage(patch: pytest.MonkeyPatch) -> None:
    begin = Share.begin

    def blind(self: Share, copies: tuple[m.BlockCopy, ...], _: m.CallRange | None) -> None:
        begin(self, copies, None)

    patch.setattr(Share, "begin", blind)


def _commit_when_the_last_stage_alone_is_done(patch: pytest.MonkeyPatch) -> None:
    def hasty(_self: Session, _worker: ComputeEntry, done: m.StageDone | m.StepDone) -> m.StepDone | None:
        return done if isinstance(done, m.StepDone) else None

    def lax(_self: Engine, _lane: int, _step: int) -> None:
        pass

    patch.setattr(Session, "collect", hasty)
    patch.setattr(Engine, "require_owed", lax)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        _free_before_fences_are_acknowledged,
        _acknowledge_fences_and_ignore_them,
        _ignore_session_numbers,
        _free_blocks_that_planned_steps_name,
        _take_steps_for_written_when_they_end,
        _acknowledge_steps_before_all_pieces_are_there,
        _copy_the_blocks_of_all_calls_in_every_stage,
        _commit_when_the_last_stage_alone_is_done,
    ],
)
@pytest.mark.timeout(300)
def test_a_guard_taken_away_is_noticed(mistake: Callable[[pytest.MonkeyPatch], None]) -> None:
    """With any one of the rules broken some run breaks a promise."""
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        assert any(run(seed)[1] is not None for seed in SEEDS_TO_FAIL)
