"""GRPO and RLOO with our parts against TRL's own: the same loss, gradients and metrics from the same completions."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tunesmith.base.core.errors import InputError  # noqa: E402
from tunesmith.engine.kernels.linear.api import cpu_has_bfloat16  # noqa: E402
from tunesmith.engine.models.tiny import EOS_ID, byte_tokenizer  # noqa: E402
from tunesmith.integrations.trl import GRPOTrainer, Options, RLOOTrainer, accelerate  # noqa: E402
from tunesmith.integrations.trl.policy import by_prompt, without_zero_advantages  # noqa: E402

Build = Callable[..., tuple[Any, Any]]
MEANS = ("kl", "entropy", "clip_ratio")
"""Metrics that are means over micro-batches of the means of each, which hold the same rows in another order."""

TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime"}


def assert_same(ours: Any, theirs: Any, *, keeps_rows: bool = False) -> None:
    """Equal gradients of the first step, and equal logs; `keeps_rows` if micro-batches hold the rows of TRL's."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert ours.gradients
    for name, gradient in theirs.gradients.items():
        assert torch.allclose(ours.gradients[name], gradient, atol=1e-5, rtol=1e-3), name
    assert len(ours.logs) == len(theirs.logs)
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert mine.keys() == other.keys()
        for name in other.keys() - TIMES:
            close = 0.2 if name.startswith(MEANS) and not keeps_rows else 1e-3
            assert mine[name] == pytest.approx(other[name], abs=1e-5, rel=close), name
    assert ours.logs[0]["loss"] == pytest.approx(theirs.logs[0]["loss"], abs=1e-5)


GRPO_CASES = {
    "default": {},
    "iterations": {"num_iterations": 2, "max_steps": 2, "beta": 0.1},
    "accumulation": {"steps_per_generation": 4, "max_steps": 2, "loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo", "mask_truncated_completions": True},
    "sequence": {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5, "temperature": 0.7},
}


@pytest.mark.parametrize("name", GRPO_CASES)
def test_grpo_learns_as_trl_does_from_the_same_completions(name: str, build: Build, folders: Callable[[str], str]):
    family = "qwen2" if name == "default" else "llama"
    runs = []
    for trainer_class in (GRPOTrainer, trl.GRPOTrainer):
        trainer, seen = build(trainer_class, model=folders(family), given=True, **GRPO_CASES[name])
        trainer.train()
        runs.append(seen)
    assert_same(*runs, keeps_rows=name in ("bnpo", "sequence"))


def test_rloo_learns_as_trl_does_from_the_same_completions(build: Build, folders: Callable[[str], str]):
    runs = []
    for trainer_class in (RLOOTrainer, trl.RLOOTrainer):
        trainer, seen = build(trainer_class, model=folders("llama"), given=True, beta=0.05)
        trainer.train()
        runs.append(seen)
    assert_same(*runs)


def test_adapters_learn_as_in_trl(build: Build, folders: Callable[[str], str]):
    runs = []
    for trainer_class in (GRPOTrainer, trl.GRPOTrainer):
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian")
        trainer, seen = build(
            trainer_class, model=folders("llama"), given=True, beta=0.1, arguments={"peft_config": config}
        )
        torch.manual_seed(1)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        trainer.train()
        runs.append(seen)
    assert_same(*runs)
    assert all("lora" in name for name in runs[0].gradients)


def test_each_prompt_is_drawn_once_and_completions_end_where_trl_ends_them(build: Build):
    trainer, _ = build(GRPOTrainer)
    calls: list[tuple[int, int]] = []
    engine = trainer._current_engine()
    generate = engine.generate
    engine.generate = lambda prompts, n, sampling: (calls.append((len(prompts), n)), generate(prompts, n, sampling))[1]
    ids, logps = trainer._generate_single_turn([[5, 6]] * 4 + [[7]] * 4, None, {}, 4)
    assert calls == [(2, 4)]
    assert len(ids) == len(logps) == 8
    assert len({tuple(one) for one in ids}) > 2
    for one, logp in zip(ids, logps, strict=True):
        assert len(one) == len(logp) <= 8
        assert EOS_ID not in one[:-1]
        assert one[-1] == EOS_ID or len(one) == 8


def test_the_tool_loop_draws_one_completion_of_each_history(build: Build):
    trainer, _ = build(GRPOTrainer)
    ids, _ = trainer._generate_single_turn([[5, 6], [5, 6], [5, 6], [8, 9, 10]], None, {}, 1)
    assert len(ids) == 4
    assert len({tuple(one) for one in ids[:3]}) > 1  # equal histories are different draws


def test_draws_are_a_function_of_seed_and_step(build: Build):
    first, second, other = (build(GRPOTrainer, seed=seed)[0] for seed in (3, 3, 4))
    drawn = [trainer._generate_single_turn([[5, 6]] * 4, None, {}, 4)[0] for trainer in (first, second, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert first._generate_single_turn([[5, 6]] * 4, None, {}, 4)[0] != drawn[0]  # another call of the same step


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"generation_kwargs": {"typical_p": 0.9}}, "typical_p"),
        ({"generation_kwargs": {"do_sample": False}}, "greedy"),
        ({"max_completion_length": 300}, "context"),
    ],
)
def test_what_the_engine_does_not_know_is_drawn_by_trl(
    config: dict[str, Any], said: str, build: Build, caplog: pytest.LogCaptureFixture
):
    trainer, _ = build(GRPOTrainer, **config)
    for _ in range(2):
        ids, logps = trainer._generate_single_turn([[5, 6]] * 2, None, {}, 2)
        assert len(ids) == 2
        assert logps is None
    assert sum(said in record.message for record in caplog.records) == 1


def test_sampling_settings_reach_the_engine(build: Build):
    kwargs = {"stop_strings": ["ab"], "suppress_tokens": [9], "min_new_tokens": 2}
    trainer, _ = build(GRPOTrainer, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, generation_kwargs=kwargs)
    sampling = trainer._sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.stop_strings, sampling.min_new_tokens, sampling.logit_bias) == (("ab",), 2, {9: -math.inf})
    assert (sampling.stop_token_ids, sampling.max_new_tokens) == ((EOS_ID,), 8)


def test_an_unknown_family_trains_by_trls_own_code_and_says_so(build: Build, caplog: pytest.LogCaptureFixture):
    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 4}
        return BloomForCausalLM(BloomConfig(vocab_size=259, eos_token_id=2, bos_token_id=1, **sizes))

    runs = []
    for trainer_class in (GRPOTrainer, trl.GRPOTrainer):
        arguments = {"processing_class": byte_tokenizer()}
        trainer, seen = build(trainer_class, model=model(), arguments=arguments, disable_dropout=True)
        trainer.train()
        runs.append(seen)
    assert_same(*runs)
    said = [record.message for record in caplog.records if "leaves" in record.message]
    assert len(said) == 1
    assert "BloomModel" in said[0]


def test_evaluation_has_the_same_metrics(build: Build, folders: Callable[[str], str]):
    found = []
    for trainer_class in (GRPOTrainer, trl.GRPOTrainer):
        trainer, _ = build(trainer_class, model=folders("llama"), given=True, num_generations_eval=2, beta=0.1)
        found.append(trainer.evaluate())
    assert found[0].keys() == found[1].keys()
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], abs=1e-5)
    assert found[0]["eval_entropy"] == pytest.approx(found[1]["eval_entropy"], abs=1e-5)


def test_a_resumed_run_ends_with_the_same_weights(build: Build, tmp_path: Path):
    rows = datasets.Dataset.from_dict({"prompt": [f"prompt {index}" for index in range(4)]})
    weights = []
    for num_steps, resumes in ((2, False), (1, False), (2, True)):
        config = {"max_steps": num_steps, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
        folder = tmp_path / ("whole" if not weights else "parts")
        trainer, _ = build(GRPOTrainer, output_dir=str(folder), arguments={"train_dataset": rows}, **config)
        trainer.train(resume_from_checkpoint=resumes)
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert all(torch.allclose(weights[0][name], value, atol=1e-6) for name, value in weights[2].items())
    assert not all(torch.allclose(weights[0][name], value, atol=1e-6) for name, value in weights[1].items())


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_old_log_probs_are_the_engines_in_bfloat16_and_have_the_bits_of_the_packed_pass(
    trainer_class: type, build: Build, monkeypatch: pytest.MonkeyPatch
):
    trainer, seen = build(trainer_class, bf16=True, num_iterations=2, max_steps=2, temperature=0.8)
    oracle = trl.RLOOTrainer if trainer_class is RLOOTrainer else trl.GRPOTrainer
    packed, taken = oracle._get_per_token_logps_and_entropies, []
    ours = type(trainer)._get_per_token_logps_and_entropies

    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_drawn, found = self._drawn is not None, ours(self, *args, **kwargs)
        if has_drawn and args[0] is self.model:
            taken.append((found[0], packed(self, *args, **kwargs)[0]))
        return found

    monkeypatch.setattr(type(trainer), "_get_per_token_logps_and_entropies", both)
    trainer.train()
    assert len(taken) == cpu_has_bfloat16(), "the engine is exact where the processor computes in bfloat16"
    for own, expected in taken:
        assert bool(own.any())
        assert torch.equal(own, expected)
    assert all(math.isfinite(log.get("loss", 0.0)) for log in seen.logs)


def test_rows_that_teach_nothing_may_be_left_out(build: Build, folders: Callable[[str], str]):
    def equal_in_a_group(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        return [0.5 if prompt == prompts[0] else len(ids) for prompt, ids in zip(prompts, completion_ids, strict=True)]

    runs, counts = [], []
    for options in (Options(), Options(skips_equal_groups=True)):
        trainer, seen = build(
            GRPOTrainer, model=folders("llama"), given=True, num_iterations=2, arguments={"options": options}
        )
        trainer.reward_funcs = [equal_in_a_group]
        trainer.train()
        runs.append(seen)
        counts.append(seen.logs[0]["entropy"])
    assert runs[0].logs[0]["loss"] == pytest.approx(runs[1].logs[0]["loss"], abs=1e-6)
    for name, gradient in runs[0].gradients.items():
        assert torch.allclose(runs[1].gradients[name], gradient, atol=1e-6), name
    assert counts[0] != counts[1]


def test_rows_are_kept_where_they_do_teach(build: Build, caplog: pytest.LogCaptureFixture):
    trainer, _ = build(GRPOTrainer, beta=0.1, model=None, arguments={"options": Options(skips_equal_groups=True)})
    assert trainer._reason_not_to_skip() == "beta is not 0"


def test_emptied_rows_have_no_old_log_prob_and_one_row_always_stays():
    inputs = {
        "advantages": torch.tensor([0.0, 1.0]),
        "completion_mask": torch.ones(2, 3, dtype=torch.long),
        "old_per_token_logps": torch.full((2, 3), -200.0),
    }
    kept = without_zero_advantages(inputs)
    assert kept["completion_mask"].sum(1).tolist() == [0, 3]
    assert kept["old_per_token_logps"].sum(1).tolist() == [0, -600]
    inputs["advantages"] = torch.zeros(2)
    assert without_zero_advantages(inputs)["completion_mask"].sum(1).tolist() == [3, 0]


def test_importance_correction_is_for_every_engine(build: Build):
    trainer, seen = build(GRPOTrainer, arguments={"options": Options(corrects_importance=True)})
    trainer.train()
    assert seen.logs[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert seen.logs[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert trainer.use_vllm is False


def test_a_rollout_func_gets_the_correction_too(build: Build):
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        drawn = [[5 + index, 6, EOS_ID] for index in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": drawn, "logprobs": [[-1.0] * 3] * len(prompts)}

    arguments = {"rollout_func": rollout, "options": Options(corrects_importance=True)}
    trainer, seen = build(GRPOTrainer, arguments=arguments, vllm_importance_sampling_mode="token_truncate")
    trainer.train()
    assert seen.logs[0]["sampling/sampling_logp_difference/mean"] > 0.1


def test_a_trainer_without_its_constructor_refuses_what_trl_refuses():
    trainer: Any = object.__new__(GRPOTrainer)  # as TRL's own tests make them
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"))
    trainer.args, trainer.model = SimpleNamespace(report_to=[]), SimpleNamespace(training=True)
    trainer.use_vllm, trainer.tools = False, None
    trainer.rollout_func = lambda *_: {"prompt_ids": [[1]], "completion_ids": [[2]]}
    with pytest.raises(ValueError, match="rollout_func must return keys"):
        trainer._generate(["a prompt"])
    assert trainer.use_vllm is False


def test_rows_of_a_prompt_go_into_one_micro_batch():
    prompts = torch.tensor([[0, 5], [6, 7], [0, 5], [6, 7]])
    batches = [
        {"prompt_ids": prompts[rows], "advantages": torch.tensor(rows), "num_items_in_batch": torch.tensor(9)}
        for rows in ([0, 1], [2, 3])
    ]
    found = by_prompt(batches)
    assert [batch["advantages"].tolist() for batch in found] == [[0, 2], [1, 3]]
    assert all(int(batch["num_items_in_batch"]) == 9 for batch in found)
    images = [{**batch, "num_images": [1, 1]} for batch in batches]
    assert by_prompt(images) == images


def test_an_existing_trainer_of_a_users_class_is_accelerated(build: Build, folders: Callable[[str], str]):
    class Mine(trl.GRPOTrainer):
        """A user's own subclass."""

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log({**logs, "mine": 1.0}, *args)

    trainer, seen = build(Mine, model=folders("llama"), given=True)
    expected, oracle = build(trl.GRPOTrainer, model=folders("llama"), given=True)
    assert accelerate(trainer) is trainer
    assert isinstance(trainer, Mine)
    trainer.train()
    expected.train()
    assert seen.logs[0].pop("mine") == 1
    assert seen.logs[0]["loss"] == pytest.approx(oracle.logs[0]["loss"], abs=1e-5)
    for name, gradient in oracle.gradients.items():
        assert torch.allclose(seen.gradients[name], gradient, atol=1e-5), name
    assert trainer.live_models.get(trainer.model) is not None


def test_something_else_cannot_be_accelerated(folders: Callable[[str], str]):
    with pytest.raises(InputError, match="a LlamaForCausalLM cannot be accelerated"):
        accelerate(AutoModelForCausalLM.from_pretrained(folders("llama")))


def test_log_probs_at_another_temperature_are_not_compared_with_the_trainers(build: Build):
    trainer, _ = build(GRPOTrainer, temperature=0.5, generation_kwargs={"temperature": 2.0})
    ids, logps = trainer._generate_single_turn([[5, 6]] * 2, None, {}, 2)
    assert [len(one) for one in ids] == [len(one) for one in logps]
    assert {value for one in logps for value in one} == {None}


def test_a_users_own_draws_and_log_probs_are_kept(build: Build, folders: Callable[[str], str]):
    class Mine(trl.GRPOTrainer):
        """A user's own way to draw."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            return [[7, EOS_ID] for _ in prompt_ids], None

    trainer, _ = build(Mine)
    accelerate(trainer)
    assert trainer._generate_single_turn([[5], [6]], None, {}, 2)[0] == [[7, EOS_ID]] * 2
