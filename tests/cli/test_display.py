"""What a person sees of a stack's processes."""

import io
import json

from pannier.cli.display import Display


def event(level: str, event: str, **fields: object) -> str:
    return json.dumps({"role": "compute", "name": "compute-0", "level": level, "event": event, **fields})


def shown(*lines: str, ready_after: int | None = None, verbose: bool = False) -> list[str]:
    stream = io.StringIO()
    with Display(verbose=verbose, stream=stream) as display:
        for number, line in enumerate(lines):
            if number == ready_after:
                display.ready()
            display.line("compute-0", line)
    return stream.getvalue().splitlines()


def test_progress_is_shown_until_the_stack_is_ready() -> None:
    """Afterwards what happens is no news."""
    loading = event("info", "loading", step="slicing", layer=3)
    assert shown(loading, loading, ready_after=1) == ["compute-0: loading, step=slicing, layer=3"]


def test_a_single_field_needs_no_name() -> None:
    assert shown(event("info", "loading", step="slicing")) == ["compute-0: loading: slicing"]


def test_what_is_wrong_is_always_shown() -> None:
    """With its traceback, if it has one."""
    wrong = event("error", "defect", exception="Traceback\n  here")
    assert shown(wrong, ready_after=0) == ["compute-0: defect", "compute-0: Traceback", "compute-0:   here"]


def test_verbose_shows_everything() -> None:
    assert shown(event("info", "registered"), ready_after=0, verbose=True) == ["compute-0: registered"]


def test_what_is_no_event_is_shown_as_it_is() -> None:
    """A library's warning, markup and broken JSON included."""
    lines = ["torch: [bold]slow[/bold]", "{not json", '{"a": 1}']
    assert shown(*lines, ready_after=0) == [f"compute-0: {line}" for line in lines]
