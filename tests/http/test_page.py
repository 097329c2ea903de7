"""The web page in a real browser: text streams into the playground, and the picture shows what runs."""

import re
from pathlib import Path

import httpx
import pytest

from tests.http.browser import BROWSER, browse
from tests.http.conftest import Front

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")


def test_the_page_needs_no_key_and_allows_nothing_from_elsewhere(front: Front) -> None:
    page = httpx.get(front.url, timeout=30)
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    files = re.findall(r'(?:href|src)="(/page/[^"]+)"', page.text)
    assert len(files) == 3
    assert {httpx.get(front.url + file, timeout=30).status_code for file in files} == {200}
    assert httpx.get(f"{front.url}/page/../app.py", timeout=30).status_code in (401, 404)


@needs_browser
def test_the_picture_shows_every_worker(open_front: Front, tmp_path: Path) -> None:
    """Without a click: what the status says is drawn within seconds."""
    found = _dump(open_front.url, tmp_path)
    for name in ("compute-0", "attention-0", "attention-1", "lane 0", "lane 1", "embedded", "ready"):
        assert name in found
    assert "unreachable" not in found


@needs_browser
def test_text_streams_into_the_playground(open_front: Front, tmp_path: Path) -> None:
    """What the server generates, with its usage."""
    found = _dump(f"{open_front.url}/?prompt=Who+art+thou&max_tokens=24#generate", tmp_path, budget_ms=600_000)
    assert re.search(r"\d+ tokens in [0-9.]+ s", found)
    (text,) = re.findall(r'<pre id="output"[^>]*>(.*?)</pre>', found, re.DOTALL)
    assert len(text) > 10


@needs_browser
def test_a_screenshot_is_made(open_front: Front, tmp_path: Path) -> None:
    file = tmp_path / "page.png"
    browse(tmp_path, f"--screenshot={file}", "--virtual-time-budget=4000", open_front.url)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000


def _dump(url: str, folder: Path, budget_ms: int = 4000) -> str:
    """The page's elements after so much of the browser's own time, in which it waits only for what it has asked for."""
    return browse(folder, "--dump-dom", f"--virtual-time-budget={budget_ms}", url)
