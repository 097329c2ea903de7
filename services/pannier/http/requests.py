"""What clients may send: OpenAI's fields, and those of vLLM that mean something here.

A field that would change the answer and is not served is refused, never ignored. Those of `_Harmless` change nothing.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, from_json

from pannier.http.errors import ApiError, invalid

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

R = TypeVar("R", bound=BaseModel)
MAX_SHOWN = 200
"""Characters of what a client has sent that an error shows."""


class _Strict(BaseModel):
    """No surplus fields, and no number from a string."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """What a stream says beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Strict):
    """A schema with OpenAI's fields around it."""

    schema_: dict[str, Any] | bool = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What shape the text has."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Strict):
    """The same as vLLM says it; one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Harmless(_Strict):
    """Fields of OpenAI's that never change what this server answers."""

    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None
    request_id: Any = None


class _Unserved(_Strict):
    """Fields that would change it; only values that mean "no" are allowed. The names are those of `NO`."""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    suffix: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    skip_special_tokens: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None


NO: dict[str, tuple[Any, ...]] = dict.fromkeys(_Unserved.model_fields, (None,)) | {
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "skip_special_tokens": (None, True),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}


class SamplingFields(_Harmless, _Unserved):
    """What completions and chats have in common. None is as if the field were not there."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


def _read_prompt(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """All forms in one sentence, instead of how each of them doesn't fit."""
    try:
        return read(given)
    except ValidationError as error:
        legal = "it must be a text, a list of texts, a list of token ids, or a list of such lists"
        raise PydanticCustomError("prompt", legal) from error


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_read_prompt)]
    logprobs: int | None = None
    echo: bool | None = None


class TextPart(_Strict):
    """A part of a message that is text; others are not served."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """Of all its parts."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(_Strict):
    """`POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def read(kind: type[R], body: bytes) -> R:
    """A request's body. Raises `ApiError` naming the field, its value and what is legal."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _first(error, body) from error
    if isinstance(request, SamplingFields):
        _refuse_unserved(request)
    return request


def shown(given: Any) -> str:
    """What a client has sent, or its beginning."""
    text = repr(given)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _first(error: ValidationError, body: bytes) -> ApiError:
    """The first thing that is wrong, in one sentence; what was sent is shown in part."""
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    sent = from_json(body)
    path = _path(first, sent)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is no parameter that this server knows", path, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", path, "missing_required_parameter")
    legal = dict.fromkeys(each["msg"][0].lower() + each["msg"][1:] for each in errors if _path(each, sent) == path)
    return invalid(path or None, f"{path or 'the body'} is {shown(first['input'])}: {', or '.join(legal)}")


def _path(error: "ErrorDetails", sent: Any) -> str:
    """Where in what was sent the error is: pydantic names, between fields, also the types that a field may have."""
    path = ""
    for number, part in enumerate(error["loc"]):
        is_last = number == len(error["loc"]) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            sent = sent[part]
        elif isinstance(sent, dict) and (part in sent or (is_last and error["type"] == "missing")):
            path += f".{part}"
            sent = sent.get(part)
    return path.lstrip(".")


def _refuse_unserved(request: SamplingFields) -> None:
    for name, harmless in NO.items():
        if getattr(request, name) not in harmless:
            raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_parameter")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
