"""The description of the routes that programs read, made from the very models that requests are checked with."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pannier.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Continue texts"),
    "/v1/chat/completions": (ChatRequest, "The model's turn in a conversation"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "The text of token ids"),
}
_GETS = {
    "/v1/models": "The model that is served",
    "/version": "Of this server",
    "/status": "The whole stack",
    "/metrics": "For Prometheus",
    "/livez": "Whether this process lives",
    "/readyz": "Whether requests would be served",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(version: str) -> dict[str, Any]:
    """The document."""
    kinds = [kind for kind, _ in _POSTS.values()]
    names, defined = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    posts = {path: {"post": _post(names[kind, "validation"], text)} for path, (kind, text) in _POSTS.items()}
    gets = {path: {"get": _route(text)} for path, text in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pannier", "version": version},
        "paths": {**posts, **gets},
        "components": {
            "schemas": {**defined["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(schema: Any, text: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}, **_route(text)}


def _route(text: str) -> dict[str, Any]:
    error = {"description": "What is wrong", "content": {"application/json": {"schema": {"$ref": _ERROR_REF}}}}
    return {"summary": text, "responses": {"200": {"description": "The answer"}, "default": error}}


_ERROR_REF = "#/components/schemas/Error"
