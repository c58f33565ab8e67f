"""Self-distillation: the student with more in its context is its own teacher."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, distill_recipe, groups_of, sft_recipe, training
from test_distill import divergence

from tunesmith.base.config.algorithms.distill import DistillRecipe
from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError, DataError
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.contexts import Context
from tunesmith.engine.models.tokenizer import encode_prompt
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume

ROWS = [{"prompt": text, "privileged_context": f"Loudly, {number} times"} for number, text in enumerate(PROMPTS)]


def self_recipe(tmp_path: Path, distill: Any = None, **sections: Any) -> DistillRecipe:
    """The student as its own teacher."""
    section = {"teachers": [{"model": "self"}], **(distill or {})}
    return distill_recipe(tmp_path, distill=section, **sections)


def gradients_of(started: Started, step: Any) -> dict[str, torch.Tensor]:
    """The gradients that the first update of `step()` has."""
    found: dict[str, torch.Tensor] = {}
    update = started.optimizer.step

    def recording(**arguments: Any) -> Any:
        named = started.policy.module.named_parameters()
        found.update({name: p.grad.clone() for name, p in named if p.grad is not None and name not in found})
        return update(**arguments)

    started.optimizer.step = recording
    step()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"divergence": "forward_kl", "temperature": 0.7, "loss_normalization": "sequence", "micro_batch_size": 3},
        {"divergence": "jensen_shannon", "beta": 0.3, "self_weights": "initial"},
        {"divergence": "sampled_reverse_kl", "self_weights": "ema", "loss_normalization": "sequence"},
        {
            "teachers": [{"model": "self"}, {"model": "tiny:mistral", "weight": 3.0}],
            "context": {"template": "{prompt} {prompt}"},
        },
    ],
)
def test_the_gradient_of_a_step_is_that_of_a_twin_in_float64(tmp_path: Path, options: Any) -> None:
    started = Started(self_recipe(tmp_path, options), prompts=ROWS)
    started.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    student = copy.deepcopy(started.policy.module).double()
    section = started.cfg.distill
    teachers = [(copy.deepcopy(one.model.module).double(), one.weight) for one in started.learner.teachers]
    results: list[Any] = []
    found = gradients_of(started, lambda: results.append(started.step(started.data.train[:2], 0)))
    (result,) = results
    beta = {"forward_kl": 0.0, "jensen_shannon": section.beta}.get(section.divergence, 1.0)
    tokens, means = [], []
    for group in groups_of(result):
        text = section.context.template.replace("{prompt}", group.prompt.content)
        read = text.replace("{privileged_context}", str(group.prompt.columns["privileged_context"]))
        prompts = group.prompt_token_ids, encode_prompt(started.tokenizer, Prompt("", read))
        assert prompts[0] != prompts[1]
        for one in group.completions:

            def logps(model: Any, prompt_ids: Any, drawn: Any = one.token_ids) -> torch.Tensor:
                logits = model(torch.tensor([[*prompt_ids, *drawn]])).logits[0, len(prompt_ids) - 1 : -1]
                return torch.log_softmax(logits / section.temperature, -1)

            logp_TV = logps(student, prompts[0])
            summed = torch.zeros(len(one.token_ids), dtype=torch.float64)
            for model, weight in teachers:
                logq_TV, share = logps(model, prompts[1]).detach(), weight / sum(w for _, w in teachers)
                if section.divergence == "sampled_reverse_kl":
                    place_T1 = torch.tensor(one.token_ids)[:, None]
                    own_T, other_T = logp_TV.gather(1, place_T1)[:, 0], logq_TV.gather(1, place_T1)[:, 0]
                    ratio_T = (own_T - other_T).detach()
                    summed = summed + share * (ratio_T + ratio_T * (own_T - own_T.detach()))
                else:
                    summed = summed + share * divergence(logp_TV, logq_TV, beta)
            tokens.append(summed)
            means.append(summed.mean())
    loss = torch.stack(means).mean() if section.loss_normalization == "sequence" else torch.cat(tokens).mean()
    assert len({len(one) for one in tokens}) > 1
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(torch.cat(tokens).mean().item(), rel=1e-4, abs=1e-9)
    expected = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, atol=2e-5 * size, rtol=1e-3, msg=name)


def test_what_a_context_makes_the_model_say_it_says_without_the_context_afterwards(tmp_path: Path) -> None:
    """The student has learnt to say `no` to all but those that begin with `Say yes.`, which only the teacher reads."""
    texts = [f"{text} {number}" for text in PROMPTS for number in range(6)]
    asked = [{"prompt": f"Say yes.{text}", "completion": "yes yes yes"} for text in texts]
    others = [{"prompt": text, "completion": "no no no"} for text in texts]
    taught = sft_recipe(tmp_path / "sft", sft={"num_epochs": 15})
    model = str(training(taught, demonstrations=[*asked, *others]).run_dir / "final")
    cfg = self_recipe(
        tmp_path,
        {"context": {"template": "{privileged_context}{prompt}"}, "micro_batch_size": 24},
        model={"name": model, "seed": 0},
        prompts={"heldout_fraction": 0.25},
        rollout={"prompts_per_step": 6, "completions_per_prompt": 4, "max_new_tokens": 8},
        optimizer={"learning_rate": 3e-3},
        run={"steps": 40, "eval_every": 20},
    )
    rows = [{"prompt": text, "privileged_context": "Say yes."} for text in texts]
    result = training(cfg, prompts=rows)
    assert result.summary["eval/loss"] < result.summary["eval/loss_before"] / 5
    assert result.generate("The film 9", temperature=0.1, max_new_tokens=8).startswith("yes")


@pytest.mark.parametrize("weights", ["current", "initial", "ema"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, weights: str, dtype: str) -> None:
    options = {"self_weights": weights, **({"ema_rate": 0.3} if weights == "ema" else {})}
    runs: list[dict[str, torch.Tensor]] = []
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        cfg = self_recipe(
            tmp_path / name,
            {**options, "num_minibatches": 2},
            model={"dtype": dtype},
            run={"steps": steps[0], "checkpoint_every": 1},
        )
        result = training(cfg, prompts=ROWS)
        for later in steps[1:]:
            result = resume(result.run_dir, overrides={"run.steps": later}, inputs=Inputs(prompts=ROWS), progress=False)
        runs.append({f"{i}/{name}": value for i, row in enumerate(result.metrics) for name, value in _figures(row)})
    assert runs[0] == runs[1]


def _figures(row: Any) -> Any:
    return [(name, row[name]) for name in ("loss", "entropy", "teacher_agreement", "grad_norm") if name in row]


def test_the_average_follows_the_student_and_teaches(tmp_path: Path) -> None:
    started = Started(self_recipe(tmp_path, {"self_weights": "ema", "ema_rate": 0.25}), prompts=ROWS)
    before = {name: p.detach().clone() for name, p in started.policy.module.named_parameters()}
    started.step(started.data.train[:2], 0)
    (teacher,) = started.teachers
    now = dict(started.policy.module.named_parameters())
    averages = dict(teacher.model.module.named_parameters())
    assert any(not torch.equal(before[name], p) for name, p in now.items())
    for name, parameter in averages.items():
        torch.testing.assert_close(parameter.detach(), before[name].lerp(now[name].detach(), 0.25), msg=name)


def test_a_context_is_added_to_a_text_and_to_what_the_user_said_last() -> None:
    context = Context("reason", "({privileged_context}; {grade}) {prompt}")
    columns = {"reason": "too {long}", "grade": 3}
    assert context.added(Prompt("1", "The film", columns)).content == "(too {long}; 3) The film"
    said = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "And?"), ("assistant", "Well")]
    messages = tuple({"role": role, "content": text} for role, text in said)
    added = context.added(Prompt("2", messages, columns)).content
    assert [one["content"] for one in added] == ["Be kind.", "Hi", "Yes?", "(too {long}; 3) And?", "Well"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "A", "reason": "x"}, "no column `privileged_context`, which teachers read; the row's others are"),
        ({"prompt": "A", "privileged_context": " "}, "`privileged_context` is empty"),
        ({"prompt": "A", "privileged_context": True}, "`privileged_context` is true or false; teachers read text"),
        ({"prompt": "A", "privileged_context": "x" * 300}, "tokens with `privileged_context`, and the model's context"),
    ],
)
def test_rows_without_a_context_are_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Started(self_recipe(tmp_path), prompts=[*ROWS, row])
    kept = Started(self_recipe(tmp_path, prompts={"skip_bad": True, "heldout_fraction": 0.0}), prompts=[*ROWS, row])
    assert len(kept.data.train) == len(ROWS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distill.teachers": ["self", "self"]}, "teachers has `self` several times"),
        ({"distill.teachers": ["self"], "distill.context.template": "{privileged_context}"}, "has no {prompt}"),
        ({"distill.teachers": ["self"], "distill.context.template": "{prompt} {"}, "is no template"),
        ({"distill.teachers": ["self"], "distill.context.template": "{prompt.x}"}, "is no name of a text"),
        (
            {"distill.teachers": ["self"], "distill.self_weights": "ema", "scale": {"ranks": 2, "shard": "parameters"}},
            "no rank has all weights to average",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("distill", overrides=settings)
