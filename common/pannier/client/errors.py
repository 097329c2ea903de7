"""What can go wrong between a client and its gateway.

::

    ClientError
    ├── RequestFailed    the gateway answered that it can't serve the request
    ├── Unreachable      nothing answers at the endpoint, or what answered has gone
    ├── TimedOut         the answer took longer than the caller wanted to wait
    ├── ReaderTooSlow    the caller left too much of a stream unread
    ├── ProtocolMismatch what answers is no gateway of this version
    ├── NotServed        Pannier does nothing of the kind
    └── ClientClosed     the client was closed
"""


class ClientError(Exception):
    """Base of all; the text is one sentence for a person."""


class RequestFailed(ClientError):
    """Raised when the gateway can't serve a request.

    Attributes:
        code: "invalid", "overloaded", "unavailable", "timeout" (its deadline has passed) or "internal".
        param: the field of the request that is wrong, if it is one field.
        reason: one sentence.
    """

    def __init__(self, code: str, param: str | None, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.param = param
        self.reason = reason


class Unreachable(ClientError):
    """Raised when no gateway answers at `endpoint`, or the one that did has gone."""

    def __init__(self, endpoint: str, what: str = "nothing answers there as a gateway") -> None:
        super().__init__(f"{endpoint} can't be reached: {what}")
        self.endpoint = endpoint


class TimedOut(ClientError, TimeoutError):
    """Raised when an answer takes longer than the caller's `timeout_s`; the request is cancelled."""


class ReaderTooSlow(ClientError):
    """Raised when too many chunks of a stream are unread; the request is cancelled."""


class ProtocolMismatch(ClientError):
    """Raised when what comes from the endpoint is no answer that this version knows."""


class NotServed(ClientError):
    """Raised for what other servers do and Pannier doesn't."""


class ClientClosed(ClientError):
    """Raised for requests that are open when their client is closed, and for any made after that."""
