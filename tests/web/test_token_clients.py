"""Trainers that draw token ids from `/inference/v1/generate`, by their published clients."""

import asyncio
import math

import pytest

from server_parts import Client, Server
from tunesmith.engine.models.tiny import byte_tokenizer

LETTERS = {str(token): 50 for token in range(68, 94)}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("api"), ("--openai", "tiny:llama")).start()
    yield server
    server.kill()


def test_verifiers_train_client_draws_turns_with_ids_and_log_probs(served, tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="needs the package verifiers", exc_type=ImportError)
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv("TUNESMITH_KEY", served.facts["key"])
    config = TrainClientConfig(
        base_url=served.facts["api"], api_key_var="TUNESMITH_KEY", renderer_model_name=str(tmp_path)
    )
    messages = [{"role": "user", "content": "Name a colour."}]

    async def draw() -> list:
        client = TrainClient(config)
        drawn = []
        try:
            for seed in (1, 1, 2):
                more = {"logit_bias": LETTERS, "chat_template_kwargs": {}}
                sampling = SamplingConfig(max_tokens=12, temperature=1.0, seed=seed, extra_body=more)
                body = {"model": "tiny:llama", "messages": messages}
                drawn.append(await client.get_response(ChatDialect(), body, sampling, session_id="rollout 1"))
        finally:
            await client.close()
        return drawn

    first, again, other = asyncio.run(draw())
    for one in (first, other):
        ids = one.tokens
        assert len(ids.completion_ids) == len(ids.completion_logprobs) == 12 == one.usage.completion_tokens
        assert all(math.isfinite(logp) and logp <= 0 for logp in ids.completion_logprobs)
        assert one.finish_reason == "length" and one.message.content == byte_tokenizer().decode(ids.completion_ids)
    assert (again.tokens.completion_ids, again.tokens.completion_logprobs) == (
        first.tokens.completion_ids,
        first.tokens.completion_logprobs,
    )
    assert other.tokens.completion_ids != first.tokens.completion_ids
    asked = {"messages": messages, "max_tokens": 12, "seed": 1, "logit_bias": LETTERS, "return_token_ids": True}
    chat = Client(served.url, served.facts["key"]).send("POST", "/v1/chat/completions", asked).json
    assert chat["prompt_token_ids"] == first.tokens.prompt_ids
    assert chat["choices"][0]["token_ids"] == first.tokens.completion_ids
