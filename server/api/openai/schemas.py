"""Request bodies of OpenAI's API and of Triton's `generate`.

Unknown fields are errors; fields without a meaning here are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from lathe.core.language.constraint import Grammar
from lathe.core.language.sampling import SamplingSettings, random_seed, seed_of_choice
from lathe.server.errors import BadRequest

MOST_CHOICES = 16
MOST_TEXTS = 2048  # of a request for embeddings, as in OpenAI's API
_MOST_STOPS = 16
_MOST_LOGPROBS = 20

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Token = Annotated[int, Field(ge=0, strict=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="Send a last event with the numbers of tokens.")
    include_obfuscation: bool = Field(default=False, description="Ignored.")


class NamedSchema(_Body):
    """A JSON schema."""

    name: str | None = None
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="Ignored: texts always match the schema.")


class ResponseFormat(_Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(default=None, description="With the type `json_schema`.")

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the text; None for any text. Raises BadRequest for a type without its schema."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_object")
        if self.json_schema is None:
            raise BadRequest("response_format: expected json_schema with the type json_schema")
        return Grammar("json_schema", orjson.dumps(self.json_schema.content).decode())


class TextSettings(_Body):
    """How texts are generated. OpenAI's API lacks `top_k`, `min_p`, `repetition_penalty` and `ignore_eos`."""

    max_tokens: int | None = Field(default=None, ge=1, description="At most this many tokens for each text.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0: the likeliest token. Default: 1.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="From the fewest tokens of this probability.")
    top_k: int | None = Field(default=None, ge=0, description="From this many of the likeliest tokens; 0: all.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="From tokens of this share of the best one's.")
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = Field(
        default=None, description="A text ends before the first of these strings."
    )
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        Field(default=None, description="Numbers that are added to the logits of tokens.")
    )
    seed: int | None = Field(default=None, description="The same seed gives the same texts, whatever else runs.")
    ignore_eos: bool = Field(default=False, description="Do not end at the model's end tokens.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, logprobs: int | None, count: int = 1) -> list[SamplingSettings]:
        """Return the settings of each of `count` texts; they differ in the seed."""
        seed = random_seed() if self.seed is None else self.seed
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        return [
            SamplingSettings(
                temperature=_default(self.temperature, 1.0),
                top_k=_default(self.top_k, 0),
                top_p=_default(self.top_p, 1.0),
                min_p=_default(self.min_p, 0.0),
                repetition_penalty=_default(self.repetition_penalty, 1.0),
                presence_penalty=_default(self.presence_penalty, 0.0),
                frequency_penalty=_default(self.frequency_penalty, 0.0),
                bias=bias,
                seed=seed_of_choice(seed, index),
                logprobs=logprobs,
            )
            for index in range(count)
        ]


class TextRequest(TextSettings):
    """The fields that chats and completions share."""

    model: str = Field(
        description="`NAME`, or `NAME:VERSION` with a number or an alias; for an adapter with `/ADAPTER` after it.",
        max_length=300,
    )
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="The number of texts.")
    response_format: ResponseFormat | None = None
    stream: bool | None = Field(default=None, description="Send the text as server-sent events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="Ignored.")
    metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
    store: bool | None = Field(default=None, description="Ignored.")
    service_tier: str | None = Field(default=None, description="Ignored.")
    safety_identifier: str | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(default=None, description="Ignored: prompts are found by their content.")

    @property
    def choice_count(self) -> int:
        """The number of texts for each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class GenerateRequest(TextSettings):
    """A text to continue, as Triton's backends for language models take it: settings beside the text, or inside."""

    text_input: str = Field(description="The text to continue.")
    id: str | None = Field(default=None, max_length=256, description="Returned with the text.")
    exclude_input_in_output: bool = Field(default=True, description="Return only what follows the text.")
    stream: bool | None = Field(default=None, description="Ignored: the route decides.")
    adapter: str | None = Field(default=None, description="Name of the adapter. Default: none.", max_length=100)
    parameters: GenerateParameters | None = None

    @property
    def adapter_name(self) -> str:
        """The adapter that `parameters` or the request names; empty for none."""
        return (self.parameters and self.parameters.adapter) or self.adapter or ""

    @property
    def settings(self) -> TextSettings:
        """The settings beside the text, with those of `parameters` in their place where both are given."""
        inside = (
            self.parameters.model_dump(exclude_unset=True, exclude={"stream", "adapter"}) if self.parameters else {}
        )
        given = self.model_dump(exclude_unset=True, include=set(TextSettings.model_fields))
        return TextSettings(**{**given, **inside})


class GenerateParameters(TextSettings):
    """Settings as an object of their own."""

    adapter: str | None = Field(default=None, description="Name of the adapter. Default: none.", max_length=100)
    stream: bool | None = Field(default=None, description="Ignored: the route decides.")


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


class TextContent(_Body):
    """A part of a message."""

    type: Literal["text"] = Field(description="Only texts are supported.")
    text: str


class Function(_Body):
    """A call of a function."""

    name: str
    arguments: str = ""


class ToolCall(_Body):
    """A call of a tool in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContent] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class FunctionTool(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: dict[str, Any] = Field(description="Its `name`, `description` and `parameters`, a JSON schema.")


class ChatRequest(TextRequest):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, description="At most this many tokens.")
    logprobs: bool | None = Field(default=None, description="Return the log-probabilities of the tokens.")
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS, description="Alternatives per token.")
    tools: list[FunctionTool] | None = Field(default=None, description="Tools, which the model's template shows it.")
    tool_choice: Literal["none", "auto"] | None = Field(default=None, description="Other choices are not supported.")
    parallel_tool_calls: bool | None = Field(default=None, description="Ignored.")
    reasoning_effort: str | None = Field(default=None, description="Ignored.")
    verbosity: str | None = Field(default=None, description="Ignored.")
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Further names of the template.")


class EmbeddingRequest(_Body):
    """Texts whose embeddings are asked for."""

    model: str = Field(description="`NAME`, or `NAME:VERSION` with a number or an alias.", max_length=200)
    input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)] = Field(
        description="A text, or up to 2,048 texts. Tokens are not supported."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64`: the bytes of float32 numbers, little-endian. Default: `float`."
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Return the first numbers only, scaled to the length 1."
    )
    user: str | None = Field(default=None, description="Ignored.")

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class CompletionRequest(TextRequest):
    """A text to continue."""

    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(description="Texts, or their tokens.")
    max_tokens: int | None = Field(default=16, ge=1, description="At most this many tokens for each text.")
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS, description="Alternatives per token.")
    echo: bool = Field(default=False, description="Return the prompt before the text.")
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="Only the value of `n` is supported.")
    suffix: None = Field(default=None, description="Not supported.")
