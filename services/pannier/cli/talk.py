"""`pannier complete` and `pannier chat`: text from a running stack."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.options import (
    DEFAULT_ENDPOINT,
    Endpoint,
    Insecure,
    Keys,
    MaxTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from pannier.client import ChatMessage, Client, Completion, CompletionOutput, Delta, Params, TokenLogprob

INTERRUPTED = 130


def complete(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    n: Annotated[int, typer.Option("--n", help="Outputs of the one prompt; several are shown when all are done.")] = 1,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="Show each token's log-probability and the N most likely.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end.")] = False,
    model: Model = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    insecure: Insecure = False,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole completion as one JSON object.")] = False,
) -> None:
    """Continue a text, as it comes."""
    from pannier.client import Client
    from pannier.client.completion import join

    params: Params = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "n": n,
        "seed": seed,
        "stop": stop or [],
        "logprobs": logprobs,
        "ignore_eos": ignore_eos,
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        with (
            Client(endpoint, insecure=insecure, keys=keys) as client,
            client.stream(text, model=model, **params) as chunks,
        ):
            completion = join(list(_printed(chunks) if n == 1 and not as_json else chunks))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(_as_dict(completion)))
        return
    for number, output in enumerate(completion.outputs, 1):
        if n > 1:
            print(f"[{number}] {output.text}")
        for token in output.logprobs:
            print(_logprob_line(token))


def chat(
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    model: Model = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    insecure: Insecure = False,
    keys: Keys = None,
) -> None:
    """Talk to the model, turn by turn. Ctrl-C cuts an answer short, Ctrl-D ends."""
    from pannier.client import ChatMessage, Client

    params: Params = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or [],
    }
    turns = [ChatMessage("system", system)] if system is not None else []
    with Client(endpoint, insecure=insecure, keys=keys) as client:
        while (said := _read_turn()) is not None:
            turns.append(ChatMessage("user", said))
            turns.append(ChatMessage("assistant", _answer(client, turns, model, params)))


def _read_turn() -> str | None:
    """What the person says next; None when the conversation is over."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives input() its line editing
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        if said.strip():
            return said


def _answer(client: "Client", turns: "Iterable[ChatMessage]", model: str | None, params: "Params") -> str:
    """The model's turn, printed as it comes; what there is of it when it is cut short."""
    texts: list[str] = []
    try:
        with client.chat_stream(turns, model=model, **params) as chunks:
            texts.extend(chunk.text for chunk in _printed(chunks))
    except KeyboardInterrupt:
        print()
    return "".join(texts)


def _printed(chunks: "Iterable[Delta]") -> "Iterable[Delta]":
    """The same chunks, each printed as it passes."""
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        yield chunk
    print()


def _logprob_line(token: "TokenLogprob") -> str:
    top = "  ".join(f"{other.token}:{other.logprob:.4f}" for other in token.top)
    return f"{token.token:>8} {token.logprob:>10.4f}  {top}"


def _as_dict(completion: "Completion") -> dict[str, object]:
    """The first output as it is, and all of them when there are several."""
    outputs = [_output_as_dict(output) for output in completion.outputs]
    return {
        **outputs[0],
        **({"outputs": outputs} if len(outputs) > 1 else {}),
        "usage": {name: getattr(completion.usage, name) for name in completion.usage.__struct_fields__},
    }


def _output_as_dict(output: "CompletionOutput") -> dict[str, object]:
    return {
        "text": output.text,
        "tokens": output.tokens,
        "logprobs": [
            {
                "token": token.token,
                "logprob": token.logprob,
                "top": [{"token": other.token, "logprob": other.logprob} for other in token.top],
            }
            for token in output.logprobs
        ],
        "finish_reason": output.finish_reason,
    }
