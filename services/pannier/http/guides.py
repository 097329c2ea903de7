"""The several ways in which clients ask for structured output, as the one that the gateway knows."""

import json
import re
from typing import Any

from pannier.client import Guide, GuideKind
from pannier.http.errors import invalid
from pannier.http.requests import ResponseFormat, SamplingFields

ANY_OBJECT = {"type": "object"}


def guide_of(request: SamplingFields) -> Guide | None:
    """What each output must look like. Raises `ApiError` if it is said twice."""
    asked = [*_of_format(request.response_format), *_of_structured(request), *_of_guided(request)]
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise invalid(asked[1][0], f"{names} both say what the output looks like; give one of them")
    return asked[0][1] if asked else None


def _of_format(given: ResponseFormat | None) -> list[tuple[str, Guide]]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", _json(ANY_OBJECT))]
    if given.json_schema is None:
        raise invalid("response_format.json_schema", "response_format of type json_schema needs a json_schema")
    return [("response_format", _json(given.json_schema.schema_))]


def _of_structured(request: SamplingFields) -> list[tuple[str, Guide]]:
    given = request.structured_outputs
    if given is None:
        return []
    found = _named(given.json_, given.regex, given.choice, given.grammar)
    if given.json_object:
        found.append(_json(ANY_OBJECT))
    return [("structured_outputs", guide) for guide in found]


def _of_guided(request: SamplingFields) -> list[tuple[str, Guide]]:
    found = _named(request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    return [("guided_*", guide) for guide in found]


def _named(
    schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Guide]:
    found = [] if schema is None else [_json(schema)]
    if regex is not None:
        found.append(Guide(GuideKind.REGEX, regex))
    if choice is not None:
        if not choice:
            raise invalid("choice", "choice is empty; it must hold at least 1 text")
        found.append(Guide(GuideKind.REGEX, "|".join(f"({re.escape(each)})" for each in choice)))
    if grammar is not None:
        found.append(Guide(GuideKind.GRAMMAR, grammar))
    return found


def _json(schema: dict[str, Any] | bool | str) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))
