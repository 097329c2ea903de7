"""The routes."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from pannier.client import NO_EMBEDDINGS, AsyncClient, ClientError
from pannier.http.chat import Chat
from pannier.http.completions import Completions
from pannier.http.disconnect import CLIENT_CLOSED_REQUEST
from pannier.http.errors import ApiError, from_client, invalid
from pannier.http.guard import Guard
from pannier.http.health import Readiness
from pannier.http.metrics import Metrics
from pannier.http.openapi import openapi
from pannier.http.requests import DetokenizeRequest, TokenizeRequest, read
from pannier.http.tracing import Traced
from pannier.runtime.config import HttpConfig
from pannier.runtime.tracing import Tracer

STATUS_S = 5.0
PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:", "Cache-Control": "no-cache"}
METRICS_FORM = "text/plain; version=0.0.4; charset=utf-8"
Answer = Callable[[Request], Awaitable[Response]]
log = structlog.get_logger()


class Front:
    """What the routes share: one client of the gateway, and the name of the model that it serves."""

    def __init__(
        self, client: AsyncClient, config: HttpConfig, status: dict[str, Any], tracer: Tracer | None = None
    ) -> None:
        self.metrics = Metrics(status["model"])
        self._client = client
        self._config = config
        self._model: str = status["model"]
        self._max_model_len = status["max_model_len"]
        self._created = int(time())
        self._readiness = Readiness(client)
        self._tracer = tracer

    def app(self) -> Starlette:
        """The application."""
        shared = (self._client, self._model, self.metrics, self._config.keep_alive_s)
        routes: list[BaseRoute] = [
            _post("/v1/completions", Completions(*shared)),
            _post("/v1/chat/completions", Chat(*shared)),
            _get("/v1/models", self._models),
            _get("/v1/models/{model:path}", self._one_model),
            _post("/v1/embeddings", self._embeddings),
            _post("/tokenize", self._tokenize),
            _post("/detokenize", self._detokenize),
            _get("/version", self._version),
            _get("/openapi.json", self._openapi),
            _get("/livez", self._live),
            _get("/ping", self._live),
            _get("/readyz", self._ready),
            _get("/health", self._ready),
            _get("/status", self._status),
            _get("/metrics", self._metrics),
            _get("/", self._page),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        guards = [Middleware(Guard, api_keys=self._config.api_keys, max_body_bytes=self._config.max_body_bytes)]
        if self._config.cors_origins:
            guards.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=self._config.cors_origins,
                    allow_methods=("GET", "POST"),
                    allow_headers=("*",),
                ),
            )
        if self._tracer is not None:
            guards.append(Middleware(Traced, tracer=self._tracer))  # innermost: who is turned away makes no spans
        handlers: Any = {
            ApiError: self._error,
            ClientError: self._error,
            HTTPException: self._error,
            TypeError: self._error,
            ClientDisconnect: self._gone,
            Exception: self._error,
        }
        return Starlette(routes=routes, middleware=guards, exception_handlers=handlers)

    # --- what is there ---------------------------------------------------------------------------------------------

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, http: Request) -> Response:
        asked = http.path_params["model"]
        if asked != self._model:
            message = f"the model {asked!r} does not exist; this server has {self._model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "pannier",
            "root": self._model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }

    async def _embeddings(self, _: Request) -> Response:
        raise ApiError(404, NO_EMBEDDINGS, code="not_served")

    async def _tokenize(self, http: Request) -> Response:
        request = read(TokenizeRequest, await http.body())
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages must be given")
        turns = [{"role": turn.role, "content": turn.text} for turn in request.messages or ()]
        text = turns if request.prompt is None else request.prompt
        tokens = await self._client.tokenize(text, add_special_tokens=request.add_special_tokens)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": list(tokens)}
        if request.return_token_strs:
            pieces = (await self._client.detokenize(tokens)).pieces
            answer["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
        return JSONResponse(answer)

    async def _detokenize(self, http: Request) -> Response:
        request = read(DetokenizeRequest, await http.body())
        return JSONResponse({"prompt": (await self._client.detokenize(request.tokens)).text})

    async def _page(self, _: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": version("pannier")})

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(openapi(version("pannier")))

    # --- how it is -------------------------------------------------------------------------------------------------

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        reason = await self._readiness.why_not()
        return JSONResponse({"status": reason or "ok"}, 200 if reason is None else 503)

    async def _status(self, _: Request) -> Response:
        return JSONResponse(await self._client.status(timeout_s=STATUS_S))

    async def _metrics(self, _: Request) -> Response:
        try:
            status = await self._client.status(timeout_s=STATUS_S)
        except ClientError:
            status = None  # what this process counts is worth knowing all the same
        return Response(self.metrics.text(status), media_type=METRICS_FORM)

    # --- what goes wrong -------------------------------------------------------------------------------------------

    async def _error(self, _: Request, error: Exception) -> Response:
        match error:
            case ApiError():
                answer = error
            case ClientError():
                answer = from_client(error)
            case TypeError() if "parameter" in str(error):
                answer = ApiError(400, str(error), code="invalid_value")  # of a type that no message can carry
            case HTTPException():
                answer = ApiError(error.status_code, f"{error.detail}: there is no such route or method here")
            case _:
                log.exception("a request has met a defect", exc_info=error)
                answer = ApiError(500, "this server has a defect; its log says more", code="internal")
        self.metrics.refused.labels(status=str(answer.status)).inc()
        return answer.response()

    async def _gone(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _get(path: str, answer: Answer) -> Route:
    return Route(path, answer, methods=["GET"])


def _post(path: str, answer: Answer) -> Route:
    async def endpoint(http: Request) -> Response:
        return await answer(http)

    return Route(path, endpoint, methods=["POST"])
