"""OpenAI's API below /v1: models, chat/completions, completions, embeddings; and rerank, as Jina's."""
