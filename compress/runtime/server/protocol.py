"""What a request may say, field by field: OpenAI's chat and text completions.

A field that would change the answer and is not served is refused, not ignored.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from compress.runtime.server.errors import Refusal

STOPS = 4
"""Most stop strings of a request, as at OpenAI."""
STOP_CHARACTERS = 256
"""Most of each, since every token is compared with them."""


def _stops(given: Any) -> list[str]:
    """The stop strings that `given` is: none, one, or a list."""
    strings = [] if given is None else given if isinstance(given, list) else [given]
    found = f"{len(strings)} of them" if len(strings) > STOPS else ""
    for string in strings:
        if not isinstance(string, str):
            found = type(string).__name__
        elif not 1 <= len(string) <= STOP_CHARACTERS:
            found = f"one of {len(string)} characters"
    if found:
        raise ValueError(
            f"found {found}; wanted up to {STOPS} strings of 1 to {STOP_CHARACTERS} characters"
        )
    return strings


def _prompt(given: Any) -> str | list[int]:
    """A text, or token ids."""
    if isinstance(given, str):
        return given
    found = _short(given)
    if isinstance(given, list):
        wrong = [token for token in given if type(token) is not int or token < 0]
        if not wrong:
            return given
        found = f"a list with {_short(wrong[0])}"
    raise ValueError(f"found {found}; wanted a text or a list of token ids, one prompt a request")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


# Values of a field that ask for nothing more than is done anyway.
Off = Literal[False] | None
Zero = Literal[0] | None
One = Literal[1] | None
NOT_SERVED = (
    *("n", "best_of", "echo", "suffix", "logprobs", "top_logprobs", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "tools", "tool_choice", "response_format"),
)
"""Fields that may say no more than this."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Fields):
    """include_usage: count the tokens in a last event of their own."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Common(_Fields):
    """The fields of both kinds; temperature, top_k and top_p default to the checkpoint's own."""

    model: str
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None

    n: One = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=0)] = None
    # Of no effect on what is written.
    user: str | None = None
    metadata: dict[str, str] | None = None

    def new_tokens(self) -> int | None:
        """How many tokens are asked for, at most; None: no wish."""
        return self.max_tokens


class TextPart(_Fields):
    """A part of a message; images and sound are not served."""

    type: Literal["text"]
    text: str


def _content(given: Any, turn: ValidationInfo) -> str | list[TextPart]:
    """What a turn says: a text, or parts that are texts; null, of an assistant, is an empty one."""
    if given is None and turn.data.get("role") == "assistant":
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        found = "null" if given is None else _short(given)
        raise ValueError(f"found {found}; wanted a text, or parts of type text")
    kinds = [part.get("type") if isinstance(part, dict) else part for part in given]
    other = next((kind for kind in kinds if kind != "text"), "text")
    if other != "text":
        raise ValueError(f"a part of type {_short(other)} is not served; wanted text")
    return [TextPart.model_validate(part) for part in given]


class Message(_Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], BeforeValidator(_content)]
    name: str | None = None
    # Empty in answers, which clients send back as the turns of the next request.
    refusal: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it; a developer speaks as the system."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Chat(Common):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: Off = None
    top_logprobs: Zero = None
    tools: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: bool | None = None

    def new_tokens(self) -> int | None:
        """How many tokens are asked for, at most; the older name counts too."""
        return self.max_completion_tokens or self.max_tokens


class Completion(Common):
    """The body of POST /v1/completions: one prompt, as text or as token ids."""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    best_of: One = None
    echo: Off = None
    logprobs: None = None
    suffix: None = None


Body = TypeVar("Body", bound=Common)


def read(kind: type[Body], body: bytes) -> Body:
    """The request in `body`; raises Refusal for what is no JSON, or says what is not served."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise Refusal(400, f"the body is no JSON: {first['ctx']['error']}") from error
        names = [str(part) for part in first["loc"] if str(part) in kind.model_fields]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")  # of what is raised above
        message = f"{where}: {reason}" if where else reason
        if first["loc"] and first["loc"][0] in NOT_SERVED:
            message = f"{where}: {_short(first['input'])} is not served; leave it out"
        raise Refusal(400, message, param=names[0] if names else where or None) from error
