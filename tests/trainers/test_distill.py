"""On-policy distillation: the student learns the teachers' distributions of its own tokens."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, demonstrations, distill_recipe, sft_recipe, training

from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError, ModelError


def divergence(logp_V: torch.Tensor, logq_V: torch.Tensor, beta: float) -> torch.Tensor:
    """Of the student's `logp_V` and a teacher's `logq_V`, in the convention of `algorithms.divergence`, by its sums."""
    p_V, q_V = logp_V.exp(), logq_V.exp()
    if beta == 0:
        return (q_V * (logq_V - logp_V)).sum(-1)
    if beta == 1:
        return (p_V * (logp_V - logq_V)).sum(-1)
    mixture_V = beta * q_V + (1 - beta) * p_V
    to_teacher = (q_V * (logq_V - mixture_V.log())).sum(-1)
    return beta * to_teacher + (1 - beta) * (p_V * (logp_V - mixture_V.log())).sum(-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"divergence": "forward_kl", "temperature": 0.7},
        {"divergence": "jensen_shannon", "beta": 0.3, "micro_batch_size": 1},
        {
            "teachers": [{"model": "tiny:llama"}, {"model": "tiny:mistral", "weight": 3.0}],
            "divergence": "jensen_shannon",
        },
    ],
)
def test_the_gradient_of_a_step_is_that_of_the_divergence_in_float64(tmp_path: Path, options: Any) -> None:
    started = Started(distill_recipe(tmp_path, distill=options), prompts=PROMPTS)
    started.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    student = copy.deepcopy(started.policy.module).double()
    teachers = [(copy.deepcopy(one.model.module).double(), one.weight) for one in started.learner.teachers]
    gradients: dict[str, torch.Tensor] = {}
    update = started.optimizer.step

    def recording(**arguments: Any) -> Any:
        named = started.policy.module.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return update(**arguments)

    started.optimizer.step = recording
    result = started.step(started.data.train[:2], 0)
    section = started.cfg.distill
    beta = {"forward_kl": 0.0, "jensen_shannon": section.beta, "reverse_kl": 1.0}[section.divergence]
    losses = []
    for group in result.batch.args[0]:
        for one in group.completions:
            ids = torch.tensor([[*group.prompt_token_ids, *one.token_ids]])
            places = slice(len(group.prompt_token_ids) - 1, -1)

            def logps(model: Any, ids: torch.Tensor = ids, places: slice = places) -> torch.Tensor:
                return torch.log_softmax(model(ids).logits[0, places] / section.temperature, -1)

            total = sum(weight for _, weight in teachers)
            parts = [
                weight / total * divergence(logps(student), logps(teacher).detach(), beta)
                for teacher, weight in teachers
            ]
            losses.append(sum(parts))
    loss = torch.cat(losses).mean()
    loss.backward()
    expected = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name].double(), gradient, atol=2e-5 * size, rtol=1e-3, msg=name)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_the_divergence_on_heldout_prompts_is_more_than_halved(tmp_path: Path, teacher: str, name: str) -> None:
    cfg = distill_recipe(
        tmp_path,
        prompts={"heldout_fraction": 0.25},
        rollout={"prompts_per_step": 6, "completions_per_prompt": 4, "max_new_tokens": 8},
        distill={"teachers": [{"model": teacher}], "divergence": name, "micro_batch_size": 24},
        optimizer={"learning_rate": 5e-3},
        run={"steps": 40, "eval_every": 20},
    )
    result = training(cfg, prompts=[f"{text} {i}" for text in PROMPTS for i in range(6)])
    before, after = result.summary["eval/loss_before"], result.summary["eval/loss"]
    assert after < before / 2, (before, after)
    assert result.summary["eval/teacher_agreement"] > result.summary["eval/teacher_agreement_before"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model that has learnt something, so that its distributions are not flat."""
    folder = tmp_path_factory.mktemp("teacher")
    cfg = sft_recipe(folder, sft={"num_epochs": 6})
    return str(training(cfg, demonstrations=demonstrations()).run_dir / "final")


def test_a_student_equal_to_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    result = training(distill_recipe(tmp_path, model={"seed": 0}, run={"steps": 1}), prompts=PROMPTS)
    assert result.metrics[0]["loss"] == 0
    assert result.metrics[0]["teacher_agreement"] == 1


def test_the_samples_have_no_rewards(tmp_path: Path) -> None:
    result = training(distill_recipe(tmp_path), prompts=PROMPTS)
    rows = (result.run_dir / "samples.jsonl").read_text()
    assert '"completion"' in rows
    assert "reward" not in rows


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    cfg = distill_recipe(tmp_path, distill={"teachers": [{"model": "smollm2"}]})
    with pytest.raises(ModelError, match="'smollm2' has another vocabulary than 'tiny:llama'"):
        Started(cfg, prompts=PROMPTS)


def test_a_recipe_needs_a_teacher() -> None:
    with pytest.raises(ConfigError, match="teachers"):
        load_recipe("distill", overrides={"distill.teachers": []})
