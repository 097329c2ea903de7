"""Errors as OpenAI's clients expect them: a status, and one object that says what is wrong with which field."""

from typing import Any

from starlette.responses import JSONResponse

from pannier.client import ClientError, RequestFailed, TimedOut, Unreachable

RETRY_AFTER_S = 1
"""When a client that was turned away for want of room, or of a gateway, may come back."""

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_STATUS_OF = {"invalid": 400, "overloaded": 429, "unavailable": 503, "timeout": 408, "internal": 500}


class ApiError(Exception):
    """Raised when a request gets an error instead of an answer.

    Attributes:
        status: of HTTP.
        message: one sentence.
        param: the field that is wrong, if it is one field.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What is sent, as the answer or in the middle of a stream."""
        kind = _TYPES.get(self.status, "APIError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def invalid(param: str | None, message: str) -> ApiError:
    """The client's mistake."""
    return ApiError(400, message, param, "invalid_value")


def from_client(error: ClientError) -> ApiError:
    """What the gateway, or the way to it, has to say."""
    match error:
        case RequestFailed(code="invalid", param="model"):
            return ApiError(404, error.reason, "model", "model_not_found")
        case RequestFailed():
            return ApiError(_STATUS_OF.get(error.code, 500), error.reason, error.param, error.code)
        case Unreachable():
            return ApiError(503, "the gateway can't be reached; try again later", code="unavailable")
        case TimedOut():
            return ApiError(408, str(error), code="timeout")
    return ApiError(500, str(error), code="internal")
