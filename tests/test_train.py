"""The public Python API: its signatures are a promise, and it says whose argument was wrong."""

import inspect
from pathlib import Path

import pytest

import tunesmith
from tunesmith import train
from tunesmith.core.errors import ConfigError


@pytest.mark.parametrize("name", ["ppo", "best_of_n", "distill", "reward", "dpo", "sft"])
def test_names_kinds_and_defaults_are_pinned(name: str) -> None:
    parameters = inspect.signature(getattr(train, name)).parameters.values()
    seen = [(p.name, p.kind.name, None if p.default is p.empty else p.default) for p in parameters]
    prompts = ("prompts", "KEYWORD_ONLY", None)
    policy = [prompts, ("reward", "KEYWORD_ONLY", None)]
    named = {"reward": "pairs", "dpo": "pairs", "sft": "demonstrations"}
    data = {"ppo": policy, "best_of_n": policy, "distill": [("teacher", "KEYWORD_ONLY", None), prompts]}.get(
        name, [(named.get(name, ""), "KEYWORD_ONLY", None)]
    )
    assert seen == [
        ("model", "KEYWORD_ONLY", None),
        *data,
        ("recipe", "KEYWORD_ONLY", None),
        ("config", "KEYWORD_ONLY", None),
        ("steps", "KEYWORD_ONLY", None),
        ("progress", "KEYWORD_ONLY", True),
        ("overrides", "VAR_KEYWORD", None),
    ]
    assert inspect.signature(getattr(train, name)).return_annotation in (train.RunResult, "RunResult")


def test_the_result_has_what_the_docs_promise() -> None:
    names = {"run_dir", "metrics", "summary", "generate"}
    assert names <= {name for name in dir(train.RunResult) if not name.startswith("_")}
    assert list(inspect.signature(train.RunResult.generate).parameters) == [
        *("self", "prompt", "max_new_tokens", "temperature", "seed"),
    ]


def test_the_package_offers_train_and_names_it_when_something_else_is_asked_for() -> None:
    assert tunesmith.train is train
    with pytest.raises(AttributeError, match="it offers __version__, train"):
        _ = tunesmith.trian  # type: ignore[attr-defined]


def test_a_wrong_argument_is_named_with_a_suggestion_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rat: unknown key; did you mean optimizer\.learning_rate"
    ):
        train.ppo(model="tiny:llama", prompts=["x"], **{"optimizer.learning_rat": 1, "run.dir": str(tmp_path / "runs")})
    assert not (tmp_path / "runs").exists()
