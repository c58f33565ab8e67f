"""Votes weighed by what is known of their raters, in reward models and DPO."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import Started, dpo_recipe, reward_recipe, training

from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Pair, Prompt, Text
from tunesmith.learn.algorithms.direct_loss import PairLogps, kto, paired
from tunesmith.learn.algorithms.preference_loss import bradley_terry
from tunesmith.learn.trainers.rater_weights import VotesOfRaters

GOOD = [" a joy to see", " warm and wise", " the best of all", " so well made"]
POOR = [" a bore to see", " cold and dull", " the worst of all", " so badly made"]


def rows_of(kinds: list[str], num_items: int, votes_per_item: int = 2, *, has_rater: bool = True) -> list[Pair]:
    """Votes on pairs of a good and a poor ending; each rater is right in 9 of 10 votes, but for reversed ones."""
    random = np.random.default_rng(0)
    found: list[Pair] = []
    for number in range(num_items):
        good, poor = f"{GOOD[number % 4]} {number}", f"{POOR[random.integers(4)]} {number}"
        for rater in random.permutation(len(kinds))[:votes_per_item]:
            is_right = (random.random() < 0.9) != (kinds[rater] == "reversed")
            columns = {"rater": f"rater {rater}", "chosen_side": str(random.choice(["left", "right"]))}
            sides = (good, poor) if is_right else (poor, good)
            prompt = "The film was" if number % 2 else "The story was"
            found.append(Pair(Prompt(str(len(found)), prompt, columns if has_rater else {}), *sides))
    return found


def share_right(rows: list[Pair]) -> float:
    return float(np.mean([str(row.chosen).startswith(tuple(GOOD)) for row in rows]))


def test_votes_of_reversed_raters_are_exchanged_and_weights_have_the_mean_one() -> None:
    given = rows_of(["good"] * 6 + ["reversed"] * 2, 200)
    weigh = VotesOfRaters()
    rows = weigh(given)
    assert share_right(rows) > share_right(given) + 0.1
    assert np.mean([row.weight for row in rows]) == pytest.approx(1.0)
    assert weigh.facts["num_raters"] == 8
    assert "those of 2 count the other way" in weigh.said
    kept = [row for row in given if row.prompt.columns["rater"] != "rater 6"]
    assert {row.prompt.id for row in kept} <= {row.prompt.id for row in rows}


def test_equally_good_raters_change_nothing() -> None:
    given = rows_of(["good"] * 8, 200)
    rows = VotesOfRaters()(given)
    assert [(row.chosen, row.rejected) for row in rows] == [(row.chosen, row.rejected) for row in given]
    assert np.std([row.weight for row in rows]) < 0.1


def test_conversations_are_weighed_as_texts_are() -> None:
    def turn(role: str, text: Text) -> Text:
        return ({"role": role, "content": str(text)},)

    def in_turns(row: Pair) -> Pair:
        prompt = Prompt(row.prompt.id, turn("user", row.prompt.content), row.prompt.columns)
        return Pair(prompt, turn("assistant", row.chosen), turn("assistant", row.rejected))

    given = rows_of(["good"] * 6 + ["reversed"] * 2, 60)
    weights = [row.weight for row in VotesOfRaters()(given)]
    assert [row.weight for row in VotesOfRaters()([in_turns(row) for row in given])] == pytest.approx(weights)


def test_ties_stay_as_they_are_and_rows_without_a_rater_are_those_of_one() -> None:
    tie = Pair(Prompt("tie", "The film was"), " a", " b", tie=True)
    unknown = Pair(Prompt("unknown", "The film was"), " a", " c")
    rows = VotesOfRaters()([tie, *rows_of(["good"] * 4, 60), unknown])
    assert rows[0] == tie
    assert rows[-1].prompt.id == "unknown"
    assert rows[-1].weight > 0


def test_ties_alone_have_nothing_to_weigh() -> None:
    rows = [Pair(Prompt(f"{i}", f"Prompt {i}", columns={"rater": "ann"}), " a", " b", tie=True) for i in range(3)]
    weigh = VotesOfRaters()
    assert weigh(rows) == rows and weigh.facts == {}


def test_rows_that_name_no_rater_are_refused(tmp_path: Path) -> None:
    recipe = reward_recipe(tmp_path, pairs={"raters": "estimated"})
    with pytest.raises(DataError, match="no row says who voted in a column `rater`"):
        training(recipe, pairs=rows_of(["good"] * 2, 20, has_rater=False))


@pytest.mark.parametrize("how", ["equal", "estimated"])
def test_a_reward_model_learns_what_most_raters_mean(tmp_path: Path, how: str) -> None:
    judged = [Pair(Prompt(f"j{n}", "The film was"), f"{GOOD[n % 4]} {n}", f"{POOR[n % 4]} {n}") for n in range(40)]
    recipe = reward_recipe(tmp_path, pairs={"raters": how}, reward_model={"num_epochs": 2})
    done = training(recipe, pairs=rows_of(["good"] * 5 + ["reversed"] * 4, 150), heldout_pairs=judged)
    found: Any = done.summary
    if how == "estimated":
        assert found["eval/accuracy"] > 0.85
        assert found["num_raters"] == 9
        assert 0 < found["num_effective_votes"] < 300
    else:
        assert "num_raters" not in found


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_dpo_learns_with_the_weights(tmp_path: Path, loss: str) -> None:
    def first_gradient(how: str) -> tuple[torch.Tensor, list[float]]:
        recipe = dpo_recipe(tmp_path, pairs={"raters": how, "heldout_fraction": 0.0}, dpo={"loss": loss})
        state = Started(recipe, pairs=rows_of(["good"] * 5 + ["reversed"], 40))
        state.step(state.data.train[:8])
        weights = [unit.weight for unit in state.data.train]
        return torch.cat([one.detach().flatten() for one in state.learner.policy.module.parameters()]), weights

    (equal, ones), (weighed, weights) = first_gradient("equal"), first_gradient("estimated")
    assert set(ones) == {1.0}
    assert len(set(weights)) > 1
    assert not torch.equal(equal, weighed)


def test_a_weight_of_two_is_a_pair_that_is_there_twice() -> None:
    torch.manual_seed(0)
    chosen_B, rejected_B = torch.randn(2, 5, dtype=torch.float64)
    weight_B = torch.tensor([2.0, 1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    places = [0, 0, 1, 3, 4, 4]
    weighed, _ = bradley_terry(chosen_B, rejected_B, num_pairs=6, weight_B=weight_B)
    repeated, _ = bradley_terry(chosen_B[places], rejected_B[places], num_pairs=6)
    torch.testing.assert_close(weighed, repeated)
    logp_SN, reference_SN = torch.randn(2, 2, 5, dtype=torch.float64)
    length_SN, tie_N = torch.full((2, 5), 3), torch.tensor([True, False, False, False, True])

    def of(at: Any, weights: torch.Tensor | None) -> torch.Tensor:
        pairs = PairLogps(logp_SN[:, at], length_SN[:, at], reference_SN[:, at], tie_N[at], weights)
        return paired(pairs, DPOSection(ties="half"), num_pairs=6)[0]

    torch.testing.assert_close(of(slice(None), weight_B), of(places, None))
    wanted_B = torch.tensor([True, False, True, False, True])

    def of_labels(at: Any, weights: torch.Tensor | None) -> torch.Tensor:
        sides = logp_SN[0, at], reference_SN[0, at], wanted_B[at]
        return kto(*sides, DPOSection(loss="kto"), kl=0.1, num_completions=6, weight_B=weights)[0]

    torch.testing.assert_close(of_labels(slice(None), weight_B), of_labels(places, None))
