"""`lathe generate` and `lathe chat`: texts of a language model in this process, without a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.model import Threads, model_errors
from lathe.server.cli.terminal import console

if TYPE_CHECKING:
    from lathe.core.language.generation.generator import TextGenerator
    from lathe.core.language.sampling import SamplingSettings

LanguageModelPath = Annotated[
    Path, typer.Argument(help="A GGUF file, or a Hugging Face folder.", metavar="MODEL", exists=True, readable=True)
]
MaxTokens = Annotated[int, typer.Option(help="Generate at most this many tokens.", min=1)]
Temperature = Annotated[float, typer.Option(help="Divide the logits by this number; 0: take the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Choose from this many of the likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Choose from the fewest tokens of this probability.")]
Seed = Annotated[int | None, typer.Option(help="Give the same texts at each call. Default: a random number.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text. Repeat the option for several.", metavar="TEXT")
]


def generate(
    model: LanguageModelPath,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    threads: Threads = None,
) -> None:
    """Continue a text with a language model, and print the text while it is generated.

    \b
    Examples:
      lathe generate smollm2.gguf "The capital of France is" --max-tokens 20
      lathe generate smollm2/ - < prompt.txt
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with _opened(model, threads) as generator, model_errors():
        sampling = _sampling(temperature, top_k, top_p, seed)
        _print_text(generator, lambda: generator.prompt_tokens(text), max_tokens, sampling, stop or [])


def chat(
    model: LanguageModelPath,
    system: Annotated[str | None, typer.Option(help="Begin with this instruction.", metavar="TEXT")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Seed = None,
    threads: Threads = None,
) -> None:
    """Talk with a language model that has a chat template; an empty line or Ctrl-D ends the conversation.

    \b
    Example:
      lathe chat smollm2.gguf --system "Answer in one sentence."
    """
    messages = [{"role": "system", "content": system}] if system else []
    with _opened(model, threads) as generator, model_errors():
        sampling = _sampling(temperature, top_k, top_p, seed)
        for line in _lines():
            messages.append({"role": "user", "content": line})
            answer = _print_text(generator, lambda: generator.chat_tokens(messages), max_tokens, sampling, [])
            messages.append({"role": "assistant", "content": answer})


@contextmanager
def _opened(model: Path, threads: int | None) -> Iterator[TextGenerator]:
    """Load and compile the model; its engine ends with the block."""
    from lathe.core.language.generation.generator import TextGenerator
    from lathe.core.language.generation.options import CACHE_BYTES, GeneratorOptions

    with model_errors(), console.status(f"loading, with a cache of {format_bytes(CACHE_BYTES)}"):
        generator = TextGenerator.open(model, GeneratorOptions(threads=threads))
    with closing(generator):
        yield generator


def _sampling(temperature: float, top_k: int, top_p: float, seed: int | None) -> SamplingSettings:
    from lathe.core.language.sampling import SamplingSettings, random_seed

    return SamplingSettings(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=random_seed() if seed is None else seed
    )


def _print_text(
    generator: TextGenerator,
    tokens: Callable[[], tuple[int, ...]],
    max_tokens: int,
    sampling: SamplingSettings,
    stops: list[str],
) -> str:
    """Print a text while it is generated, and return it."""
    from lathe.core.language.generation.request import GenerationRequest

    request = GenerationRequest(tokens(), sampling, max_tokens, tuple(stops), generator.end_tokens)
    text = ""
    with closing(generator.engine.generate(request)) as parts:
        for part in parts:
            text += part.text
            sys.stdout.write(part.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return text


def _lines() -> Iterator[str]:
    """The lines that the user types, up to an empty one."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line
