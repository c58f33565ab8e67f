"""Reward functions get from our scorer what TRL's GRPOTrainer gives them, and count as much."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, LlamaConfig
from trl import GRPOConfig, GRPOTrainer

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.tiny import VOCABULARY_SIZE, byte_tokenizer, tiny_model
from tunesmith.learn.rewards.outcome import TrainerState
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers.metrics import sample_rows

ROWS = [{"prompt": "2 + 2 =", "answer": 4}, {"prompt": "3 + 4 =", "answer": 7}]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
TEXTS = [" 4", " 5", " 7", " seven"]


class Recorder:
    """A reward function of each kind that TRL knows; `seen` holds what each was called with."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self.metrics: list[float] = []

    def functions(self) -> list[Callable[..., Any]]:
        def plain(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
            self.seen["plain"] = {"prompts": prompts, "completions": completions, **kwargs}
            kwargs["log_extra"]("length", [len(str(one)) for one in completions])
            kwargs["log_metric"]("mine/answers", sum(kwargs["answer"]))
            return [float(n) for n in range(len(completions))]

        def partly(completions: Any, answer: list[int], **kwargs: Any) -> list[float | None]:
            return [None if n % 2 else float(number) for n, number in enumerate(answer)]

        async def later(completion_ids: Any, **kwargs: Any) -> list[float]:
            self.seen["later"] = {"completion_ids": completion_ids, **kwargs}
            return [float(len(ids)) + kwargs["trainer_state"].global_step for ids in completion_ids]

        return [plain, partly, later]


def trl_rewards(rows: list[dict[str, Any]], functions: list[Any], tmp_path: Path) -> tuple[Any, torch.Tensor]:
    """(TRL's trainer, the rewards that it computes for two completions of each row)."""
    loaded = tiny_model("llama")
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, use_cpu=True, bf16=False
    )
    trainer = GRPOTrainer(loaded.model, functions, args, Dataset.from_list(rows), processing_class=loaded.tokenizer)
    inputs = [row for row in rows for _ in range(2)]
    is_chat = not isinstance(rows[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": text}] if is_chat else text for text in TEXTS]
    ids = [[*byte_tokenizer()(text)["input_ids"], 2] for text in TEXTS]
    rewards = trainer._calculate_rewards(inputs, [row["prompt"] for row in inputs], completions, ids)
    return trainer, rewards


def our_groups(rows: list[dict[str, Any]], make_group: Any) -> list[Group]:
    return [
        make_group(
            row["prompt"] if isinstance(row["prompt"], str) else tuple(row["prompt"]),
            *TEXTS[2 * n : 2 * n + 2],
            columns={"answer": row["answer"]},
        )
        for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize("rows", [ROWS, CHATS], ids=["text", "messages"])
def test_functions_are_called_as_trl_calls_them(rows: list[dict[str, Any]], make_group: Any, tmp_path: Path) -> None:
    theirs, ours = Recorder(), Recorder()
    trainer, rewards_NR = trl_rewards(rows, theirs.functions(), tmp_path)
    scorer = Scorer(ours.functions(), weights=[1.0, 0.5, 2.0])
    scores = scorer.score(our_groups(rows, make_group), state=TrainerState(0, 10))
    for name, seen in theirs.seen.items():
        assert ours.seen[name].keys() == seen.keys()
        for argument in ("prompts", "completions", "completion_ids", "answer"):
            assert ours.seen[name].get(argument) == seen.get(argument), argument
        assert vars(type(seen["trainer_state"])).keys() >= {"global_step", "max_steps", "epoch"}
        assert {field: getattr(ours.seen[name]["trainer_state"], field) for field in ("global_step", "epoch")} == {
            "global_step": seen["trainer_state"].global_step,
            "epoch": seen["trainer_state"].epoch,
        }
    parts_NR = torch.stack([part_PG.flatten() for part_PG in scores.parts.values()], dim=1)
    torch.testing.assert_close(parts_NR, rewards_NR, equal_nan=True)
    assert scorer.names == ("plain", "partly", "later") == tuple(trainer.reward_func_names)
    expected_N = (rewards_NR * torch.tensor([1.0, 0.5, 2.0])).nansum(dim=1)
    torch.testing.assert_close(scores.total_PG.flatten(), expected_N)
    assert scores.logged["mine/answers"] == trainer._pending_metrics["mine/answers"][0]
    assert list(scores.columns["length"]) == list(trainer._pending_extra_logs["length"])


def test_what_a_function_logs_stands_beside_the_completion_in_the_samples(make_group: Any) -> None:
    def judged(completions: Any, log_extra: Any, **_: Any) -> list[float]:
        log_extra("verdict", [f"{text} is it" for text in completions])
        log_extra("raw", [torch.tensor(1.0)] * len(completions))
        return [0.0] * len(completions)

    groups = our_groups(ROWS, make_group)
    rows = sample_rows(groups, Scorer([judged]).score(groups), step=1)
    assert [row["logged"] for row in rows] == [
        {"verdict": " 4 is it", "raw": "tensor(1.)"},
        {"verdict": " 7 is it", "raw": "tensor(1.)"},
    ]


def classifier() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model_config = LlamaConfig(**sizes, vocab_size=VOCABULARY_SIZE, num_labels=1, pad_token_id=0)
    return AutoModelForSequenceClassification.from_config(model_config)


def test_a_classifier_of_transformers_is_a_reward_with_the_tokenizer_of_its_folder(
    make_group: Any, tmp_path: Path
) -> None:
    classifier().save_pretrained(tmp_path / "judge")
    byte_tokenizer().save_pretrained(tmp_path / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    groups = our_groups(ROWS, make_group)
    scorer = Scorer([model], policy_tokenizer=byte_tokenizer())
    expected = Scorer([RewardModel(model, byte_tokenizer())], policy_tokenizer=byte_tokenizer())
    torch.testing.assert_close(scorer.score(groups).total_PG, expected.score(groups).total_PG)
    assert scorer.names == ("judge",)
    with pytest.raises(ModelError, match=r"was not loaded by a name.*give `RewardModel\(model, tokenizer\)`"):
        Scorer([classifier()])
