"""Rewards written as plain functions are scored, logged, and learnt."""

import re

import pytest


@pytest.mark.nightly
def test_the_rewards_are_scored_and_the_letters_are_learnt(output_of, tmp_path):
    printed = output_of("custom_reward.py", "--runs", str(tmp_path / "runs"))
    assert "' banana': uses_letters 0.429, is_varied 0.029" in printed  # 3 of 7 characters, 4 different ones
    assert "' rhythm': uses_letters 0.000, is_varied 0.043" in printed
    first, last = map(float, re.search(r"rewards/uses_letters/mean: ([\d.]+) -> ([\d.]+)", printed).groups())
    assert last > 3 * first
    without_first, without_last = map(float, re.search(r"without_letters: ([\d.]+) -> ([\d.]+)", printed).groups())
    assert without_last < 0.8 * without_first
