"""PPOTrainer with TRL 1.12's constructor: a script of that time runs, on our PPO, with the figures that TRL names."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    HfArgumentParser,
    LlamaConfig,
    TrainerCallback,
)
from trl import ModelConfig, ScriptArguments
from trl.experimental.utils import get_reward

from tunesmith.base.core.errors import InputError, ModelError
from tunesmith.engine.models.tiny import EOS_ID, VOCABULARY_SIZE, tiny_model
from tunesmith.integrations.trl.ppo import PPOTrainer
from tunesmith.integrations.trl.ppo_config import PPOConfig
from tunesmith.learn.trainers.ppo import PPO

TEXTS = ["The film was", "A story of", "Once more with", "They said", "It is", "We saw the", "Nobody", "Both of them"]


def classifier(seed: int) -> Any:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY_SIZE,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config)


def tokenized(tokenizer: Any, texts: list[str] = TEXTS) -> Dataset:
    return Dataset.from_dict({"text": texts}).map(
        lambda rows: {"input_ids": tokenizer(rows["text"], padding=False)["input_ids"]},
        batched=True,
        remove_columns=["text"],
    )


def parts(**changed: Any) -> dict[str, Any]:
    """Arguments of the trainer, without `args`."""
    loaded = tiny_model("llama")
    loaded.tokenizer.padding_side = "left"
    data = tokenized(loaded.tokenizer)
    given = {
        "processing_class": loaded.tokenizer,
        "model": loaded.model,
        "ref_model": tiny_model("llama").model,
        "reward_model": classifier(1),
        "value_model": classifier(2),
        "train_dataset": data,
        "eval_dataset": data.select(range(2)),
    }
    return {**given, **changed}


def config(tmp_path: Path, **changed: Any) -> PPOConfig:
    given = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "total_episodes": 8,
        "num_ppo_epochs": 2,
        "response_length": 6,
        "stop_token": "eos",
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return PPOConfig(**{**given, **changed})


def test_a_script_of_that_time_runs_to_its_end(tmp_path: Path) -> None:
    """As TRL's own example script, with random models in place of those on the hub."""
    words = f"--output_dir {tmp_path / 'out'} --dataset_name none --per_device_train_batch_size 2 --use_cpu True"
    words += " --gradient_accumulation_steps 2 --num_mini_batches 2 --total_episodes 8 --missing_eos_penalty 1.0"
    words += " --response_length 5 --stop_token eos --learning_rate 1e-3 --kl_coef 0.1 --num_sample_generations 1"
    words += " --save_strategy steps --save_steps 1 --eval_strategy steps --eval_steps 100 --report_to none"
    parser: Any = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))  # type: ignore[arg-type]
    _, training_args, _ = parser.parse_args_into_dataclasses(words.split())
    given = parts()
    before = {name: p.clone() for name, p in given["model"].named_parameters()}
    value_before = given["value_model"].score.weight.clone()
    trainer = PPOTrainer(args=training_args, **given)
    trainer.train()
    trainer.save_model(training_args.output_dir)
    rows = trainer.generate_completions()

    assert training_args.batch_size == 4 and training_args.num_total_batches == 2
    assert any(not torch.equal(before[name], p) for name, p in given["model"].named_parameters())
    assert not torch.equal(value_before, given["value_model"].score.weight), "the head of the value model is trained"
    assert [row["query"] for row in rows] == TEXTS[:2]
    loaded = AutoModelForCausalLM.from_pretrained(training_args.output_dir)
    assert all(torch.equal(p, dict(given["model"].named_parameters())[n]) for n, p in loaded.named_parameters())
    assert loaded.generation_config.eos_token_id == EOS_ID
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["global_step"], state["episode"], state["max_steps"]) == (2, 8, 2)
    logged = state["log_history"][-1]
    for name in (
        *("eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
        *("objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "loss/policy_avg", "loss/value_avg"),
        *(
            "val/clipfrac_avg",
            "policy/entropy_avg",
            "val/ratio",
            "val/ratio_var",
            "val/num_eos_tokens",
            "lr",
            "episode",
        ),
    ):
        assert math.isfinite(logged[name]), name
    assert logged["objective/kl"] != 0, "the reference is not the trained policy"


def test_scores_and_values_are_those_that_trl_s_get_reward_computes(tmp_path: Path) -> None:
    given = parts()
    trainer = PPOTrainer(config(tmp_path), **given)
    learner = trainer.learner
    prompts = next(trainer._batches())
    with trainer._stop_ids():
        groups, scores = learner.rollouts.draw(prompts, "rollout", 0)
    pad_id = VOCABULARY_SIZE  # as scripts of that time add it: `[PAD]`, beyond the embedding
    for row, group in enumerate(groups):
        ids = torch.tensor([[*group.prompt_token_ids, *group.completions[0].token_ids]])
        _, score, _ = get_reward(given["reward_model"], ids, pad_id, len(group.prompt_token_ids))
        assert scores.total_PG[row, 0].item() == pytest.approx(score.item(), abs=1e-5)
        values, _, _ = get_reward(given["value_model"], ids, pad_id, len(group.prompt_token_ids))
        start, end = len(group.prompt_token_ids), ids.shape[1]
        assert learner.critic is not None
        value_BT = learner.critic(ids, torch.tensor([end]), torch.tensor([start]))
        torch.testing.assert_close(value_BT[0], values[0, start - 1 : end - 1, 0], atol=1e-5, rtol=0)


def test_without_a_stop_token_all_completions_have_the_full_length(tmp_path: Path) -> None:
    trainer = PPOTrainer(config(tmp_path, stop_token=None, response_length=40, missing_eos_penalty=5.0), **parts())
    prompts = next(trainer._batches())
    with trainer._stop_ids():
        groups, scores = trainer.learner.rollouts.draw(prompts, "rollout", 0)
    completions = [group.completions[0] for group in groups]
    assert {len(one.token_ids) for one in completions} == {40}
    plain = PPOTrainer(config(tmp_path, stop_token=None, response_length=40), **parts())
    unpunished = plain.learner.rollouts.scorer.score(groups).total_PG
    lacks_eos = torch.tensor([[EOS_ID not in one.token_ids] for one in completions])
    torch.testing.assert_close(scores.total_PG, unpunished - 5.0 * lacks_eos)


def test_prompts_are_the_tokens_of_the_dataset_without_padding(tmp_path: Path) -> None:
    given = parts()
    trainer = PPOTrainer(config(tmp_path), **given)
    batches = trainer._batches()
    seen = [prompt.token_ids for _ in range(2) for prompt in next(batches)]
    assert sorted(map(len, seen)) == sorted(len(ids) for ids in given["train_dataset"]["input_ids"])
    assert set(seen) == {tuple(ids) for ids in given["train_dataset"]["input_ids"]}


def test_adapters_alone_are_trained_and_the_reference_is_the_base(tmp_path: Path) -> None:
    given = parts(ref_model=None, peft_config=LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
    base = {name: p.clone() for name, p in given["model"].named_parameters()}
    trainer = PPOTrainer(config(tmp_path, gradient_checkpointing=False), **given)
    trainer.train()
    assert isinstance(trainer.model, PeftModel)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert any(p.abs().max() > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)
    assert trainer.learner.reference is not None
    assert all(torch.equal(p, base[name]) for name, p in trainer.learner.reference.module.named_parameters())
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


class Ends(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def test_callbacks_are_called_and_may_end_the_training(tmp_path: Path) -> None:
    trainer = PPOTrainer(config(tmp_path), **parts(callbacks=[Ends()]))
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_same_seed_trains_the_same_weights_on_our_ppo(tmp_path: Path) -> None:
    def trained(seed: int) -> torch.Tensor:
        trainer = PPOTrainer(config(tmp_path, seed=seed), **parts())
        assert isinstance(trainer.learner, PPO)
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.policy_model.parameters()])

    first = trained(1)
    assert torch.equal(first, trained(1))
    assert not torch.equal(first, trained(2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ref_adapter_name": "old"}, "ref_adapter_name is 'old', but the reference is `ref_model`"),
        ({"optim": "adafactor"}, "optim is 'adafactor'; allowed are 'adamw_torch'"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type is 'polynomial'; allowed are 'linear'"),
        ({"kl_estimator": "k2"}, "kl_estimator is 'k2'; allowed are 'k1', 'k3'"),
        ({"stop_token_id": 2}, "both stop_token and stop_token_id are set"),
        ({"num_mini_batches": 3}, "a batch has 4 completions .* num_mini_batches, 3, does not divide"),
        ({"per_device_train_batch_size": 16}, "train_dataset has 8 rows, fewer than the 16 of a batch"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PPOTrainer(config(tmp_path, **given), **parts())


def test_models_and_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    policy = tiny_model("llama").model
    with pytest.raises(InputError, match="model and ref_model are one object"):
        PPOTrainer(config(tmp_path), **parts(model=policy, ref_model=policy))
    with pytest.raises(ModelError, match="value_model is a LlamaForCausalLM without a linear `score`"):
        PPOTrainer(config(tmp_path), **parts(value_model=policy))
    with pytest.raises(InputError, match="optimizers are given, but PPO has its own AdamW"):
        PPOTrainer(config(tmp_path), **parts(optimizers=(torch.optim.SGD(policy.parameters()), None)))


def test_arguments_that_change_nothing_are_warned_of_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        PPOTrainer(config(tmp_path, ds3_gather_for_generation=False, bf16=True), **parts())
    assert "ds3_gather_for_generation = False is not used: there is no DeepSpeed" in caplog.text
    assert "bf16 = True is not used: the weights are computed in their own dtype" in caplog.text
    assert "response_length" not in caplog.text
