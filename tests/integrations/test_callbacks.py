"""Callbacks of transformers' Trainer in runs of ours: their events, what they see, and what they may ask for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.trainer_callback import EarlyStoppingCallback
from trl import RichProgressCallback

from tunesmith import train
from tunesmith.base.core.errors import InputError
from tunesmith.base.runs.checkpoint import list_steps

PROMPTS = ["The film", "A story", "Once more", "They said"]


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def grpo(tmp_path: Path, callbacks: list[Any], **run: Any) -> train.RunResult:
    return train.grpo(
        model="tiny:llama",
        prompts=PROMPTS,
        reward=low_ids,
        steps=3,
        progress=False,
        callbacks=callbacks,
        rollout={"prompts_per_step": 2, "completions_per_prompt": 2, "max_new_tokens": 4},
        run={"dir": str(tmp_path / "runs"), "num_threads": 1, "checkpoint_every": 2, **run},
    )


class Noting(TrainerCallback):
    """Notes each event with the step, and what it was given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.given: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append(("train_begin", state.global_step))
        self.given = {**given, "args": args, "max_steps": state.max_steps}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step_begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step_end", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))
        assert state.log_history[-1]["step"] == state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.events.append(("evaluate " + " ".join(metrics), state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = list_steps(Path(args.output_dir) / "checkpoints")
        assert saved[-1] == state.global_step, "the checkpoint is on disk"
        self.events.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert (Path(args.output_dir) / "result.json").is_file()
        self.events.append(("train_end", state.global_step))


def test_events_come_in_order_with_model_arguments_and_metrics(tmp_path: Path) -> None:
    noting = Noting()
    result = grpo(tmp_path, [noting, RichProgressCallback])
    steps = [event for n in (1, 2, 3) for event in (("step_begin", n - 1), ("step_end", n))]
    steps.insert(5, ("save", 2))  # written while step 3 ran
    assert noting.events == [("train_begin", 0), *steps, ("save", 3), ("train_end", 3)]
    assert [row["reward"] for row in noting.logs] == [row["reward"] for row in result.metrics]
    assert noting.given["max_steps"] == 3
    assert noting.given["args"].output_dir == str(result.run_dir)
    assert noting.given["args"].learning_rate == 1e-5
    assert noting.given["model"].config.model_type == "llama"
    assert noting.given["processing_class"].eos_token_id == 2


def test_a_callback_ends_the_run_and_has_checkpoints_written(tmp_path: Path) -> None:
    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_save = state.global_step == 1
            control.should_training_stop = state.global_step == 2
            return control

    result = grpo(tmp_path, [Ends()], checkpoint_every=0)
    assert len(result.metrics) == 2
    assert list_steps(result.run_dir / "checkpoints") == [1]
    assert json.loads((result.run_dir / "result.json").read_text())["steps"] == 2
    assert (result.run_dir / "final" / "model.safetensors").is_file()


def test_early_stopping_reads_the_figures_of_evaluations(tmp_path: Path) -> None:
    noting = Noting()
    result = train.grpo(
        model="tiny:llama",
        prompts=PROMPTS,
        reward=lambda completions, **_: [0.0] * len(completions),
        steps=6,
        progress=False,
        callbacks=[noting, MetricOf("eval_reward"), EarlyStoppingCallback(early_stopping_patience=2)],
        rollout={"prompts_per_step": 2, "completions_per_prompt": 2, "max_new_tokens": 2},
        **{"prompts.heldout_fraction": 0.5, "run.dir": str(tmp_path / "runs"), "run.eval_every": 1},
    )
    assert ("evaluate eval_reward", 1) in noting.events
    assert len(result.metrics) == 2  # patience 2, and none is better than the first


class MetricOf(TrainerCallback):
    """Sets the metric of early stopping, which the Trainer's arguments have and a recipe has not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.metric_for_best_model, args.load_best_model_at_end, args.greater_is_better = self.name, True, True
        args.eval_strategy = "steps"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        if state.best_metric is None:  # which the Trainer itself keeps
            state.best_metric = metrics[self.name]


def test_sft_calls_them_too_and_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    rows = [{"prompt": "The film", "completion": f" was {n} hours long."} for n in range(8)]
    given = {"sft.demonstrations_per_step": 2, "run.dir": str(tmp_path / "runs"), "run.checkpoint_every": 2}
    first = Noting()
    result = train.sft(model="tiny:llama", demonstrations=rows, steps=2, progress=False, callbacks=[first], **given)
    assert first.events[-1] == ("train_end", 2)
    noting = Noting()
    train.resume(result.run_dir, demonstrations=rows, steps=3, progress=False, callbacks=[noting])
    assert [event for event in noting.events if event[0] != "save"] == [
        ("train_begin", 2),
        ("step_begin", 2),
        ("step_end", 3),
        ("train_end", 3),
    ]


def test_what_is_no_callback_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"callbacks holds a str; give objects or classes of transformers' Trainer"):
        grpo(tmp_path, ["wandb"])
    assert not (tmp_path / "runs").exists()
