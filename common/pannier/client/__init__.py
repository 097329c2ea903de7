"""Talk to a running Pannier: complete and chat, whole or streamed, blocking or asyncio. Imports no torch.

::

    with Client() as client:
        for chunk in client.stream("In the beginning", max_tokens=64):
            print(chunk.text, end="", flush=True)
"""

from pannier.client.async_client import AsyncClient, AsyncStream
from pannier.client.client import DEFAULT_ENDPOINT, NO_EMBEDDINGS, Client, Stream
from pannier.client.completion import Completion, CompletionOutput
from pannier.client.errors import (
    ClientClosed,
    ClientError,
    NotServed,
    ProtocolMismatch,
    ReaderTooSlow,
    RequestFailed,
    TimedOut,
    Unreachable,
)
from pannier.client.params import Options, Params, Prompt, Turn
from pannier.wire.messages import ChatMessage, Delta, Guide, GuideKind, TokenLogprob, TopLogprob, Usage

__all__ = [
    "DEFAULT_ENDPOINT",
    "NO_EMBEDDINGS",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Client",
    "ClientClosed",
    "ClientError",
    "Completion",
    "CompletionOutput",
    "Delta",
    "Guide",
    "GuideKind",
    "NotServed",
    "Options",
    "Params",
    "Prompt",
    "ProtocolMismatch",
    "ReaderTooSlow",
    "RequestFailed",
    "Stream",
    "TimedOut",
    "TokenLogprob",
    "TopLogprob",
    "Turn",
    "Unreachable",
    "Usage",
]
