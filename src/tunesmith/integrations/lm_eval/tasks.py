"""Tasks of lm-eval: found by name or in a folder, and answered by a model."""

import fnmatch
import random
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval import evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.core.errors import InputError, MissingDependencyError
from tunesmith.integrations.lm_eval.model import TunesmithLM
from tunesmith.learn.evaluation.benchmarks import Figure, figures_of

_OF_WRONG_FILES = AssertionError, LookupError, TypeError, ValueError
"""What lm-eval raises where a row or a task's file is not as it expects."""

_BOOTSTRAPS = 1_000
"""Resamples for the standard error of metrics that are no mean, such as BLEU."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Tasks and how they are asked.

    `names` are tasks, groups or tags of lm-eval or of the folder `include_path`, patterns with `*`, or YAML files of
    tasks. None leaves examples to the task, and asks all questions. `runs_code`: tasks may execute what the model
    wrote.
    """

    names: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    uses_chat_template: bool = False
    runs_code: bool = False


class Tasks:
    """The tasks that `settings` name.

    Raises:
        InputError: there is no such task.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        folder = None if settings.include_path is None else str(settings.include_path)
        if folder is not None:  # asked first: lm-eval reads thousands of files to know its own tasks
            self._manager = TaskManager(include_path=folder, include_defaults=False)
            self._known: list[str] = self._manager.all_subtasks  # a group may have tasks of lm-eval's own
        if folder is None or not all(map(self._found, settings.names)):
            self._manager = TaskManager(include_path=folder)
            self._known = self._manager.all_tasks
        missing = [name for name in settings.names if not self._found(name)]
        if missing:
            where = "" if folder is None else f" nor in {folder}"
            hint = did_you_mean(missing[0], self._known)
            raise InputError(
                f"there is no task {missing[0]!r} in lm-eval{where}{hint}; `lm-eval ls tasks` lists lm-eval's own, and "
                "--include-path names a folder with YAML files of others"
            )
        self._names = list(dict.fromkeys(found for name in settings.names for found in self._found(name)))

    def _found(self, name: str) -> list[str]:
        """The tasks or the file that `name` stands for."""
        if name in self._known or (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            return [name]
        return fnmatch.filter(self._known, name) if "*" in name else []

    def load(self) -> Any:
        """lm-eval's tasks and groups with their data, which `evaluate` uses up; with lm-eval's own seeds.

        Raises:
            InputError: data cannot be read, or a task's files are wrong.
            MissingDependencyError: a task needs another package.
        """
        random.seed(DEFAULT_RANDOM_SEED)  # some tasks shuffle
        np.random.seed(DEFAULT_OTHER_SEED)
        names = ", ".join(self._names)
        try:
            loaded = self._manager.load(self._names)
        except ImportError as error:
            raise MissingDependencyError(f"the tasks {names} need a package that is not there: {error}") from error
        except OSError as error:
            raise InputError(
                f"the data of the tasks {names} cannot be read: {error}\nlm-eval's own tasks load them from the hub; "
                "without a network give tasks over files of yours with --include-path"
            ) from error
        except (DatasetsError, StopIteration) as error:  # the latter for a file without a row
            said = f"{error.__cause__ or error}" or "a file has no rows"
            raise InputError(f"the data of the tasks {names} cannot be read: {said}; mend the files") from error
        except TemplateError as error:
            raise self._unfit(error) from error
        except _OF_WRONG_FILES as error:
            raise InputError(f"the tasks {names} cannot be loaded: {type(error).__name__}: {error}") from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) and not self._settings.runs_code:
                raise InputError(f"the task {name} executes code that the model wrote; allow it with --runs-code")
            own = task.get_config("num_fewshot")
            if self._settings.num_fewshot is not None and own != 0:  # 0 says that the task's text allows no others
                task.set_config(key="num_fewshot", value=self._settings.num_fewshot)
            elif own is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        return loaded

    def check(self, lm: TunesmithLM, loaded: Any) -> None:
        """Check, before the first question is asked, that `lm` can draw the texts of all tasks.

        Raises:
            InputError: a task asks for what the model or the engine does not have.
        """
        for name, task in loaded["tasks"].items():
            if task.get_config("output_type") == "generate_until":
                lm.sampling_of(task.get_config("generation_kwargs") or {}, name)

    def evaluate(self, lm: TunesmithLM, loaded: Any) -> list[Figure]:
        """The figures of `lm` on what `load` has returned.

        Raises:
            InputError: a task asks for what the model or the engine does not have, its rows are damaged, or it has no
            figure.
        """
        settings = self._settings
        try:
            results = evaluate(
                lm,
                loaded,
                limit=settings.limit,
                bootstrap_iters=_BOOTSTRAPS,
                apply_chat_template=settings.uses_chat_template,
                fewshot_as_multiturn=True,
                confirm_run_unsafe_code=settings.runs_code,
            )
        except TemplateError as error:
            raise self._unfit(error) from error
        except _OF_WRONG_FILES as error:
            frames = traceback.walk_tb(error.__traceback__ and error.__traceback__.tb_next)
            if any(frame.f_globals.get("__name__", "").startswith("tunesmith.") for frame, _ in frames):
                raise  # no fault of a task
            raise InputError(
                f"the tasks {', '.join(self._names)} cannot be evaluated: {type(error).__name__}: {error}; look at the "
                "rows and metrics that they name"
            ) from error
        if not (figures := figures_of(results)):
            raise InputError(
                f"the tasks {', '.join(self._names)} have no figure: lm-eval knows none of their metrics, or all "
                "questions were left out; `metric_list` in their files names the metrics"
            )
        return figures

    def _unfit(self, error: TemplateError) -> InputError:
        return InputError(f"a template of the tasks {', '.join(self._names)} does not fit: {error}")
