"""Figures of a reward model against plain twins, and on models whose quality is known."""

import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.collate import EncodedPreference
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.evaluation.reward_quality import (
    DecidedPair,
    decided_pairs,
    expected_calibration_error,
    judge,
    margins,
    quality,
    reliability,
    tfidf_margins,
)
from tunesmith.learn.evaluation.tables import reward_table

TOKENIZER = byte_tokenizer()


def pair(index: int, better: int, worse: int) -> DecidedPair:
    return DecidedPair(f"prompt {index}", (7,) * better, (7,) * worse)


def text_pair(prompt: str, better: str, worse: str) -> DecidedPair:
    ids = [tuple(TOKENIZER(prompt + text)["input_ids"]) for text in (better, worse)]
    return DecidedPair(prompt, *ids)


def test_every_figure_equals_what_its_definition_gives_by_hand() -> None:
    pairs = [pair(0, 5, 3), pair(1, 2, 6), pair(2, 4, 4), pair(2, 9, 1)]
    margin_N, tfidf_N = np.array([2.0, -1.0, 0.0, 0.5]), np.array([1.0, 1.0, -1.0, -1.0])
    found = quality(margin_N, pairs, tfidf_N, num_tfidf_pairs=9)
    p = [1 / (1 + math.exp(-m)) for m in margin_N]
    assert (found.num_pairs, found.num_prompts, found.num_tfidf_pairs) == (4, 3, 9)
    assert found.accuracy == pytest.approx(2.5 / 4)
    assert found.brier == pytest.approx(sum((1 - q) ** 2 for q in p) / 4, abs=1e-12)
    assert found.log_loss == pytest.approx(-sum(math.log(q) for q in p) / 4, abs=1e-12)
    assert found.mean_margin == pytest.approx(0.375)
    differences = [2, -4, 0, 8]
    twin = torch.corrcoef(torch.tensor([margin_N.tolist(), differences], dtype=torch.float64))[0, 1].item()
    assert found.length_correlation == pytest.approx(twin, abs=1e-12)
    assert (found.num_longer, found.accuracy_longer, found.num_shorter, found.accuracy_shorter) == (2, 1.0, 1, 0.0)
    assert found.longer_wins == pytest.approx(2.5 / 4)
    assert found.tfidf == pytest.approx(0.5)
    # Model alone right: 2 and 3 (half a hit beats none); TF-IDF alone: 1. Of three coins, one or two fall so.
    assert found.p_value_tfidf == pytest.approx(1.0)
    assert found.accuracy_low < found.accuracy < found.accuracy_high


@pytest.mark.filterwarnings("error")
def test_margins_of_any_size_have_figures_without_a_warning() -> None:
    """NumPy's warning of an overflow stood on the terminal."""
    pairs = [DecidedPair(str(i), (1, 2), (1, 3)) for i in range(2)]
    found = quality(np.array([-1e30, 800.0]), pairs)
    assert (found.brier, found.accuracy, found.log_loss) == (0.5, 0.5, 5e29)


def test_calibration_bins_hold_every_pair_and_their_error_is_the_weighted_gap() -> None:
    confidence_N, hit_N = np.array([0.5, 0.54, 0.8, 1.0]), np.array([1.0, 0.0, 1.0, 1.0])
    bins = reliability(confidence_N, hit_N, num_bins=5)
    assert [one.num_pairs for one in bins] == [2, 0, 0, 1, 1]
    assert (bins[0].confidence, bins[0].accuracy, bins[1].confidence) == (pytest.approx(0.52), 0.5, None)
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.02 + 0.2 + 0.0) / 4)


@given(st.floats(0.3, 3.0), st.integers(0, 100))
def test_a_model_whose_margins_are_the_true_log_odds_is_calibrated(spread: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    odds_N = random.normal(scale=spread, size=20_000)
    is_first_N = random.random(20_000) < 1 / (1 + np.exp(-odds_N))
    hit_N = (is_first_N == (odds_N > 0)).astype(np.float64)
    confidence_N, too_sure_N = (1 / (1 + np.exp(-factor * np.abs(odds_N))) for factor in (1, 3))
    assert expected_calibration_error(reliability(confidence_N, hit_N)) < 0.02
    assert expected_calibration_error(reliability(too_sure_N, hit_N)) > 0.03


def test_margins_are_those_of_each_sequence_alone_whatever_the_micro_batches() -> None:
    model = new_reward_model(ModelSection(name="tiny:llama"), dtype=torch.float32)
    torch.nn.init.normal_(model.model.score.weight)
    pairs = [DecidedPair(str(i), tuple(range(5, 8 + i)), tuple(range(9, 10 + 2 * i))) for i in range(5)]

    def reward(ids: tuple[int, ...]) -> float:
        return model(torch.tensor([ids]), torch.tensor([len(ids)])).item()

    expected = [reward(one.better_ids) - reward(one.worse_ids) for one in pairs]
    for size in (1, 3, 16):
        np.testing.assert_allclose(margins(model, pairs, micro_batch_size=size)[:, 0], expected, atol=1e-5)


def test_a_model_that_knows_nothing_is_half_right_and_tfidf_sees_the_words() -> None:
    model = new_reward_model(ModelSection(name="tiny:llama"), dtype=torch.float32)
    train = [text_pair(f"Film {i}: ", "truly great", "awful mess") for i in range(12)]
    heldout = [text_pair(f"Book {i}: ", "truly great", "awful mess") for i in range(4)]
    found = judge(model, heldout, train)
    assert (found.accuracy, found.brier, found.ece) == (0.5, 0.25, 0.0)
    assert (found.tfidf, found.num_tfidf_pairs) == (1.0, 12)
    assert judge(model, heldout).tfidf is None


def test_tfidf_reads_what_follows_the_shared_beginning_alone() -> None:
    train = [text_pair("wonderful " * 5, "yes indeed", "no never") for _ in range(6)]
    with_prompt = tfidf_margins(TOKENIZER, train, [text_pair("never never ", "yes indeed", "no never")])
    without = tfidf_margins(TOKENIZER, train, [text_pair("", "yes indeed", "no never")])
    np.testing.assert_allclose(with_prompt, without, atol=1e-12)


def test_rankings_give_their_decided_pairs_and_ties_none() -> None:
    ranking = EncodedPreference("row", ((1,), (2,), (3,)), (1, 2, 2))
    tie = EncodedPreference("other", ((4,), (5,)), (1, 1))
    found = decided_pairs([ranking, tie], {"row": "the prompt"})
    assert [(one.prompt, one.better_ids, one.worse_ids) for one in found] == [
        ("the prompt", (1,), (2,)),
        ("the prompt", (1,), (3,)),
    ]


def test_nothing_to_judge_by_and_damaged_models_are_refused() -> None:
    model = new_reward_model(ModelSection(name="tiny:llama"), dtype=torch.float32)
    with pytest.raises(DataError, match="no decided pairs"):
        judge(model, [])
    torch.nn.init.constant_(model.model.score.weight, float("nan"))
    with pytest.raises(DataError, match="not finite"):
        judge(model, [pair(0, 2, 3)])


def test_the_table_shows_figures_and_says_where_there_is_none() -> None:
    found = quality(np.array([1.0, 2.0]), [pair(0, 3, 2), pair(1, 4, 2)])
    console = Console(width=120, record=True, file=StringIO())
    console.print(reward_table(replace(found, tfidf=0.75, num_tfidf_pairs=1000, p_value_tfidf=0.03)))
    text = console.export_text()
    assert "fitted on 1,000 other pairs, p = 0.03 (McNemar)" in text
    assert "none" in text


def test_several_heads_give_the_mean_of_their_probabilities_and_say_where_they_agree() -> None:
    margin_NK = np.array([[2.0, 1.0, 0.5], [1.0, -0.5, 1.0], [-1.0, -2.0, -0.1], [3.0, 0.2, -0.1]])
    pairs = [DecidedPair(str(i), (1, 2), (1, 3)) for i in range(4)]
    found = quality(margin_NK, pairs)
    p_N = (1 / (1 + np.exp(-margin_NK))).mean(axis=1)
    assert found.accuracy == 0.75
    assert found.brier == pytest.approx(np.square(1 - p_N).mean())
    assert found.log_loss == pytest.approx(-np.log(p_N).mean())
    assert sum(one.num_pairs for one in found.bins) == 4
    heads = found.heads
    assert heads is not None and (heads.num_heads, heads.num_agreed, heads.num_split) == (3, 2, 2)
    assert (heads.accuracy_agreed, heads.accuracy_split) == (0.5, 1.0)
    assert heads.margin_spread == pytest.approx(np.mean([np.std(row, ddof=1) for row in margin_NK]))
    alone = quality(margin_NK[:, 0], pairs)
    assert alone.heads is None and "heads" not in alone.to_json()
    assert "num_agreed" in str(found.to_json()["heads"])
