"""Settings of a judge: a model that compares or grades answers by a rubric. They stand in a YAML file of their own."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from tunesmith.base.config.sections import NonNegative, Positive, PositiveInt, Section, Seed
from tunesmith.base.config.yaml_text import is_mapping, parse, read
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.core.http import problem_of_address

JUDGE = "judge:"
"""Prefix of the source of a judge: `judge:helpful.yaml`, `judge:http://localhost:8000`, or `judge:` and a model."""

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key of a server, if the settings name no other."""

_OURS = ("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "n", "stream")
_FORMS = "FILE.yaml, an address such as http://localhost:8000, or a model: run folder, hub id, folder"

RUBRIC = (
    "The better answer is more helpful: right, to the point, complete, and clearly written. Length alone is no merit."
)
"""The rubric where none is given."""


class JudgeSettings(Section):
    """A judge: which model, by which rubric, and what it may cost."""

    model: str
    """Address of a server with OpenAI's API (`http://localhost:8000`), or a model that our own engine draws from: run
    folder, hub id, local folder, GGUF file."""
    served_model: str = ""
    """Name of the model at the server; empty is the first that it lists."""
    key_variable: str = KEY_VARIABLE
    """Environment variable with the server's key; it is sent if it is set."""
    rubric: Annotated[str, Field(min_length=1)] = RUBRIC
    """What makes an answer good, in words for the judge."""
    mode: Literal["pairwise", "graded"] = "pairwise"
    """`pairwise`: two answers are compared, in both orders. `graded`: each answer gets a number on the scale."""
    scale: tuple[int, int] = (1, 5)
    """The lowest and the highest grade."""
    explain: bool = True
    """The judge gives reasons before its verdict. Without, it is asked for the verdict alone, and our own engine draws
    one token, among the possible verdicts."""
    opponents: PositiveInt | None = None
    """As a pairwise reward: number of completions after it in its group that a completion is compared with; null: all
    others. Each comparison is two requests."""
    reference: str = ""
    """As a pairwise reward: column of the prompts with an answer that each completion is compared with, in place of the
    others of its group."""
    answer_tokens: PositiveInt = 512
    """Tokens of the judge's answer at most."""
    answer_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Field of a request with that limit; OpenAI's models that think take the second one."""
    temperature: NonNegative | None = 0.0
    """Temperature of the judge's answers; null leaves it to the server."""
    seed: Seed = 0
    """Seed of the judge's answers."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of a request, such as `top_p` or `reasoning_effort`; of our own engine `top_p`, `top_k`, `min_p`,
    `repetition_penalty` and `logit_bias`."""
    tries: PositiveInt = 2
    """Requests for an answer in which no verdict can be read, with another seed each."""
    most_requests: PositiveInt | None = 10_000
    """Requests at most, of all that were ever sent for the file of answers; null is no limit."""
    most_tokens: PositiveInt | None = None
    """Tokens at most, read and drawn together, counted as `most_requests`; null is no limit."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Requests at a time."""
    timeout_s: Positive = 120.0
    """A request that takes longer counts as lost."""
    patience_s: NonNegative = 300.0
    """Time without any answer after which a server is given up."""
    answers: str = "judge_answers.db"
    """File in which answers and costs are kept. An answer that it has is not asked for again."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.scale
        if not 0 <= low < high:
            raise ValueError(f"the scale is {low} to {high}; give two whole numbers from 0 on, the lower one first")
        if taken := sorted(set(self.options) & {*_OURS}):
            raise ValueError(f"`options` has {', '.join(taken)}, which the judge sets itself; remove them")
        if not self.model.strip():
            raise ValueError("`model` is empty; give an address, or a model")
        if self.is_server and (problem := problem_of_address(self.model)):
            raise ValueError(f"`model` is {problem}")
        return self

    @property
    def is_server(self) -> bool:
        """True if the judge is asked over HTTP."""
        return self.model.lower().startswith(("http://", "https://"))

    @property
    def key(self) -> str:
        """The server's key, empty if there is none."""
        return os.environ.get(self.key_variable, "").strip()


def is_judge(source: object) -> bool:
    """True for the source of a judge."""
    return isinstance(source, str) and source.startswith(JUDGE)


def judge_file(source: str) -> Path | None:
    """The file of settings that the source of a judge names; None for an address or a model."""
    name = source.removeprefix(JUDGE)
    return Path(name).expanduser() if name.endswith((".yaml", ".yml")) else None


def judge_settings(source: str, **changes: Any) -> JudgeSettings:
    """The settings that `source`, with or without its prefix, names; `changes` that are not None replace some.

    Raises ConfigError for a file or value that cannot be used.
    """
    name, file = source.removeprefix(JUDGE), judge_file(source)
    if not name:
        raise ConfigError(f"the judge {source!r} names nothing; give {JUDGE} and {_FORMS}")
    values: Mapping[str, object] = {"model": name}
    if file is not None:
        data = parse(read(file), str(file)).data
        if not is_mapping(data):
            raise ConfigError(
                f"{file} holds no settings of a judge; write lines such as `model: http://localhost:8000`"
            )
        values = data
    where = "" if file is None else f"{file}: "
    try:
        return JudgeSettings.model_validate({**values, **{k: v for k, v in changes.items() if v is not None}})
    except ValidationError as error:
        raise ConfigError(*(where + _problem(one) for one in error.errors())) from None


def _problem(details: Any) -> str:
    place = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        return f"{place} is no setting of a judge; there are {', '.join(JudgeSettings.model_fields)}"
    if details["type"] == "missing":
        return f"`{place}` is missing; give {_FORMS.removeprefix('FILE.yaml, ')}"
    message = str(details["msg"]).removeprefix("Value error, ")
    return message if not place else f"{place}: {message} ({details['input']!r} given)"
