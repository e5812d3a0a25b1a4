"""Texts with which the checks begin: chats and beginnings for greedy decoding, and a long text for perplexity."""

from __future__ import annotations

from pathlib import Path

from lathe.core.language.language_model import LanguageModel

QUESTIONS = (
    "What is the capital of France?", "Write a short poem about the sea.", "Explain photosynthesis to a child.",
    "List five fruits.", "Translate to Spanish: good morning.", "What is 17 + 25?", "Who wrote Hamlet?",
    "Give me a recipe for pancakes.", "Why is the sky blue?", "Summarize the story of Cinderella.",
    "What does HTTP stand for?", "Write a Python function that reverses a list.", "How do vaccines work?",
    "Name three planets.", "What is the difference between a virus and a bacterium?",
)  # fmt: skip
BEGINNINGS = (
    "Once upon a time", "The first law of thermodynamics", "In 1969,", "def fibonacci(n):\n", "Dear Sir or Madam,\n\n",
)  # fmt: skip
_DOCS = Path(__file__).parents[2] / "docs"


def greedy_prompts(model: LanguageModel) -> list[list[int]]:
    """The tokens of 15 questions in the form of a chat, and of 5 beginnings of texts."""
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    return [model.tokenizer.encode(text) for text in (*chats, *BEGINNINGS)]


def long_text(model: LanguageModel, count: int) -> list[int]:
    """`count` tokens of Lathe's documentation, its pages in the order of their names."""
    tokens: list[int] = []
    for page in sorted(_DOCS.glob("*.md")):
        tokens += model.tokenizer.encode(page.read_text())
        if len(tokens) >= count:
            return tokens[:count]
    raise ValueError(f"the documentation has {len(tokens)} tokens, fewer than {count}")
