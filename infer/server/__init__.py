"""OpenAI's API over `AsyncLLM` (the extra `serve`). Importing this package imports none of what it needs."""
