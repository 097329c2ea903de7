"""What becomes of a request between its admission and its last delta, with a scheduler by hand."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from pannier.gateway.shortage import ADVICE
from pannier.gateway.text import Text
from pannier.scheduler import Output, Unplanned
from pannier.wire import messages as m
from tests.gateway.rig import LANE, LIFE, SESSION, EngineRig, Pool, output, step

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def rig() -> EngineRig:
    return EngineRig()


# --- several outputs of one request ----------------------------------------------------------------------------------


def test_every_sample_is_a_sequence_of_its_own(rig: EngineRig) -> None:
    """With a number that no other has."""
    assert rig.generate("a", n=3).sequences == (1, 2, 3)
    assert rig.generate("b").sequences == (4,)


def test_outputs_end_one_by_one_and_the_last_brings_the_usage(rig: EngineRig) -> None:
    """Whichever that is: the prompt once, the tokens of all."""
    rig.generate(n=2)
    (first,) = rig.commit(output(1))
    assert (first.index, first.tokens, first.finish_reason, first.usage) == (0, (7,), None, None)
    (second,) = rig.commit(output(2, 8, "stop"))
    assert (second.index, second.tokens, second.finish_reason, second.usage) == (1, (8,), "stop", None)
    assert len(rig.engine.streams) == 1
    (last,) = rig.commit(output(1, 9, "length"))
    assert (last.index, last.finish_reason, last.usage) == (0, "length", m.Usage(3, 0, 3))
    assert rig.ends == [False, False, True]
    assert len(rig.engine.streams) == 0


def test_an_output_that_has_ended_gets_nothing_more(rig: EngineRig) -> None:
    """Though the request goes on."""
    rig.generate(n=2)
    rig.commit(output(2, finish_reason="stop"))
    assert rig.commit(output(2)) == []


def test_who_names_no_most_tokens_gets_what_all_groups_can_hold(rig: EngineRig) -> None:
    """A prompt that is longer than one group has an answer too."""
    rig.scheduler.pools = {0: Pool(1), 1: Pool(2)}
    assert rig.generate(max_tokens=None).max_tokens == 3 * 16 - 3


def test_cancelling_ends_all_that_go_on(rig: EngineRig) -> None:
    """And those that have ended are over already."""
    rig.generate(n=3)
    rig.commit(output(2, finish_reason="stop"))
    rig.engine.cancel(b"client", "r")
    assert sorted(rig.scheduler.cancelled) == [1, 3]
    assert len(rig.engine.streams) == 0
    assert rig.commit(output(1), output(3)) == []


def test_an_error_of_one_output_ends_the_request(rig: EngineRig) -> None:
    """With one message: what the others would give is no answer to what was asked."""
    rig.generate(n=2)
    rig.engine.deliver([Output(number, None, "error", "its cache was lost") for number in (2, 1)])
    assert rig.sent == [m.Failed("r", "unavailable", None, "its cache was lost")]
    assert 1 in rig.scheduler.cancelled
    assert len(rig.engine.streams) == 0


def test_a_constraint_that_goes_no_further_is_the_fault_of_the_request(rig: EngineRig) -> None:
    """What was drawn goes out first."""
    rig.generate()
    delta, failed = rig.commit(output(1), Output(1, None, "error", "the regex can't be followed"))
    assert delta.tokens == (7,)
    assert failed == m.Failed("r", "invalid", None, "the regex can't be followed")
    assert len(rig.engine.streams) == 0


def test_a_client_that_has_left_loses_all_outputs(rig: EngineRig) -> None:
    """Of all its requests."""
    rig.generate("a", n=2)
    rig.generate("b")
    rig.has_left = True
    rig.commit(output(1))
    assert sorted(rig.scheduler.cancelled) == [1, 2, 3]
    assert [(message.request, message.code) for message in rig.sent] == [("a", "unavailable"), ("b", "unavailable")]


def test_cached_tokens_are_those_that_were_there_at_first(rig: EngineRig) -> None:
    """Not what a request that was preempted found of its own."""
    rig.generate()
    rig.commit(output(1, num_cached=2))
    (last,) = rig.commit(output(1, finish_reason="stop", num_cached=3))
    assert last.usage == m.Usage(3, 2, 2)


def test_log_probabilities_of_the_prompt_go_out_as_they_come(rig: EngineRig) -> None:
    """Before there is any token, and with one."""
    rig.generate(prompt_logprobs=0)
    tokens = tuple(m.TokenLogprob(token, -0.5, ()) for token in (2, 3))
    scored = (m.Scored(1, 1, tokens[:1]),)
    (first,) = rig.commit(Output(1, None, None, scored=tokens[:1]), scored=scored)
    assert rig.scheduler.committed[-1][2] == scored
    assert (first.index, first.prompt_logprobs, first.tokens) == (0, tokens[:1], ())
    (second,) = rig.commit(output(1, scored=tokens[1:]))
    assert (second.prompt_logprobs, second.tokens) == (tokens[1:], (7,))


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spoken(write_model: Callable[..., Path], tokenizers: dict[str, Tokenizer]) -> EngineRig:
    """An engine whose model has a tokenizer, with a vocabulary as large as the rig says."""
    made = EngineRig(Text.load(write_model(tokenizers["byte-level"])))
    object.__setattr__(made.engine.admission, "vocab_size", tokenizers["byte-level"].get_vocab_size())
    return made


def spell(rig: EngineRig, text: str) -> list[int]:
    assert rig.engine.admission.text is not None
    return [token for letter in text for token in rig.engine.admission.text.encode_bare(letter)]


def test_a_stop_string_ends_its_own_output_only(spoken: EngineRig) -> None:
    """The scheduler is told; the other output goes on."""
    spoken.generate(n=2, stop=("b",))
    a, b = spell(spoken, "ab")
    spoken.commit(output(1, a), output(2, a))
    sent = spoken.commit(output(1, b), output(2, a))
    assert spoken.scheduler.finished == [1]
    assert [(delta.index, delta.text, delta.finish_reason) for delta in sent] == [(0, "", "stop"), (1, "a", None)]


@pytest.mark.parametrize(("params", "text"), [({}, "a"), ({"include_stop": True}, "ab")])
def test_a_stop_token_is_shown_only_if_that_is_wanted(spoken: EngineRig, params: dict[str, Any], text: str) -> None:
    """Its id goes out in any case."""
    a, b = spell(spoken, "ab")
    assert b in spoken.generate(stop_token_ids=(b,), **params).stop_tokens
    sent = spoken.commit(output(1, a)) + spoken.commit(output(1, b, "stop"))
    assert "".join(delta.text for delta in sent) == text
    assert [token for delta in sent for token in delta.tokens] == [a, b]
    assert sent[-1].finish_reason == "stop"


def test_a_stop_string_before_the_least_tokens_is_text(spoken: EngineRig) -> None:
    """The second one ends the output."""
    spoken.generate(stop=("b",), min_tokens=2)
    sent = [delta for token in spell(spoken, "abab") for delta in spoken.commit(output(1, token))]
    assert "".join(delta.text for delta in sent) == "aba"
    assert sent[-1].finish_reason == "stop"


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_a_deadline_that_has_passed_ends_the_request(rig: EngineRig) -> None:
    """With a code of its own."""
    assert rig.generate(deadline_s=1.5).deadline == rig.now + 1.5
    rig.now += 2
    rig.scheduler.expired = [Output(1, None, "error", "its deadline has passed")]
    rig.engine.expire()
    assert rig.scheduler.asked_at == [rig.now]
    assert rig.sent == [m.Failed("r", "timeout", None, "its deadline has passed")]


def test_without_deadlines_nobody_looks_for_them(rig: EngineRig) -> None:
    """The scheduler is asked only while a request has one."""
    rig.generate()
    rig.engine.expire()
    assert rig.scheduler.asked_at == []


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_goes_to_the_worker_of_its_lane(rig: EngineRig) -> None:
    """By its name, with the session, and with the lane's number there."""
    rig.scheduler.steps.append(step(9, token_ids=array("i", [4])))
    rig.generate()
    ((name, message, _),) = rig.steps
    assert (name, message.step, message.life, message.session, message.lane) == ("compute", 9, LIFE, SESSION, 0)


def test_a_worker_that_lacks_states_is_sent_the_step_with_them(rig: EngineRig) -> None:
    """The same step again."""
    rig.engine.send_states(LANE, m.NeedState(LIFE, SESSION, 5, 0, (1,)))
    ((_, message, _),) = rig.steps
    assert message.step == 5
    assert [state.sequence for state in message.states] == [1]


@pytest.mark.parametrize(("lane", "number"), [(LANE, 6), (LANE + 1, 5), (LANE, 100)])
def test_states_for_a_step_that_is_not_owed_are_refused(rig: EngineRig, lane: int, number: int) -> None:
    """Nothing is sent."""
    with pytest.raises(Unplanned):
        rig.engine.send_states(lane, m.NeedState(LIFE, SESSION, number, 0, (1,)))
    assert rig.steps == []


# --- what is watched -------------------------------------------------------------------------------------------------


def test_the_books_are_checked_whenever_nothing_is_left(rig: EngineRig) -> None:
    """Once, not at every turn."""
    rig.generate()
    assert rig.scheduler.num_checks == 0
    rig.scheduler.is_idle = True
    rig.commit(output(1, finish_reason="stop"))
    rig.engine.pump()
    assert rig.scheduler.num_checks == 1


def test_books_that_do_not_balance_are_counted_and_logged(rig: EngineRig) -> None:
    """The gateway goes on."""
    rig.generate()
    rig.scheduler.is_idle, rig.scheduler.wrong = True, "block 3 is lost"
    with capture_logs() as logs:
        rig.commit(output(1, finish_reason="stop"))
    assert rig.engine.accounting_errors == 1
    assert [(line["log_level"], line["reason"]) for line in logs] == [("error", "block 3 is lost")]
    rig.generate("next")


def test_preemptions_are_reported_once_per_interval(rig: EngineRig) -> None:
    """How many, of whom, and what to change; the next report counts what came meanwhile."""
    for request in ("a", "b"):
        rig.generate(request, n=4)
    rig.scheduler.preempted = [8, 1, 1]
    rig.engine.pump()
    assert rig.engine.shortage.num_preemptions == 3, "the status knows at once"
    with capture_logs() as logs:
        rig.engine.report_shortage()
        rig.scheduler.preempted = [2, 99]
        rig.engine.pump()
        rig.now += 9
        rig.engine.report_shortage()
        assert len(logs) == 1
        rig.now += 2
        rig.engine.report_shortage()
        rig.now += 20
        rig.engine.report_shortage()
    first, second = logs
    assert (first["log_level"], first["preemptions"], first["requests"], first["advice"]) == (
        "warning",
        3,
        "b, a",
        ADVICE,
    )
    assert (second["preemptions"], second["requests"]) == (2, "a, one that has ended")
    assert rig.engine.shortage.num_preemptions == 5


def test_a_report_names_the_first_few_requests(rig: EngineRig) -> None:
    """And counts the others."""
    rig.engine.shortage.note(str(number) for number in range(9))
    with capture_logs() as logs:
        rig.engine.report_shortage()
    assert logs[0]["requests"] == "0, 1, 2 and 6 more"
