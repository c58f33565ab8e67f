from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import EOS_ID, VOCABULARY_SIZE, byte_tokenizer
from tunesmith.engine.models.tokenizer import encode_pair_side
from tunesmith.learn.rewards.model import ModelReward, model_name, same_tokenizer
from tunesmith.learn.rewards.outcome import samples_of
from tunesmith.learn.rewards.scorer import Scorer

GroupMaker = Callable[..., Group]
USER = {"role": "user", "content": "Hello"}


def drawn_reward_model() -> RewardModel:
    """A tiny reward model whose head is not at zero, so that it tells texts apart."""
    model = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"))
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def reward_model() -> RewardModel:
    return drawn_reward_model()


def reward_of(model: RewardModel, ids: tuple[int, ...]) -> float:
    with torch.no_grad():
        return model(torch.tensor([ids]), torch.tensor([len(ids)])).item()


def test_each_sample_gets_the_reward_of_its_own_ids_whatever_the_batches(
    reward_model: RewardModel, make_group: GroupMaker
):
    groups = [make_group("It was", " very very good", " b"), make_group("A longer prompt of the same", " x", " yz")]
    samples = samples_of(groups)
    expected = [reward_of(reward_model, s.prompt_token_ids + s.completion.token_ids) for s in samples]
    for size in (1, 3, 32):
        reward = ModelReward(reward_model, policy_tokenizer=byte_tokenizer(), micro_batch_size=size)
        assert reward.scores_token_ids
        assert reward.score(samples) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4


@pytest.mark.parametrize("content", ["It was", (USER,)], ids=["text", "conversation"])
@pytest.mark.parametrize("ended", [True, False])
def test_the_scored_ids_are_those_of_training_also_when_the_limit_cut_the_completion(
    reward_model: RewardModel, make_group: GroupMaker, content: object, ended: bool
):
    group = make_group(content, " good", ended=ended)
    reward = ModelReward(reward_model, policy_tokenizer=byte_tokenizer())
    trained_on = encode_pair_side(reward_model.tokenizer, group.prompt, " good")
    assert trained_on[-1] == EOS_ID
    assert reward.score(samples_of([group])) == pytest.approx([reward_of(reward_model, trained_on)], abs=1e-5)


def test_sampled_ids_are_not_encoded_again(reward_model: RewardModel, make_group: GroupMaker):
    group = make_group("It was", " good")
    relabelled = replace(group.completions[0], text="something else")
    changed = replace(group, completions=(relabelled,))
    with_ids = ModelReward(reward_model, policy_tokenizer=byte_tokenizer())
    with_text = ModelReward(reward_model)
    assert with_ids.score(samples_of([changed])) == with_ids.score(samples_of([group]))
    assert with_text.score(samples_of([changed])) != with_text.score(samples_of([group]))


def test_with_another_tokenizer_the_text_is_encoded_again(reward_model: RewardModel, make_group: GroupMaker):
    other = byte_tokenizer()
    other.add_tokens(["good"])
    assert not same_tokenizer(other, reward_model.tokenizer)
    reward = ModelReward(reward_model, policy_tokenizer=other)
    assert not reward.scores_token_ids
    group = make_group((USER,), "good")
    expected = reward_of(reward_model, encode_pair_side(reward_model.tokenizer, group.prompt, "good"))
    assert reward.score(samples_of([group])) == pytest.approx([expected], abs=1e-5)


def test_a_conversation_under_another_template_is_encoded_again(make_group: GroupMaker):
    model = drawn_reward_model()
    model.tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    group = make_group((USER,), "Hi")
    expected = reward_of(model, encode_pair_side(model.tokenizer, group.prompt, "Hi"))
    reward = ModelReward(model, policy_tokenizer=byte_tokenizer())
    assert reward.score(samples_of([group])) == pytest.approx([expected], abs=1e-5)


def test_scoring_keeps_no_gradients_and_the_mode_of_the_model(reward_model: RewardModel, make_group: GroupMaker):
    reward_model.train()
    ModelReward(reward_model).score(samples_of([make_group("a", "b")]))
    assert reward_model.training
    assert all(parameter.grad is None for parameter in reward_model.parameters())
    reward_model.eval()


def test_a_sequence_beyond_the_models_context_is_named(reward_model: RewardModel, make_group: GroupMaker):
    with pytest.raises(
        RewardError, match=r"`tiny:llama` takes 256 tokens, but prompt p.jsonl:1, completion 0 .* has 303"
    ):
        ModelReward(reward_model).score(samples_of([make_group("ab", "x" * 300)]))


def test_a_reward_that_is_not_finite_is_named(make_group: GroupMaker):
    model = drawn_reward_model()
    with torch.no_grad():
        model.model.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match=r"`tiny:llama` gave nan to prompt p.jsonl:1, completion 0"):
        ModelReward(model).score(samples_of([make_group("a", "b")]))


def test_failures_of_a_reward_model_follow_the_policy_and_the_other_samples_keep_their_reward(
    reward_model: RewardModel, make_group: GroupMaker
):
    group = make_group("ab", "x" * 300, "cd")
    (expected,) = ModelReward(reward_model).score(samples_of([group])[1:])
    scores = Scorer([reward_model], on_error="drop").score([group])
    assert scores.valid_PG.tolist() == [[False, True]]
    assert scores.total_PG[0].tolist() == pytest.approx([0.0, expected], abs=1e-5)
    assert "takes 256 tokens, but prompt p.jsonl:1, completion 0" in scores.failures[0].reason
    damaged = drawn_reward_model()
    with torch.no_grad():
        damaged.model.score.weight.fill_(float("inf"))
    zero = Scorer([damaged], on_error="zero").score([make_group("ab", "cd")])
    assert zero.total_PG.tolist() == [[0.0]] and "its weights may be damaged" in zero.failures[0].reason


def test_where_every_sequence_is_too_long_the_model_is_not_asked(reward_model: RewardModel, make_group: GroupMaker):
    samples = samples_of([make_group("ab", "x" * 300)])
    (outcome,) = ModelReward(reward_model).outcomes(samples).outcomes
    assert "takes 256 tokens" in str(outcome)


def test_a_reward_model_in_memory_joins_functions_in_a_scorer(reward_model: RewardModel, make_group: GroupMaker):
    groups = [make_group("It was", " good", " b")]
    scores = Scorer([reward_model, "unique_chars"], weights=[2.0, 1.0], policy_tokenizer=byte_tokenizer()).score(groups)
    assert list(scores.parts) == ["tiny:llama", "unique_chars"]
    expected = 2 * scores.parts["tiny:llama"] + scores.parts["unique_chars"]
    assert torch.allclose(scores.total_PG, expected)


def test_names_of_models_are_the_last_part_of_their_source():
    assert model_name("org/reward-0.5B") == "reward-0.5B"
    assert model_name("runs/20250101-rm/final/") == "20250101-rm"
    assert model_name("") == "reward_model"


def test_a_classifier_that_does_not_read_the_last_token_scores_the_text(make_group: GroupMaker):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=VOCABULARY_SIZE, num_labels=2, initializer_range=0.5, **sizes)
    tokenizer = byte_tokenizer()
    model = RewardModel(BertForSequenceClassification(config).eval(), tokenizer, label=1, source="org/bert")
    reward = ModelReward(model, policy_tokenizer=tokenizer)
    assert not reward.scores_token_ids
    text, chat = make_group("It was", " good"), make_group((USER,), "good")
    expected = [reward_of(model, tuple(tokenizer(t)["input_ids"])) for t in ("It was good", "Hello\ngood")]
    assert reward.score(samples_of([text, chat])) == pytest.approx(expected, abs=1e-5)


def test_a_saved_reward_model_is_loaded_by_its_folder(
    reward_model: RewardModel, make_group: GroupMaker, tmp_path: Path
):
    folder = tmp_path / "my-rm"
    reward_model.model.save_pretrained(folder)
    reward_model.tokenizer.save_pretrained(folder)
    group = make_group("It was", " good", " b")
    scores = Scorer([str(folder)], policy_tokenizer=byte_tokenizer(), dtype=torch.float32).score([group])
    assert list(scores.parts) == ["my-rm"]
    assert scores.total_PG[0].tolist() == pytest.approx(ModelReward(reward_model).score(samples_of([group])), abs=1e-5)
