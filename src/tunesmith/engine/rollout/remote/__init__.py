"""vLLM as a rollout engine, in this process or behind HTTP; and servers that speak OpenAI's completions protocol."""
