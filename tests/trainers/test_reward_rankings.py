"""The reward trainer on rankings: both losses learn, each completion is scored once, the data's facts are kept."""

from pathlib import Path

import pytest
import torch
from recipes import Started, reward_recipe, training

from tunesmith.base.core.errors import ConfigError

ENDS = ("wow!!! so good!", "good! yes.", "it is all right.", "meh, not this.")


def rankings(count: int = 24) -> list[dict[str, object]]:
    """Rankings in which the text with more exclamation marks is the better one."""
    return [{"prompt": f"The film {n}", "completions": [f"{end} {n}" for end in ENDS]} for n in range(count)]


@pytest.mark.parametrize("form", ["pairs", "plackett_luce"])
def test_it_learns_rankings_of_prompts_it_has_not_seen(form: str, tmp_path: Path) -> None:
    cfg = reward_recipe(tmp_path, pairs={"heldout_fraction": 0.25, "rankings": form}, reward_model={"num_epochs": 6})
    result = training(cfg, pairs=rankings())
    assert float(str(result.summary["eval/accuracy"])) > 0.9
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert float(str(result.summary["eval/num_pairs"])) % 6 == 0  # four completions are six pairs


def test_a_ranking_of_two_moves_the_model_as_its_pair_does(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "chosen": f"wow! {n}", "rejected": f"meh {n}", "tie": n == 3} for n in range(8)]

    def weights(form: str) -> torch.Tensor:
        cfg = reward_recipe(
            tmp_path, pairs={"rankings": form, "heldout_fraction": 0}, reward_model={"center_coef": 0.1}
        )
        state = Started(cfg, pairs=rows)
        state.step(state.data.train)
        return torch.cat([parameter.detach().flatten().float() for parameter in state.model.parameters()])

    torch.testing.assert_close(weights("plackett_luce"), weights("pairs"), atol=1e-5, rtol=0)


def test_micro_batches_do_not_change_the_loss_of_a_step_on_rankings(tmp_path: Path) -> None:
    def metrics(size: int) -> dict[str, float]:
        cfg = reward_recipe(tmp_path, pairs={"rankings": "plackett_luce"}, reward_model={"micro_batch_size": size})
        state = Started(cfg, pairs=rankings())
        return state.step(state.data.train[:8]).metrics

    assert metrics(3) == pytest.approx(metrics(8), rel=1e-3)


def test_margins_of_pairs_are_refused_under_plackett_luce(tmp_path: Path) -> None:
    cfg = reward_recipe(tmp_path, pairs={"rankings": "plackett_luce"}, reward_model={"margin": "column"})
    with pytest.raises(ConfigError, match="margin: column needs pairs"):
        Started(cfg, pairs=rankings())


def test_the_facts_of_the_data_are_kept_in_the_state(tmp_path: Path) -> None:
    rows = [*rankings(4), {"prompt": "A", "chosen": "b", "rejected": "b"}]
    cfg = reward_recipe(tmp_path, pairs={"skip_bad": True, "heldout_fraction": 0})
    state = Started(cfg, pairs=rows, heldout_pairs=rankings(1))
    assert state.data.facts.tally.reasons == {"same completions": 1}
    assert [finding.name for finding in state.data.facts.findings] == ["bad_rows", "leak"]
