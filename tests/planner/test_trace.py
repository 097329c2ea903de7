import random
from array import array
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.planner import (
    HASHED_TOKENS,
    TraceError,
    TraceRequest,
    at_rate,
    ideal_hit_rate,
    make_prompt,
    read_trace,
    repeated,
)

from .traces import write, write_azure, write_mooncake

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
START = datetime(2023, 11, 16, 18, 15, 46)


def test_an_azure_trace_is_read_with_arrivals_from_its_first_request(tmp_path: Path) -> None:
    """Seven digits of a second and line ends of DOS, as the published file has them."""
    path = tmp_path / "conv.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
    )
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 374, 44, None)
    assert second[1:] == (396, 109, None)
    assert second.arrival_s == pytest.approx(4.314579, abs=2e-6)


def test_a_mooncake_trace_is_read_with_its_hash_ids(tmp_path: Path) -> None:
    """Milliseconds become seconds, and every 512 tokens of a prompt have an id."""
    requests = [TraceRequest(0.0, 1024, 5, (0, 1)), TraceRequest(1.5, 1025, 1, (0, 1, 2))]
    assert list(read_trace(write_mooncake(tmp_path / "trace.jsonl", requests))) == requests


def test_a_trace_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    """A bad line far down is met only by whoever comes there."""
    path = write_azure(tmp_path / "t.csv", *["2023-11-16 18:15:46,1,1"] * 1000, "nonsense,1,1")
    assert len(list(islice(read_trace(path), 1000))) == 1000
    with pytest.raises(TraceError, match="line 1002"):
        list(read_trace(path))


@dataclass(frozen=True)
class Bad:
    """A file that is no trace, and what the error must say."""

    lines: tuple[str, ...]
    says: str


GOOD_AZURE = "2023-11-16 18:15:46,5,5"
GOOD_MOONCAKE = '{"timestamp": 1000, "input_length": 5, "output_length": 5, "hash_ids": [0]}'
BAD = {
    "empty": Bad((), "line 1"),
    "neither format": Bad(("once,upon",), "line 1"),
    "no such column": Bad(("TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,5"), r"line 2.*GeneratedTokens"),
    "no time": Bad((HEADER, GOOD_AZURE, "soon,5,5"), r"line 3.*TIMESTAMP"),
    "no number": Bad((HEADER, "2023-11-16 18:15:46,many,5"), r"line 2.*ContextTokens"),
    "no prompt": Bad((HEADER, "2023-11-16 18:15:46,0,5"), r"line 2.*ContextTokens"),
    "a row too short": Bad((HEADER, "2023-11-16 18:15:46,5"), r"line 2.*GeneratedTokens"),
    "a row too long": Bad((HEADER, GOOD_AZURE + ",5"), r"line 2.*more values"),
    "back in time": Bad((HEADER, GOOD_AZURE, "2023-11-16 18:15:45,5,5"), r"line 3.*TIMESTAMP.*1 s before"),
    "no json": Bad((GOOD_MOONCAKE, "{"), "line 2"),
    "no field": Bad(('{"timestamp": 0, "input_length": 5}',), r"line 1.*output_length"),
    "negative": Bad((GOOD_MOONCAKE.replace("5,", "-5,", 1),), r"line 1.*input_length"),
    "ids of a longer prompt": Bad((GOOD_MOONCAKE.replace("[0]", "[0, 1]"),), r"line 1.*hash_ids.*needs 1"),
    "ids that are none": Bad((GOOD_MOONCAKE.replace("[0]", '["a"]'),), r"line 1.*hash_ids"),
    "json back in time": Bad((GOOD_MOONCAKE, GOOD_MOONCAKE.replace("1000", "0")), r"line 2.*timestamp"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_what_is_wrong_with_a_trace_is_said_with_file_line_and_field(bad: Bad, tmp_path: Path) -> None:
    """One sentence that leads whoever reads it to the place."""
    path = write(tmp_path / "broken", *bad.lines)
    with pytest.raises(TraceError, match=rf"^{path}.*{bad.says}"):
        list(read_trace(path))


def test_a_missing_trace_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Not a traceback about a file descriptor."""
    with pytest.raises(TraceError, match=r"nowhere\.csv can't be read"):
        list(read_trace(tmp_path / "nowhere.csv"))


lengths = st.integers(1, 5000)
gaps_ms = st.integers(0, 10**7)


@given(rows=st.lists(st.tuples(gaps_ms, lengths, lengths), min_size=1, max_size=20))
@settings(deadline=None)
def test_any_azure_trace_comes_back_as_it_was_written(
    rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Lengths exactly, arrivals to the microsecond."""
    when, written, expected = START, [], []
    for gap, prompt, output in rows:
        when += timedelta(milliseconds=gap)
        written.append(f"{when.isoformat(sep=' ', timespec='microseconds')},{prompt},{output}")
        expected.append((when, prompt, output))
    read = list(read_trace(write_azure(tmp_path_factory.mktemp("azure") / "t.csv", *written)))
    assert [(each.prompt_length, each.output_length) for each in read] == [row[1:] for row in expected]
    for each, (arrival, _, _) in zip(read, expected, strict=True):
        assert each.arrival_s == pytest.approx((arrival - expected[0][0]).total_seconds(), abs=1e-6)


@given(data=st.data(), rows=st.lists(st.tuples(gaps_ms, lengths, lengths), min_size=1, max_size=20))
@settings(deadline=None)
def test_any_mooncake_trace_comes_back_as_it_was_written(
    data: st.DataObject, rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Lengths and ids exactly, arrivals to the millisecond."""
    written, now = [], 0
    for gap, prompt, output in rows:
        count = -(-prompt // HASHED_TOKENS)
        ids = data.draw(st.lists(st.integers(0, (1 << 30) - 1), min_size=count, max_size=count))
        written.append(TraceRequest(now / 1000, prompt, output, tuple(ids)))
        now += gap
    read = list(read_trace(write_mooncake(tmp_path_factory.mktemp("mooncake") / "t.jsonl", written)))
    assert [each[1:] for each in read] == [each[1:] for each in written]
    assert [each.arrival_s for each in read] == pytest.approx([each.arrival_s for each in written])


@given(text=st.binary(max_size=200), form=st.sampled_from(["auto", "azure", "mooncake"]))
@settings(deadline=None)
def test_no_file_at_all_raises_anything_but_a_trace_error(
    text: bytes, form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the bytes."""
    path = tmp_path_factory.mktemp("bytes") / "trace"
    for content in (text, f"{HEADER}\n".encode() + text, GOOD_MOONCAKE.encode() + b"\n" + text):
        path.write_bytes(content)
        try:
            requests = list(read_trace(path, form))
        except TraceError:
            continue
        assert all(each.prompt_length >= 1 and each.output_length >= 1 for each in requests)


def test_equal_hash_ids_give_equal_tokens_and_others_none_in_common() -> None:
    """A stretch of 512 tokens is a function of its id; the last may be cut short."""
    first = make_prompt(TraceRequest(0.0, 1300, 1, (4, 7, 9)), 0)
    second = make_prompt(TraceRequest(0.0, 1024, 1, (4, 9)), 1)
    assert isinstance(first, array)
    assert first.typecode == "i"
    assert (len(first), len(second)) == (1300, 1024)
    assert first[:512] == second[:512]
    assert first[1024:] == second[512:788]
    assert set(first[:512]).isdisjoint(first[512:])


def test_without_hash_ids_no_two_prompts_share_a_token() -> None:
    """And none has a token of a prompt with ids; the same number gives the same prompt."""
    prompts = [make_prompt(TraceRequest(0.0, 600, 1), number) for number in (0, 1, 123_456)]
    prompts.append(make_prompt(TraceRequest(0.0, 1024, 1, (0, (1 << 30) - 1)), 3))
    assert len(set().union(*prompts)) == sum(len(set(prompt)) for prompt in prompts)
    assert prompts[2] == make_prompt(TraceRequest(0.0, 600, 1), 123_456)


def test_a_repeated_trace_shares_prefixes_as_often_as_before_and_never_between_repeats() -> None:
    """Arrivals go on, a mean gap after the last."""
    trace = [TraceRequest(0.0, 1025, 1, (0, 1, 2)), TraceRequest(4.0, 1025, 1, (0, 1, 3))]
    twice = list(repeated(lambda: trace, 2))
    assert [each.arrival_s for each in twice] == [0.0, 4.0, 8.0, 12.0]
    ids = [set(each.hash_ids or ()) for each in twice]
    assert (ids[0] | ids[1]).isdisjoint(ids[2] | ids[3])
    assert ideal_hit_rate(twice) == ideal_hit_rate(trace) == pytest.approx(1024 / 2050)


def test_arrivals_at_a_rate_are_the_seeds_and_keep_the_rate() -> None:
    """The same seed gives the same arrivals, another gives others."""
    trace = [TraceRequest(0.0, 10, 10)] * 5000
    arrivals = [each.arrival_s for each in at_rate(trace, 4.0, seed=1)]
    assert arrivals == [each.arrival_s for each in at_rate(trace, 4.0, seed=1)]
    assert arrivals != [each.arrival_s for each in at_rate(trace, 4.0, seed=2)]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) / arrivals[-1] == pytest.approx(4.0, rel=0.05)


def test_the_ideal_hit_rate_is_of_whole_blocks_before_the_last_token() -> None:
    """An id hits behind the same ids only, as a full block of both prompts, and never holds the last token."""
    trace = [
        TraceRequest(0.0, 1024, 1, (1, 2)),  # nothing before it
        TraceRequest(1.0, 1024, 1, (1, 2)),  # its last token is in the second block: 512
        TraceRequest(2.0, 1025, 1, (1, 2, 3)),  # 1024
        TraceRequest(3.0, 1026, 1, (1, 2, 3)),  # the third was never full: 1024
        TraceRequest(4.0, 1025, 1, (2, 1, 3)),  # nothing began like this
        TraceRequest(5.0, 1537, 1, (1, 9, 2, 4)),  # 512, and nothing behind what differs
    ]
    assert ideal_hit_rate(trace) == pytest.approx((512 + 1024 + 1024 + 512) / sum(each.prompt_length for each in trace))


def test_the_ideal_hit_rate_of_a_trace_without_ids_is_not_known() -> None:
    """Rather than 0."""
    with pytest.raises(TraceError, match="no hash ids"):
        ideal_hit_rate([TraceRequest(0.0, random.Random(0).randint(1, 9), 1)])
