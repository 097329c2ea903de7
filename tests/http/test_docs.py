"""What the documentation shows works, and what it points at is there."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.conftest import Front

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "common/pannier/client/README.md"
PAGES = [ROOT / "README.md", CLIENT]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_example_of_the_client_runs(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as on the page; only where the gateway is, is another."""
    names: dict[str, Any] = {}
    examples = re.findall(r"^```python\n(.*?)^```", CLIENT.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) > 8
    for example in examples:
        here = re.sub(r"Client\((?=\)|retries)", f"Client({front.stack.endpoint!r}, ", example)
        exec(compile(here, str(CLIENT), "exec"), names)
    assert "invalid temperature" in capsys.readouterr().out


@pytest.mark.slow
def test_clients_of_openai_are_told_that_there_are_no_embeddings(front: Front) -> None:
    with (
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="sesame", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="no embeddings"),
    ):
        client.embeddings.create(model="embedded", input="x")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
