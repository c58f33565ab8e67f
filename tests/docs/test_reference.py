"""Reference pages are complete: every key of a recipe, every command, every metric that a run writes."""

import json
import re
from pathlib import Path

import pytest

import reference
from pages import ROOT
from tunesmith import train
from tunesmith.apps.cli.main import commands
from tunesmith.base.config.levels import shown_keys
from tunesmith.base.config.schema import RECIPES


@pytest.mark.parametrize("algorithm", RECIPES)
def test_every_key_of_a_recipe_is_in_the_tables_with_its_meaning(algorithm: str):
    rows = reference.config_markdown().splitlines()
    for key in shown_keys(RECIPES[algorithm]):
        start = f"| `{key.path}` | {reference.code(key.type)} | {reference.code(key.default)} |"
        (row,) = {row for row in rows if row.startswith(start)}  # PPO and GRPO have tables of their own
        assert key.description, f"{key.path} has no description"
        assert reference.escaped(key.description) in row
        assert len(re.split(r"(?<!\\)\|", row)) == 6, "a bar inside a cell must be escaped"


def test_every_command_is_on_the_page_of_commands():
    page = (ROOT / "docs" / "commands.md").read_text()
    shown = re.findall(r"```\{command-help\} ([a-z_ -]+)\n", page)
    assert sorted(shown) == sorted(commands())


def test_every_public_name_is_on_the_page_of_the_api_with_a_docstring():
    names = dict(reference.public_names())
    assert {"tunesmith.train.ppo", "tunesmith.train.grpo", "tunesmith.train.RunResult"} <= set(names)
    markdown = reference.api_markdown()
    for name, value in names.items():
        assert re.search(rf"^\.\. auto\w+:: {re.escape(name)}$", markdown, re.MULTILINE)
        assert (getattr(value, "__doc__", None) or "").strip(), f"{name} has no docstring"


def documented_metrics() -> list[str]:
    page = (ROOT / "docs" / "metrics.md").read_text()
    heads = re.findall(r"^- ((?:`[^`]+`,?\s+)*`[^`]+`):", page, re.MULTILINE)
    return [name for head in heads for name in re.findall(r"`([^`]+)`", head)]


def written_metrics(run_dir: Path) -> set[str]:
    return {name for line in (run_dir / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}


def undocumented(names: set[str]) -> set[str]:
    patterns = [re.sub(r"<\w+>", ".+", re.escape(name)) for name in documented_metrics()]
    return {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def test_every_metric_of_a_ppo_run_is_documented(tmp_path: Path):
    result = train.ppo(
        model="tiny:llama",
        prompts=["The film was", "The story is", "I liked", "The music"],
        reward="unique_chars",
        steps=1,
        run={"dir": str(tmp_path)},
        **{"rollout.max_new_tokens": 8, "rollout.prompts_per_step": 4, "prompts.heldout_fraction": 0.4},
    )
    assert undocumented(written_metrics(result.run_dir)) == set()


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_every_metric_of_a_dpo_run_is_documented(loss: str, tmp_path: Path):
    pairs = [{"prompt": f"Film {i} was", "chosen": " a joy.", "rejected": " dull."} for i in range(8)]
    result = train.dpo(
        model="tiny:llama",
        pairs=pairs,
        steps=1,
        dpo=loss,
        run={"dir": str(tmp_path)},
        **{"pairs.heldout_fraction": 0.4},
    )
    assert undocumented(written_metrics(result.run_dir)) == set()


def test_every_metric_of_an_sft_run_is_documented(tmp_path: Path):
    rows = [{"prompt": f"Film {i} was", "completion": " a joy."} for i in range(8)]
    result = train.sft(
        model="tiny:llama",
        demonstrations=rows,
        steps=1,
        run={"dir": str(tmp_path)},
        **{"demonstrations.heldout_fraction": 0.4},
    )
    assert undocumented(written_metrics(result.run_dir)) == set()


def test_every_metric_of_a_reward_run_is_documented(tmp_path: Path):
    pairs = [{"prompt": f"Film {i} was", "chosen": " a joy.", "rejected": " dull."} for i in range(8)]
    result = train.reward(
        model="tiny:llama",
        pairs=pairs,
        steps=1,
        run={"dir": str(tmp_path)},
        **{"pairs.heldout_fraction": 0.4},
    )
    assert undocumented(written_metrics(result.run_dir)) == set()


def test_every_metric_of_a_grpo_run_is_documented(tmp_path: Path):
    result = train.grpo(
        model="tiny:llama",
        prompts=["The film was", "The story is", "I liked", "The music"],
        reward="unique_chars",
        steps=1,
        run={"dir": str(tmp_path)},
        **{"rollout.max_new_tokens": 8, "rollout.prompts_per_step": 2, "prompts.heldout_fraction": 0.4},
    )
    assert undocumented(written_metrics(result.run_dir)) == set()
