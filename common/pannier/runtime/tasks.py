"""Work that goes on side by side."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_end(*works: Coroutine[Any, Any, None]) -> None:
    """Run side by side until one ends; the others are cancelled, and what it raised is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
