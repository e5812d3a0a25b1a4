"""Request bodies of OpenAI's API and of Triton's `generate`.

Unknown fields are errors; fields without a meaning here are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from lathe.core.language.sampling import SamplingSettings, random_seed, seed_of_choice
from lathe.server.api.openai.body import Body
from lathe.server.api.openai.constrained_output import ConstrainedOutput, NamedGrammar
from lathe.server.api.openai.tool_grammar import tool_grammar
from lathe.server.errors import BadRequest

MOST_CHOICES = 16
MOST_TEXTS = 2048  # of a request for embeddings, as in OpenAI's API
_MOST_STOPS = 16
_MOST_LOGPROBS = 20

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Token = Annotated[int, Field(ge=0, strict=True)]
MostTokens: TypeAlias = Literal[-1] | Annotated[int, Field(ge=1, strict=True)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="Send a last event with the numbers of tokens.")
    include_obfuscation: bool = Field(default=False, description="Ignored.")


class TextSettings(Body):
    """How texts are generated. OpenAI lacks `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and `priority`."""

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
    priority: int | None = Field(
        default=None, ge=0, description="1 is the highest of the levels in the model's `config.toml`."
    )

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


class TextRequest(ConstrainedOutput, TextSettings):
    """The fields that chats and completions share."""

    model: str = Field(
        description="`NAME`, or `NAME:VERSION` with a number or an alias; for an adapter with `/ADAPTER` after it.",
        max_length=300,
    )
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="The number of texts.")
    stream: bool | None = Field(default=None, description="Send the text as server-sent events.")
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: MostTokens | None = Field(
        default=None, description="Only the last tokens of a prompt, at most this many; -1: as many as fit. As vLLM's."
    )
    user: str | None = Field(default=None, description="Ignored.")
    metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
    store: bool | None = Field(default=None, description="Ignored.")
    service_tier: str | None = Field(default=None, description="Ignored.")
    safety_identifier: str | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(default=None, description="Ignored: prompts are found by their content.")

    def truncated(self, prompt: tuple[int, ...], context: int) -> tuple[int, ...]:
        """The tokens of a prompt that are used; with -1 one token of the model's context is left for the text."""
        most = context - 1 if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return prompt if most is None else prompt[-most:]

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


class TextContent(Body):
    """A part of a message."""

    type: Literal["text"] = Field(description="Only texts are supported.")
    text: str


class Function(Body):
    """A call of a function."""

    name: str
    arguments: str = ""


class ToolCall(Body):
    """A call of a tool in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContent] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class FunctionTool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: dict[str, Any] = Field(description="Its `name`, `description` and `parameters`, a JSON schema.")


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(TextRequest):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, description="At most this many tokens.")
    logprobs: bool | None = Field(default=None, description="Return the log-probabilities of the tokens.")
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS, description="Alternatives per token.")
    tools: list[FunctionTool] | None = Field(default=None, description="Tools, which the model's template shows it.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description="`required`, or a tool: the text is a call whose arguments match the tool's schema."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: one call only, where `tool_choice` is `required`. Otherwise ignored."
    )
    reasoning_effort: str | None = Field(default=None, description="Ignored.")
    verbosity: str | None = Field(default=None, description="Ignored.")
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Further names of the template.")

    @property
    def must_call(self) -> bool:
        """Whether the text has to be a call of a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def _named_grammars(self) -> Iterator[NamedGrammar]:
        yield from super()._named_grammars()
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            yield NamedGrammar("tools", tool_grammar([self._function(self.tool_choice.function.name)], several=False))
        elif self.tool_choice == "required":
            yield NamedGrammar("tools", tool_grammar(functions, several=self.parallel_tool_calls is not False))

    def _function(self, name: str) -> dict[str, Any]:
        """The function of the tool with this name. Raises BadRequest if there is none."""
        for tool in self.tools or ():
            if tool.function.get("name") == name:
                return tool.function
        raise BadRequest(f"tool_choice: expected the name of one of the tools, got {name[:80]!r}")


class ItemRequest(Body):
    """The fields that requests for embeddings and rankings share."""

    model: str = Field(description="`NAME`, or `NAME:VERSION` with a number or an alias.", max_length=200)
    truncate_prompt_tokens: MostTokens | None = Field(
        default=None,
        description="At most this many tokens of each text, the first ones. Default, and -1: the `max_length` of the "
        "pipeline. As vLLM's.",
    )
    user: str | None = Field(default=None, description="Ignored.")


class EmbeddingRequest(ItemRequest):
    """Texts whose embeddings are asked for."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)] = Field(
        description="A text, or up to 2,048 texts. Tokens are not supported."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64`: the bytes of float32 numbers, little-endian. Default: `float`."
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Return the first numbers only, scaled to the length 1."
    )

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class TranscriptionRequest(Body):
    """The fields of a form that asks for the text of a sound."""

    model: str = Field(description="`NAME`, or `NAME:VERSION` with a number or an alias.", max_length=200)
    language: str | None = Field(
        default=None, description="Code of the language, such as `en`. Default: the likeliest."
    )
    prompt: str = Field(
        default="", description="A text as if it came before the sound, such as names.", max_length=65536
    )
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: float = Field(default=0, ge=0, le=2, description="0 takes the likeliest tokens.")
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63, description="Of the random numbers.")
    stream: bool = Field(default=False, description="Return the text in parts, as server-sent events.")


class TextDocument(Body):
    """A document as an object."""

    text: str


class RerankRequest(ItemRequest):
    """Documents that are ordered by their relevance to a query, as in the APIs of Jina, Cohere and vLLM."""

    query: str
    documents: Annotated[list[str | TextDocument], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: int | None = Field(default=None, ge=1, description="Return the best ones only. Default: all.")
    return_documents: bool = Field(default=True, description="Return the texts of the documents, too.")

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class CompletionRequest(TextRequest):
    """A text to continue."""

    prompt: str | list[str] | list[Token] | list[list[Token]] = Field(description="Texts, or their tokens.")
    max_tokens: int | None = Field(default=16, ge=1, description="At most this many tokens for each text.")
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS, description="Alternatives per token.")
    echo: bool = Field(default=False, description="Return the prompt before the text.")
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="Only the value of `n` is supported.")
    suffix: None = Field(default=None, description="Not supported.")
