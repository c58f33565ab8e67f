"""The page of variants: every entry of its list loads, and trains two steps with what it names."""

import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import pytest

from pages import ROOT
from tunesmith.base.config.load import load_recipe, parse_overrides
from tunesmith.base.config.recipe import ENVIRONMENT_REWARD
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import run

PAGE = ROOT / "docs" / "variants.md"
PROMISED = ("PPO", "dual-clip PPO", "REINFORCE++", "REINFORCE++-baseline", "GRPO", "Dr. GRPO", "RLOO", "DAPO", "GSPO")
PROMISED += ("CISPO", "BNPO", "GDPO", "SAPO", "MaxRL", "GPG", "DPPO by total variation", "DPPO by binary KL", "GMPO")
PROMISED += ("OPO", "GFPO", "pass@k", "IcePop", "off-policy sequence mask", "a fifth of the tokens")
PROMISED += ("PPO-ptx", "ReMax", "Clip-Cov", "KL-Cov", "VC-PPO", "VAPO", "the length reward of Kimi k1.5")
PROMISED += ("MT-GRPO", "GiGPO", "ECHO")
PROMPTS = ["The film", "A story", "Once more", "They said"]
SMALL = {
    "model.name": "tiny:llama",
    "model.dtype": "float32",
    "run.steps": 2,
    "run.num_threads": 1,
    "rollout.prompts_per_step": 2,
    "rollout.max_new_tokens": 6,
    "reward": [
        {"source": "unique_chars"},
        {"source": "overlong", "arguments": {"max_completion_len": 6, "soft_punish_cache": 2}},
    ],
}


class Echo:
    """A game that answers by a number of few values, and rewards by what was said."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        return str(len(action) % 2), sum(map(ord, action)) % 5, False, False, {}

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, object]]:
        return "Say something.", {}


@dataclass(frozen=True)
class Row:
    """A paper, its trainer, and the flags of the page."""

    paper: str
    trainer: str
    flags: str


def rows() -> list[Row]:
    found = re.findall(r"^- \*\*(.+?)\*\*:\s+`(ppo|grpo)\s(--[^`]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [Row(*cells) for cells in found]


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_paper_has_an_entry(name: str):
    assert any(re.match(rf"{re.escape(name)}(?=[ ,])", row.paper) for row in rows())


def by_day(row: Row) -> bool:
    """Whether `make test` trains with an entry too: one in five, which their names alone decide."""
    return crc32(row.paper.encode()) % 5 == 0


@pytest.mark.parametrize("row", rows(), ids=[row.paper for row in rows()])
def test_the_settings_of_an_entry_load(row: Row):
    load_recipe(row.trainer, overrides=SMALL | parse_overrides(row.trainer, shlex.split(row.flags)).values)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.paper, marks=() if by_day(row) else pytest.mark.nightly) for row in rows()],
)
def test_the_settings_of_an_entry_load_and_train_two_steps(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    overrides = SMALL | {"run.dir": str(tmp_path)} | parse_overrides(row.trainer, shlex.split(row.flags)).values
    known = (f"{row.trainer}.", "rollout.", "ptx.", "demonstrations.", "environment.reply_loss_coef")
    assert all(key.startswith(known) for key in overrides.keys() - SMALL.keys() - {"run.dir"})
    if overrides.get("grpo.scale") == "mean":  # for rewards of 0 or more
        overrides["reward"] = [{"source": "unique_chars"}]
    if "grpo.pass_at" in overrides:  # for rewards of 0 and 1
        overrides["reward"] = [{"source": "./right.py:is_odd"}]
        monkeypatch.chdir(tmp_path)
        (tmp_path / "right.py").write_text(
            "def is_odd(completions, **_):\n    return [len(c) % 2 for c in completions]\n"
        )
    if "demonstrations.source" in overrides:
        monkeypatch.chdir(tmp_path)
        rows = [json.dumps({"prompt": prompt, "completion": " goes on"}) for prompt in PROMPTS]
        (tmp_path / "demonstrations.jsonl").write_text("\n".join(rows))
    inputs = Inputs(prompts=PROMPTS)
    if overrides.keys() & {"grpo.turn_advantages", "environment.reply_loss_coef"}:
        inputs = Inputs(prompts=PROMPTS, environment_factory=Echo)
        overrides |= {"environment.max_turns": 3, "reward": [ENVIRONMENT_REWARD]}
    recipe = load_recipe(row.trainer, overrides=overrides).recipe
    result = run(recipe, inputs, progress=False)
    assert len(result.metrics) == 2
    assert all(math.isfinite(value) for metrics in result.metrics for value in metrics.values())
    assert result.metrics[0]["updates"] >= 1
