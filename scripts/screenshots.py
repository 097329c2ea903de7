#!/usr/bin/env python
"""Pictures for the README of a stack that works: the page, `pannier top` and `pannier status`.

    .venv/bin/python scripts/screenshots.py [--out scripts/pictures]

The page needs chromium.
"""

import argparse
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType

sys.path.insert(0, str(Path(__file__).parent.parent))
from pannier.cli.lapse import lapses
from pannier.cli.status import view
from pannier.cli.top import picture
from pannier.client import Client, ClientClosed, Stream
from pannier.http import service as http_service
from pannier.runtime.config import HttpConfig
from tests.e2e.stack import running_stack
from tests.http.browser import BROWSER, browse
from tests.http.conftest import EMBEDDED, url_in

STREAMS, TOKENS = 24, 900
WIDTH, HEIGHT = 1280, 520
LOOK_S = 3.5
WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Nothing of it is loaded from elsewhere."""


def main() -> None:
    """Serve, load, look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_stack(folder / "run", EMBEDDED) as (stack, client):
            stack.start(http_service.run, "http", HttpConfig(gateway=stack.endpoint, port=0))
            url = url_in(folder / "run" / "http.log")
            with loaded(stack.endpoint):
                before, at = client.status(), time.monotonic()
                time.sleep(1.0)
                after, now = client.status(), time.monotonic()
                save(out / "top.svg", "pannier top", picture(after, lapses(before, after, now - at)), 100)
                save(out / "status.svg", "pannier status", Group(*view(after)), 150)
            if BROWSER is not None:
                with loaded(stack.endpoint), framed(f"{url}/?prompt=And+God+said&max_tokens=96#generate") as page:
                    browse(folder, f"--screenshot={out / 'page.png'}", f"--window-size={WIDTH},{HEIGHT}", page)
    print(*sorted(out.iterdir()), sep="\n")


@contextmanager
def framed(url: str) -> Iterator[str]:
    """A page around another that takes a while to load: a picture is taken when it has, of what goes on by then."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # as http.server calls it
            if self.path != "/":
                time.sleep(LOOK_S)
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            style = f"border:0;position:fixed;inset:0;width:{WIDTH}px;height:{HEIGHT}px"
            self.wfile.write(f'<iframe src="{url}" style="{style}"></iframe><img src="/later">'.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@contextmanager
def loaded(endpoint: str) -> Iterator[None]:
    """While it has something to do, which ends with the client that wants it."""

    def read(stream: Stream) -> None:
        with suppress(ClientClosed):
            for _ in stream:
                pass

    with ThreadPoolExecutor(STREAMS) as pool, Client(endpoint) as client:
        for number in range(STREAMS):
            pool.submit(read, client.stream(f"In the {number} year", max_tokens=TOKENS, ignore_eos=True))
        time.sleep(1.0)
        yield


def save(file: Path, title: str, shown: RenderableType, width: int) -> None:
    """As a terminal shows it."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, highlight=False)
        console.print(shown)
    console.save_svg(str(file), title=title, code_format=WITHOUT_FONTS)


if __name__ == "__main__":
    main()
