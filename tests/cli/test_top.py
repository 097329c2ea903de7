"""`pannier top`: the picture says what has happened since the look before, and the sentence what holds things back."""

from typing import Any

import pytest
from rich.console import Console

from pannier.cli.lapse import bottleneck, lapses
from pannier.cli.top import BAR, as_dict, bar, picture

pytestmark = pytest.mark.timeout(30)


def status(steps: int, compute: float, attention: float, transfer: float, **changed: Any) -> dict[str, Any]:
    """A stack of one lane, one attention worker in a group and one in none."""
    seconds = {"compute_s": compute, "exposed_attention_s": attention, "exposed_transfer_s": transfer}
    attention_worker = {"role": "attention", "name": "attention-0", "standing": "ready", "heads": [(0, 3)]}
    blocks = {"used": 5, "cached": 2, "free": 3, "total": 10}
    return {
        "model": "ox",
        "ready": True,
        "requests": {"running": 3, "waiting": 1},
        "groups": {"0": blocks},
        "lanes": [{"worker": "compute-0", "lane": 1, "steps": steps, "seconds": seconds}],
        "processes": [
            {"role": "compute", "name": "compute-0", "standing": "ready"},
            attention_worker | {"group": 0, "blocks": blocks},
            attention_worker
            | {"name": "attention-1", "standing": "joined", "heads": [], "group": None, "blocks": None},
        ],
        **changed,
    }


def test_a_lapse_is_the_difference_of_two_looks() -> None:
    """A lane that is new, or a worker that was started again, has none that is negative."""
    (lane,) = lapses(status(10, 1.0, 0.5, 0.0), status(30, 2.0, 0.5, 0.5), 2.0)
    assert (lane.steps_per_s, lane.compute, lane.attention, lane.transfer) == (10.0, 0.5, 0.0, 0.25)
    (again,) = lapses(status(30, 2.0, 1.0, 1.0), status(1, 0.1, 0.0, 0.0), 1.0)
    assert (again.steps_per_s, again.compute, again.attention) == (0.0, 0.0, 0.0)
    assert lapses(status(1, 1, 1, 1, lanes=[]), status(1, 1, 1, 1), 1.0) == []


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (status(9, 0.8, 0.1, 0.1), "Compute works 80 %"),
        (status(9, 0.2, 0.1, 0.7), "Links hold it back: transfer is exposed 70 %"),
        (status(9, 0.2, 0.7, 0.1), "Attention holds it back: it is exposed 70 %"),
        (status(9, 0.0, 0.0, 0.0), "Nothing to do"),
        (status(9, 0.8, 0.1, 0.1, ready=False), "Not all workers"),
        (status(9, 0.8, 0, 0, groups={"0": {"used": 10, "cached": 0, "free": 0, "total": 10}}), "KV blocks are short"),
    ],
)
def test_what_holds_it_back_is_said(after: dict[str, Any], words: str) -> None:
    assert words in bottleneck(after, lapses(status(0, 0, 0, 0), after, 1.0))


def test_the_picture_has_every_worker_and_what_its_blocks_hold() -> None:
    after = status(9, 0.5, 0.25, 0.0)
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(picture(after, lapses(status(0, 0, 0, 0), after, 1.0)))
    text = captured.get()
    for words in (
        "ox: ready, 3 running, 1 waiting",
        "compute-0",
        "9.0",
        "50 %",
        "25 %",
        "attention-0",
        "0-2",
        "joined",
    ):
        assert words in text
    assert "█" * (BAR // 2) in text


def test_a_bar_is_never_longer_than_the_whole() -> None:
    for shares in ({"compute": 0.9, "attention": 0.4}, {"used": 1.0, "cached": 1.0}, {"used": 0.0, "cached": 0.0}):
        assert len(bar(shares)) == BAR


def test_programs_are_told_the_same() -> None:
    after = status(9, 0.5, 0.25, 0.0)
    said = as_dict(after, lapses(status(0, 0, 0, 0), after, 1.0))
    assert (said["model"], said["requests"]) == ("ox", {"running": 3, "waiting": 1})
    assert "Compute works" in said["bottleneck"]
    assert [(lane["worker"], lane["steps_per_s"], lane["compute"]) for lane in said["lanes"]] == [("compute-0", 9, 0.5)]
    assert [(worker["name"], worker["group"]) for worker in said["attention"]] == [
        ("attention-0", 0),
        ("attention-1", None),
    ]
