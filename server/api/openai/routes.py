"""The routes of OpenAI's API for models, texts, chats, embeddings and rankings, and Triton's `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request, Response

from lathe.core.errors import GrammarError, LatheError
from lathe.core.language.generation.request import GenerationRequest
from lathe.core.language.sampling import SamplingSettings, random_seed
from lathe.core.language.transcriber import seconds_of
from lathe.server.access.authority import Caller
from lathe.server.access.scopes import Scope
from lathe.server.api.inference.asgi import client_address, client_id
from lathe.server.api.inference.body_reader import BodyReader
from lathe.server.api.openai.chat import ChatAnswer
from lathe.server.api.openai.completions import CompletionAnswer
from lathe.server.api.openai.embeddings import EmbeddingAnswer
from lathe.server.api.openai.generate import GenerateAnswer
from lathe.server.api.openai.rerank import RerankAnswer
from lathe.server.api.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    Message,
    RerankRequest,
    TextRequest,
    TextSettings,
    TranscriptionRequest,
)
from lathe.server.api.openai.tool_calls import BEGIN
from lathe.server.api.openai.transcription import TranscriptionAnswer
from lathe.server.api.openai.transcription_form import MOST_BYTES, asked_fields, read_sound, receive_form
from lathe.server.backends.language import TextModel
from lathe.server.errors import BadRequest, NotFound, ServerError
from lathe.server.generation.statistics import TextBook
from lathe.server.generation.texts import Texts, as_server_error
from lathe.server.generation.transcription import Transcription
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable

if TYPE_CHECKING:
    from lathe.core.language.constraint import Constraint
    from lathe.core.language.generation.generator import TextGenerator
    from lathe.server.telemetry.text_trace import TextTrace  # opentelemetry is installed by an extra

_MOST_PROMPTS = 64
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts; with `stream` as server-sent events, the last of which is `[DONE]`.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
_GENERATED: dict[bool, dict[int | str, dict[str, Any]]] = {
    False: {200: {"description": "The text.", "content": {"application/json": {"schema": {"type": "object"}}}}},
    True: {200: {"description": "An event for each part of the text.", "content": {"text/event-stream": {}}}},
}
_TRANSCRIPT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The text; with `stream` as server-sent events, the last of which is `transcript.text.done`.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/plain": {}, "text/event-stream": {}},
    }
}
_EMBEDDINGS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The embeddings.", "content": {"application/json": {"schema": {"type": "object"}}}}
}
_RANKING: dict[int | str, dict[str, Any]] = {
    200: {"description": "The documents, the best first.",
          "content": {"application/json": {"schema": {"type": "object"}}}}
}  # fmt: skip


def openai_routes(plane: DataPlane, book: TextBook, reading: BodyReader) -> APIRouter:
    """The routes below /v1. `reading` has the memory and the threads for files."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])
    _add_models(routes, plane)
    service = _Service(plane, book)

    @routes.post("/chat/completions", responses=_EVENTS, response_class=Response)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        """Continue a conversation, by the chat template of the model."""
        return await service.chat(request, asked)

    @routes.post("/completions", responses=_EVENTS, response_class=Response)
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        """Continue texts."""
        return await service.complete(request, asked)

    @routes.post("/embeddings", responses=_EMBEDDINGS, response_class=Response)
    async def embed(request: Request, asked: EmbeddingRequest) -> Response:
        """Return the embeddings of texts."""
        servable, client = _route(plane, request, *_model_and_version(asked.model))
        return EmbeddingAnswer(plane, servable, client, asked)

    @routes.post("/rerank", responses=_RANKING, response_class=Response)
    async def rerank(request: Request, asked: RerankRequest) -> Response:
        """Order documents by their relevance to a query."""
        servable, client = _route(plane, request, *_model_and_version(asked.model))
        return RerankAnswer(plane, servable, client, asked)

    @routes.post(
        "/audio/transcriptions", responses=_TRANSCRIPT, response_class=Response, openapi_extra=_transcription_body()
    )
    async def transcribe(request: Request) -> Response:
        """Return the text of a sound."""
        return await service.transcribe(request, reading)

    return routes


def generate_routes(plane: DataPlane, book: TextBook) -> APIRouter:
    """The routes of Triton's extension `generate`."""
    routes = APIRouter(tags=["Texts"])
    service = _Service(plane, book)
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        for name, streams in (("generate", False), ("generate_stream", True)):
            _add_generate(routes, service, f"{path}/{name}", streams)
    return routes


def _add_generate(routes: APIRouter, service: _Service, path: str, streams: bool) -> None:
    @routes.post(path, responses=_GENERATED[streams], response_class=Response, name=path)
    async def generate(request: Request, asked: GenerateRequest, model: str, version: str = "") -> Response:
        """Continue a text."""
        return await service.generate(request, asked, model, version, streams)


def _add_models(routes: APIRouter, plane: DataPlane) -> None:
    @routes.get("/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """List the models that generate texts, are in memory, and that the caller may run or read."""
        caller: Caller = request.state.caller
        names = sorted({each.ref.name for each in _text_servables(plane.registry.servables())})
        found = [(name, _live(plane, name)) for name in names if _may_see(caller, name)]
        entries = [entry for name, each in found if each is not None for entry in _model_entries(name, each)]
        return {"object": "list", "data": entries}

    @routes.get("/models/{model}")
    async def get_model(request: Request, model: str) -> dict[str, Any]:
        """Return one of these models."""
        name, version = _model_and_version(model)
        request.state.caller.check((Scope.READ, Scope.INFER), name)
        return _model_entry(model, _check_kind(plane.resolve(name, version)))

    @routes.get("/models/{model}/{adapter}")
    async def get_adapter(request: Request, model: str, adapter: str) -> dict[str, Any]:
        """Return an adapter of one of these models."""
        name, version = _model_and_version(model)
        request.state.caller.check((Scope.READ, Scope.INFER), name)
        servable = _check_kind(plane.resolve(name, version))
        _adapter_number(servable, adapter)
        return _adapter_entry(model, adapter, servable)


class _Service:
    """Finds the model of a request, makes its tokens, and returns the answer."""

    def __init__(self, plane: DataPlane, book: TextBook) -> None:
        self._plane = plane
        self._book = book

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        servable, client, adapter = self._find(request, asked)
        generator = _generator(servable)
        tools = [tool.model_dump() for tool in asked.tools or ()] if asked.tool_choice != "none" else []
        messages = [_plain(message) for message in asked.messages]
        more = asked.chat_template_kwargs or {}
        tokens = await _on_thread(lambda: generator.chat_tokens(messages, tools, **more))
        if asked.top_logprobs is not None and not asked.logprobs:
            raise BadRequest("top_logprobs: expected logprobs to be true with it")
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        limit = asked.max_completion_tokens or asked.max_tokens
        texts = await self._texts(request, servable, client, adapter, asked, [tokens], limit, logprobs)
        return ChatAnswer(
            texts,
            asked.model,
            count=asked.choice_count,
            streams=bool(asked.stream),
            with_usage=asked.wants_usage,
            token_bytes=generator.token_bytes if asked.logprobs else None,
            with_tools=asked.must_call or (bool(tools) and BEGIN in generator.chat_template.source),
        )

    async def complete(self, request: Request, asked: CompletionRequest) -> Response:
        servable, client, adapter = self._find(request, asked)
        generator = _generator(servable)
        if asked.best_of not in (None, asked.choice_count):
            raise BadRequest(f"best_of: expected the value of n, {asked.choice_count}, got {asked.best_of}")
        if asked.echo and asked.logprobs is not None:
            raise BadRequest("echo: expected no logprobs with it: those of prompts are not computed")
        prompts = _prompts(asked.prompt)
        if not 1 <= len(prompts) <= _MOST_PROMPTS:
            raise BadRequest(f"prompt: expected 1 to {_MOST_PROMPTS} prompts, got {len(prompts)}")
        if (count := len(prompts) * asked.choice_count) > _MOST_PROMPTS:
            raise BadRequest(f"n: expected at most {_MOST_PROMPTS} texts for all prompts, got {count}")
        encoded = await _on_thread(lambda: [_encode(generator, prompt) for prompt in prompts])
        texts = await self._texts(request, servable, client, adapter, asked, encoded, asked.max_tokens, asked.logprobs)
        return CompletionAnswer(
            texts,
            asked.model,
            count=asked.choice_count,
            echoes=[_echo(generator, prompt) if asked.echo else "" for prompt in prompts],
            streams=bool(asked.stream),
            with_usage=asked.wants_usage,
            token_bytes=generator.token_bytes if asked.logprobs is not None else None,
        )

    async def generate(
        self, request: Request, asked: GenerateRequest, model: str, version: str, streams: bool
    ) -> Response:
        servable, client = _route(self._plane, request, model, version)
        generator, settings = _generator(_check_kind(servable)), asked.settings
        adapter = _adapter_number(servable, asked.adapter_name)
        self._plane.charge(servable, client, 1)
        prompt = await _on_thread(lambda: generator.prompt_tokens(asked.text_input))
        ends = frozenset() if settings.ignore_eos else generator.end_tokens
        (sampling,) = settings.sampling(None)
        wanted = GenerationRequest(
            prompt,
            sampling,
            settings.max_tokens,
            settings.stops,
            ends,
            priority=_priority(servable, settings),
            client=client,
            adapter=adapter,
        )
        texts = self._begin(request, servable, client, [prompt], [wanted])
        prefix = "" if asked.exclude_input_in_output else asked.text_input
        return GenerateAnswer(texts, asked.id, prefix, streams=streams)

    async def transcribe(self, request: Request, reading: BodyReader) -> Response:
        with reading.ledger.claim(client_id(request.scope)) as claim:
            form = await receive_form(request, claim, reading.readers, min(MOST_BYTES, reading.most_bytes))
            asked = asked_fields(form)
            servable, client = _route(self._plane, request, *_model_and_version(asked.model))
            transcriber = _generator(_check_kind(servable)).transcriber
            if transcriber is None:
                raise BadRequest(f"model: expected one that transcribes sound, got {servable.ref.name!r}")
            self._plane.charge(servable, client, 1)
            self._plane.charge_tokens(servable, client, 0)
            sound = await read_sound(form, claim, reading.readers, client)
        seed = random_seed() if asked.seed is None else asked.seed
        texts = Transcription(
            servable,
            list(transcriber.pieces(sound)),
            self._book.of(servable.ref),
            self._trace(request, servable),
            partial(self._plane.spend_tokens, client),
            language=asked.language,
            prompt=asked.prompt,
            sampling=SamplingSettings(temperature=asked.temperature, seed=seed),
            client=client,
        )
        return TranscriptionAnswer(texts, asked.response_format, seconds_of(sound), streams=asked.stream)

    def _find(self, request: Request, asked: TextRequest) -> tuple[Servable, str, int]:
        """The servable of the request's model, the client, and the adapter's number. Raises as `DataPlane.route`."""
        model, _, adapter = asked.model.partition("/")
        servable, client = _route(self._plane, request, *_model_and_version(model))
        return _check_kind(servable), client, _adapter_number(servable, adapter)

    async def _texts(
        self,
        request: Request,
        servable: Servable,
        client: str,
        adapter: int,
        asked: TextRequest,
        prompts: Sequence[tuple[int, ...]],
        limit: int | None,
        logprobs: int | None,
    ) -> Texts:
        self._plane.charge(servable, client, len(prompts) * asked.choice_count)
        generator = _generator(servable)
        prompts = [asked.truncated(prompt, generator.engine.context) for prompt in prompts]
        constraint = await _constraint(generator, asked)
        # Where a grammar ends, only an end token may follow.
        ends = frozenset() if asked.ignore_eos and constraint is None else generator.end_tokens
        requests = [
            GenerationRequest(
                prompt,
                sampling,
                limit,
                asked.stops,
                ends,
                priority=_priority(servable, asked),
                client=client,
                constraint=None if constraint is None else constraint.copy(),
                adapter=adapter,
            )
            for prompt in prompts
            for sampling in asked.sampling(logprobs, asked.choice_count)
        ]
        return self._begin(request, servable, client, prompts, requests)

    def _begin(
        self,
        request: Request,
        servable: Servable,
        client: str,
        prompts: Sequence[tuple[int, ...]],
        requests: Sequence[GenerationRequest],
    ) -> Texts:
        """The texts of a request, traced if the server traces. Charges the client's quota for the prompts first."""
        self._plane.charge_tokens(servable, client, sum(map(len, prompts)))
        trace, spend = self._trace(request, servable), partial(self._plane.spend_tokens, client)
        return Texts(servable, requests, self._book.of(servable.ref), trace, spend)

    def _trace(self, request: Request, servable: Servable) -> TextTrace | None:
        tracing, traceparent = self._plane.tracing, request.headers.get("traceparent", "")
        return tracing.watch_texts(servable.ref, traceparent) if tracing is not None else None


def _transcription_body() -> dict[str, Any]:
    """The form in the description of the API."""
    schema = TranscriptionRequest.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _route(plane: DataPlane, request: Request, model: str, version: str) -> tuple[Servable, str]:
    """The servable of the model in a request, and the client. Raises as `DataPlane.route`."""
    authorization, address = request.headers.get("authorization", ""), client_address(request.scope)
    return plane.route(model, version, key="", authorization=authorization, address=address)


def _priority(servable: Servable, asked: TextSettings) -> int:
    """The priority in the engine, where more is higher: levels count from 1, the highest."""
    return -servable.batcher.policy.level(asked.priority or 0)


def _text_servables(servables: Iterable[Servable]) -> Iterable[Servable]:
    return (each for each in servables if isinstance(each.model, TextModel))


def _live(plane: DataPlane, name: str) -> Servable | None:
    """The live version of a model; None if it is not in memory, or no language model."""
    try:
        found = plane.resolve(name)
    except ServerError:
        return None
    return found if isinstance(found.model, TextModel) else None


def _may_see(caller: Caller, model: str) -> bool:
    return caller.is_allowed(Scope.READ, model) or caller.is_allowed(Scope.INFER, model)


def _model_entry(name: str, servable: Servable) -> dict[str, Any]:
    assert isinstance(servable.model, TextModel)
    created, context = servable.model.created, servable.model.generator.engine.context
    return {"id": name, "object": "model", "created": created, "owned_by": "lathe", "max_model_len": context}


def _model_entries(name: str, servable: Servable) -> Iterable[dict[str, Any]]:
    """The entries of a model and of its adapters."""
    yield _model_entry(name, servable)
    for adapter in _generator(servable).adapters:
        yield _adapter_entry(name, adapter, servable)


def _adapter_entry(model: str, adapter: str, servable: Servable) -> dict[str, Any]:
    return {**_model_entry(f"{model}/{adapter}", servable), "root": adapter, "parent": model}


def _adapter_number(servable: Servable, name: str) -> int:
    """The number of an adapter, 0 for no name. Raises NotFound if the model has no such adapter."""
    if not name:
        return 0
    known = _generator(servable).adapters
    if name not in known:
        listed = f"expected one of {', '.join(known)}" if known else "the model has none"
        raise NotFound(f"adapter {name[:80]!r} of model {servable.ref.name!r} does not exist: {listed}")
    return known[name]


def _model_and_version(name: str) -> tuple[str, str]:
    model, _, version = name.partition(":")
    return model, version


def _check_kind(servable: Servable) -> Servable:
    if not isinstance(servable.model, TextModel):
        raise BadRequest(f"model: expected a language model, got {servable.ref.name!r}, which is inferred by tensors")
    return servable


def _generator(servable: Servable) -> TextGenerator:
    assert isinstance(servable.model, TextModel)
    return servable.model.generator


async def _on_thread(work: Callable[[], Any]) -> Any:
    """Run `work` on a thread: templates and tokenizers take long for long texts. Raises ServerError."""
    try:
        return await asyncio.to_thread(work)
    except LatheError as error:
        raise as_server_error(error) from error


async def _constraint(generator: TextGenerator, asked: TextRequest) -> Constraint | None:
    """The constraint at the start of the texts; None if they may be any. Raises BadRequest for a bad grammar."""
    named = asked.named_grammar()
    if named is None:
        return None
    field, grammar = named
    try:
        return await asyncio.to_thread(lambda: generator.grammars.constraint(grammar))
    except GrammarError as error:
        raise BadRequest(f"{field}: {error}") from error
    except LatheError as error:
        raise as_server_error(error) from error


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: content as text, arguments of calls as objects."""
    found = message.model_dump(exclude_none=True)
    content = message.content
    found["content"] = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    for call in found.get("tool_calls", ()):
        function = call["function"]
        try:
            function["arguments"] = orjson.loads(function["arguments"] or b"{}")
        except orjson.JSONDecodeError:
            raise BadRequest("messages: tool_calls: expected arguments that are JSON") from None
    return found


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion, each a text or tokens."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def _encode(generator: TextGenerator, prompt: str | list[int]) -> tuple[int, ...]:
    return generator.prompt_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)


def _echo(generator: TextGenerator, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else generator.tokenizer.decode(prompt)
