"""Tokens of a request, as OpenAI counts them."""

from typing import Any

from pannier.client import Usage


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage` of an answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
