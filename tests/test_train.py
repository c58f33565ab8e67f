"""The public Python API: its signatures are a promise, and it says whose argument was wrong."""

import inspect
import json
from pathlib import Path

import pytest

import tunesmith
from tunesmith import train
from tunesmith.base.core.errors import ConfigError


@pytest.mark.parametrize("name", ["ppo", "best_of_n", "distill", "reward", "dpo", "sft"])
def test_names_kinds_and_defaults_are_pinned(name: str) -> None:
    parameters = inspect.signature(getattr(train, name)).parameters.values()
    seen = [(p.name, p.kind.name, None if p.default is p.empty else p.default) for p in parameters]
    prompts = ("prompts", "KEYWORD_ONLY", None)
    names = ("reward", "tools", "environment_factory")
    policy = [prompts, *((name, "KEYWORD_ONLY", None) for name in names)]
    with_demonstrations = [*policy, ("demonstrations", "KEYWORD_ONLY", None)]
    named = {"reward": "pairs", "dpo": "pairs", "sft": "demonstrations"}
    data = {
        "ppo": with_demonstrations,
        "best_of_n": policy,
        "distill": [("teacher", "KEYWORD_ONLY", None), prompts],
    }.get(name, [(named.get(name, ""), "KEYWORD_ONLY", None)])
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


def test_every_public_name_is_loaded_from_its_module() -> None:
    offered = {name: getattr(tunesmith, name) for name in tunesmith.__all__}
    assert offered["train"] is train
    assert set(tunesmith._MODULE_OF) == set(offered) - {"__version__", "train"}
    source = Path(tunesmith.__file__).read_text(encoding="utf-8")
    for module, names in tunesmith._NAMES.items():  # what pyright sees is what is loaded
        assert f"    from {module} import {', '.join(names.split())}\n" in source


def test_a_name_that_is_not_offered_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"it offers .*Scorer.* __version__, .* train"):
        _ = tunesmith.trian  # type: ignore[attr-defined]


def test_a_wrong_argument_is_named_with_a_suggestion_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rat: unknown key; did you mean optimizer\.learning_rate"
    ):
        train.ppo(model="tiny:llama", prompts=["x"], **{"optimizer.learning_rat": 1, "run.dir": str(tmp_path / "runs")})
    assert not (tmp_path / "runs").exists()


def test_data_may_be_the_settings_of_its_section(tmp_path: Path) -> None:
    rows = [{"prompt": f"film {i}", "chosen": "a joy", "rejected": "dull"} for i in range(20)]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(tmp_path / "one.jsonl"), {"source": str(tmp_path / "two.jsonl"), "weight": 2}]
    fixed = {"run.dir": str(tmp_path / "runs"), "progress": False}
    section = {"sources": sources, "heldout_fraction": 0.4}
    result = train.reward(model="tiny:llama", pairs=section, steps=1, **fixed)
    assert {"eval/one/accuracy", "eval/two/accuracy"} <= result.metrics[-1].keys()
    columns = {"prompt": ["a", "b"], "chosen": ["x", "y"], "rejected": ["u", "v"]}
    fixed["pairs.heldout_fraction"] = 0
    assert train.reward(model="tiny:llama", pairs=columns, steps=1, **fixed).summary["num_pairs"] == 2
    with pytest.raises(ConfigError, match=r"pairs\.sources\.0\.weight: .*argument pairs"):
        wrong = {"sources": [{"source": str(tmp_path / "one.jsonl"), "weight": 0}]}
        train.reward(model="tiny:llama", pairs=wrong, **fixed)
