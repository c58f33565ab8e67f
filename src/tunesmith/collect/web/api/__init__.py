"""An OpenAI-compatible API over the engine, and feedback on its answers."""
