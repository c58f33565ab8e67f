"""Callbacks of transformers' Trainer, told of the events of a run of ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.core.errors import InputError
from tunesmith.learn.trainers.api import Learner, Listener, Wishes


class _NoFlow(DefaultFlowCallback):
    """Stands where the handler wants a DefaultFlowCallback, and asks for nothing: the recipe says when to save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """The control as it is."""
        return control


class TransformersCallbacks(Listener):
    """Calls `on_train_begin`, `on_step_begin`, `on_step_end`, `on_log`, `on_evaluate`, `on_save` and `on_train_end`.

    `args` has the run folder, the learning rate, the seed and the steps of the recipe; `state.log_history` has the
    metrics of each step. `control.should_training_stop` ends the run after the step, `should_save` writes a checkpoint.
    Raises InputError for what is no TrainerCallback.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | TrainerCallback | type[TrainerCallback],
    ) -> None:
        if not isinstance(callbacks, Sequence):
            callbacks = [cast(Any, callbacks)]
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        for callback in self._callbacks:
            if not isinstance(callback, TrainerCallback):
                raise InputError(
                    f"callbacks holds a {type(callback).__name__}; give objects or classes of transformers' "
                    "TrainerCallback"
                )

    def begin(self, cfg: Recipe, learner: Learner, folder: Path, first_step: int, num_steps: int) -> None:
        """Call `on_train_begin`, and `on_step_begin` of the first step."""
        self._args = TrainingArguments(
            output_dir=str(folder),
            learning_rate=cfg.optimizer.learning_rate,
            seed=cfg.run.seed,
            max_steps=num_steps,
            logging_steps=1,
            save_strategy="steps" if cfg.run.checkpoint_every else "no",
            save_steps=cfg.run.checkpoint_every or num_steps,
            report_to=[],
            run_name=cfg.run.name,
        )
        self._state = TrainerState(global_step=first_step, max_steps=num_steps, logging_steps=1)
        model, tokenizer = next(iter(learner.modules.values())), getattr(learner, "tokenizer", None)
        self._handler = CallbackHandler([_NoFlow(), *self._callbacks], model, tokenizer, learner.optimizer, None)
        self._control = TrainerControl()
        self._call("train_begin")
        self._call("step_begin")

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> Wishes:
        """Call `on_step_end`, `on_log`, `on_evaluate` if there are figures of an evaluation, and `on_step_begin`."""
        self._state.global_step = step
        self._call("step_end")
        self._state.log_history.append({**metrics, "step": step})
        self._call("log", logs={name: value for name, value in metrics.items() if name != "step"})
        evaluation = {name.replace("eval/", "eval_"): value for name, value in metrics.items() if name[:5] == "eval/"}
        if evaluation:
            self._call("evaluate", metrics=evaluation)
        wishes = Wishes(save=self._control.should_save, stop=self._control.should_training_stop)
        if not wishes.stop and step < self._state.max_steps:
            self._call("step_begin")
        return wishes

    def saved(self, step: int) -> None:
        """Call `on_save`."""
        self._call("save")

    def ended(self) -> None:
        """Call `on_train_end`."""
        self._call("train_end")

    def _call(self, event: str, **given: Any) -> None:
        self._control = getattr(self._handler, f"on_{event}")(self._args, self._state, self._control, **given)
