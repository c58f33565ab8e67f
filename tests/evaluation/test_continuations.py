"""Likelihoods of continuations are those of a plain forward pass, in any order and batches, with any backend."""

import random
from collections.abc import Sequence

import pytest
import torch

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.trace import trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.evaluation.continuations import Continuation, likelihoods

RANDOM = random.Random(0)
EXAMPLES = tuple(RANDOM.randrange(3, 250) for _ in range(24))


def ids(number: int) -> tuple[int, ...]:
    return tuple(RANDOM.randrange(3, 250) for _ in range(number))


def questions() -> list[Continuation]:
    """Choices of several questions, some behind the same examples, out of order; one twice, and an empty one."""
    contexts = [EXAMPLES + ids(number) for number in (5, 9, 1)] + [ids(number) for number in (1, 30, 7)]
    rows = [Continuation(context, ids(number)) for context in contexts for number in (1, 1, 3, 4)]
    RANDOM.shuffle(rows)
    return [*rows, rows[0], Continuation(contexts[0], ())]


def plain(model: LanguageModel, row: Continuation) -> float:
    """The log-prob by transformers' forward pass of one row, in float64."""
    with torch.no_grad():
        logits_SV = model.module(input_ids=torch.tensor([row.all_ids])).logits[0].double()
    logps_SV = logits_SV.log_softmax(-1)
    places = range(len(row.context_ids) - 1, len(row.all_ids) - 1)
    return sum(logps_SV[place, row.all_ids[place + 1]].item() for place in places)


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
@pytest.mark.parametrize("forward", ["auto", "padded", "full"])
def test_each_backend_gives_the_log_probs_of_a_plain_forward_pass(forward: str, batch_tokens: int) -> None:
    model = model_of_recipe(tiny_model("llama").model, ModelSection.model_validate({"forward": forward}))
    rows, seen = questions(), []
    found = likelihoods(model, rows, batch_tokens=batch_tokens, on_progress=seen.append)
    assert [one.logp for one in found] == pytest.approx([plain(model, row) for row in rows], abs=1e-4)
    assert (found[-1].logp, found[-1].is_greedy) == (0.0, True)
    assert seen == sorted(seen) and seen[-1] == len(rows)


def computed(model: LanguageModel, rows: Sequence[Continuation]) -> float:
    """Positions that the forward passes compute."""
    with trace() as record:
        likelihoods(model, rows)
    return record.metrics()["likelihoods/computed_tokens"]


def test_choices_share_their_context_and_questions_their_examples() -> None:
    module = tiny_model("llama").model
    sharing, alone = (model_of_recipe(module, ModelSection(share_prefixes=shares)) for shares in (True, False))
    context = ids(50)
    choices = [Continuation(context, ids(3)) for _ in range(4)]
    assert computed(alone, choices) == 4 * 52  # the last token of a row predicts nothing
    assert computed(sharing, choices) == 50 + 4 * 2
    asked = [Continuation(EXAMPLES + ids(4), ids(2)) for _ in range(6)]
    assert computed(sharing, asked) == 24 + 6 * 5 < computed(alone, asked)


def test_the_choices_of_a_question_are_never_in_two_passes() -> None:
    model = model_of_recipe(tiny_model("llama").model, ModelSection())
    rows = [Continuation(context, ids(1)) for context in (ids(40), ids(40)) for _ in range(4)]
    with trace() as record:
        likelihoods(model, rows, batch_tokens=60)
    assert record.metrics()["likelihoods/computed_tokens"] == 80


def test_what_greedy_decoding_draws_is_greedy_and_another_text_is_not() -> None:
    loaded = tiny_model("llama")
    model = model_of_recipe(loaded.model, ModelSection())
    prompt = Prompt("p", "", token_ids=ids(6))
    (group,) = open_engine(model, loaded.tokenizer).generate([prompt], 1, SamplingParams(8, temperature=0.0))
    drawn = group.completions[0].token_ids
    other = (*drawn[:-1], drawn[-1] + 1)
    found = likelihoods(model, [Continuation(group.prompt_token_ids, tokens) for tokens in (drawn, other, drawn[:3])])
    assert [one.is_greedy for one in found] == [True, False, True]
    assert found[0].logp == pytest.approx(sum(group.completions[0].raw_logps), abs=1e-4)


def test_a_context_without_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match="empty prompt"):
        likelihoods(model_of_recipe(tiny_model("llama").model, ModelSection()), [Continuation((), (5,))])
