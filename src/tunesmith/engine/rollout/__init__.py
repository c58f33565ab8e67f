"""Rollout engines: `generate(prompts, n, sampling) -> groups`, with the log-prob of every sampled token."""
