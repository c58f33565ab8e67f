"""Self-distillation against TRL's trainers: the same prompts of the teacher, and the same loss and gradients."""

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started
from test_self_distill import self_recipe
from torch.nn.utils.rnn import pad_sequence

datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")

SAID = ["too long", "the second is kinder", "no", "it begins well, and ends nowhere"]
TEMPLATES = {
    "sdpo": ("(A reader: {privileged_context}.) {prompt}", "{feedback}{prompt}"),
    "sdft": ("{prompt} ({privileged_context})", "{prompt} ({privileged_context})"),
}
ALPHAS = {"forward_kl": 0.0, "jensen_shannon": 0.3, "reverse_kl": 1.0, "sampled_reverse_kl": 1.0}


def trl_trainer(kind: str, module: Any, tokenizer: Any, rows: list[dict[str, str]], divergence: str, out: Path) -> Any:
    """TRL's SDPOTrainer or SDFTTrainer, whose teacher is the live student."""
    warnings.simplefilter("ignore")
    package, name = importlib.import_module(f"trl.experimental.{kind}"), kind.upper()
    own = (
        {"reprompt_template": TEMPLATES[kind][1], "feedback_template": "(A reader: {feedback_raw}.) "}
        | {"include_environment_feedback": True, "use_successful_as_teacher": False}
        if kind == "sdpo"
        else {"teacher_prompt_template": TEMPLATES[kind][1]}
    )
    config = getattr(package, f"{name}Config")(
        output_dir=str(out),
        per_device_train_batch_size=len(rows),
        num_generations=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        teacher_model_kind="live",
        distillation_mode="sampled_token" if divergence == "sampled_reverse_kl" else "full_logits",
        distillation_alpha=ALPHAS[divergence],
        **own,
    )
    rewards = {"reward_funcs": [_nothing]} if kind == "sdpo" else {}
    data = datasets.Dataset.from_list(rows)
    made = getattr(package, f"{name}Trainer")
    trainer = made(model=module, args=config, train_dataset=data, processing_class=tokenizer, **rewards)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _nothing(completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jensen_shannon", "sampled_reverse_kl"])
@pytest.mark.parametrize("kind", ["sdpo", "sdft"])
def test_loss_and_gradients_are_those_of_trls_trainer(tmp_path: Path, kind: str, divergence: str) -> None:
    rows = [{"prompt": text, "privileged_context": said} for text, said in zip(PROMPTS, SAID, strict=True)]
    options = {
        "context": {"template": TEMPLATES[kind][0]},
        "divergence": divergence,
        "loss_normalization": "sequence",
        **({"beta": 0.3} if divergence == "jensen_shannon" else {}),
    }
    started = Started(self_recipe(tmp_path, options, prompts={"heldout_fraction": 0.0}), prompts=rows)
    started.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    module, tokenizer = copy.deepcopy(started.policy.module).double(), started.tokenizer
    groups = started.draw(started.data.train, 2, "rollout", 0)
    drawn = [(group, one) for group in groups for one in group.completions]
    ours, stats = started.micro_batch_loss(started.packed(groups), len(drawn))
    ours.backward()
    found = {name: p.grad for name, p in started.policy.module.named_parameters() if p.grad is not None}
    asked = [
        {"prompt": str(group.prompt.content), "privileged_context": str(group.prompt.columns["privileged_context"])}
        for group, _ in drawn
    ]

    trainer = trl_trainer(kind, module, tokenizer, asked, divergence, tmp_path / "trl")
    prompt_ids = trainer._tokenize_prompts([one["prompt"] for one in asked])
    assert [tuple(ids) for ids in prompt_ids] == [group.prompt_token_ids for group, _ in drawn]
    prompts, masks = (_padded(rows, "left") for rows in (prompt_ids, [[1] * len(ids) for ids in prompt_ids]))
    ids = [one.token_ids for _, one in drawn]
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": masks,
        "completion_ids": _padded(ids, "right"),
        "completion_mask": _padded([[1] * len(one) for one in ids], "right"),
    }
    texts, said = [one["prompt"] for one in asked], [one["privileged_context"] for one in asked]
    if kind == "sdpo":
        batch |= trainer.teacher_context_builder.build(batch, texts, torch.zeros(len(texts)), feedbacks=said)
    else:
        batch |= trainer.teacher_context_builder.build(texts, said, batch["completion_ids"], batch["completion_mask"])
    loss = trainer.compute_loss(module, batch)
    loss.backward()
    logged = trainer._metrics["eval"]["self_distillation/distillation_loss"][0]
    if divergence != "sampled_reverse_kl":  # TRL's number is then one that has the gradient alone
        assert ours.item() == pytest.approx(loss.item(), rel=1e-4)
        assert stats.metrics()["loss"] == pytest.approx(logged, rel=1e-4)
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, atol=2e-5 * size, rtol=1e-3, msg=name)


def _padded(rows: Any, side: str) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)
