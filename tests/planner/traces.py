"""Traces for the tests, written as their publishers write them."""

import json
from collections.abc import Iterable
from pathlib import Path

from pannier.planner import TraceRequest


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def write_azure(path: Path, *rows: str) -> Path:
    return write(path, "TIMESTAMP,ContextTokens,GeneratedTokens", *rows)


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> Path:
    return write(
        path,
        *(
            json.dumps(
                {
                    "timestamp": round(request.arrival_s * 1000),
                    "input_length": request.prompt_length,
                    "output_length": request.output_length,
                    "hash_ids": request.hash_ids,
                }
            )
            for request in requests
        ),
    )
