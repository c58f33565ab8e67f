"""Figures of a forward pass: positions, padding and shared prefixes, counted by hand for each way to compute it."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DistilBertConfig

from tunesmith.base.core.trace import span, trace
from tunesmith.engine.batch.targets import LearntSequence, pack_targets
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.heads import Critic, RewardModel
from tunesmith.engine.models.language_model import FullForward, LanguageModel, TrunkForward, language_model
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.models.logprob import next_token_scores, token_logps
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 0, 0], [5, 6, 7, 4, 3, 2, 0], [5, 6, 7, 1, 0, 0, 0]])
LENGTHS, PROMPTS = torch.tensor([5, 6, 4]), torch.tensor([3, 3, 3])


def padded(backend: str) -> LanguageModel:
    model: PreTrainedModel = tiny_model("llama").model
    trunk = TrunkForward(describe(model).output_layer)
    return LanguageModel(model, trunk if backend == "trunk" else FullForward(), Kernels())


def figures(call: object) -> dict[str, float]:
    with trace() as record, span("update/forward"):
        call()  # type: ignore[operator]
    return {name: value for name, value in record.metrics().items() if not name.startswith("time/")}


@pytest.mark.parametrize("backend", ["trunk", "full"])
def test_padded_rows(backend: str) -> None:
    """Three rows of 6 columns hold 15 tokens."""
    model = padded(backend)
    found = figures(lambda: token_logps(model, IDS, LENGTHS, prompt_lengths_B=PROMPTS))
    assert found == {"update/micro_batch_tokens": 18, "update/padding_share": 3 / 18, "update/shared_tokens": 0}


def test_packed_rows_with_a_common_prompt() -> None:
    """The last token of each row predicts nothing, so there are 4 + 5 + 3 tokens; the prompt of 3 is computed once."""
    model = language_model(tiny_model("llama").model)
    found = figures(lambda: token_logps(model, IDS, LENGTHS, prompt_lengths_B=PROMPTS))
    assert found == {"update/micro_batch_tokens": 6, "update/padding_share": 0, "update/shared_tokens": 6}


def test_passes_are_averaged_by_their_positions() -> None:
    model = padded("trunk")

    def two_passes() -> None:
        token_logps(model, IDS, LENGTHS, prompt_lengths_B=PROMPTS)
        token_logps(model, IDS[:1], LENGTHS[:1], prompt_lengths_B=PROMPTS[:1])

    found = figures(two_passes)
    assert found["update/micro_batch_tokens"] == (18 + 5) / 2
    assert found["update/padding_share"] == 3 / (18 + 5)


def test_a_pass_without_gradients_is_not_one_of_an_update() -> None:
    models = ((padded("trunk"), 18), (padded("full"), 18), (language_model(tiny_model("llama").model), 6))
    for model, num_positions in models:
        with torch.no_grad():
            found = figures(lambda model=model: token_logps(model, IDS, LENGTHS, prompt_lengths_B=PROMPTS))
        assert found == {"update/computed_tokens": num_positions}


@pytest.mark.parametrize("backend", ["trunk", "full", "packed"])
def test_sequences_of_fine_tuning(backend: str) -> None:
    """Sequences of 5 and 3 tokens, of which the last is not computed: padded to 4, or packed."""
    model = language_model(tiny_model("llama").model) if backend == "packed" else padded(backend)
    targets = pack_targets([LearntSequence(str(n), tuple(range(5, 5 + n)), (range(1, n),)) for n in (5, 3)])
    assert targets.lengths == (4, 2)
    padding = 0 if backend == "packed" else 2
    assert figures(lambda: next_token_scores(model, targets)) == {
        "update/micro_batch_tokens": 6 + padding,
        "update/padding_share": padding / 8,
        "update/shared_tokens": 0,
    }


def test_a_critic_shares_prompts_too() -> None:
    critic = Critic.from_policy(tiny_model("llama").model)
    assert figures(lambda: critic(IDS, LENGTHS, PROMPTS))["update/shared_tokens"] == 6


def test_a_classifier_that_pools_by_itself_is_padded() -> None:
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=259, dim=32, n_layers=2, n_heads=2, hidden_dim=64, num_labels=1)
    model = RewardModel(AutoModelForSequenceClassification.from_config(config), byte_tokenizer())
    found = figures(lambda: model(IDS, LENGTHS))
    assert found == {"update/micro_batch_tokens": 18, "update/padding_share": 3 / 18, "update/shared_tokens": 0}
