"""The routes of OpenAI's API for language models: /v1/models, /v1/chat/completions, /v1/completions."""
