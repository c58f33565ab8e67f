"""The learning rate over a run."""

import itertools

import pytest

from tunesmith.base.config.sections import OptimizerSection
from tunesmith.engine.models.optimizer import schedule_factor


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_the_schedule_rises_then_falls_and_is_never_zero_during_the_run(schedule):
    section = OptimizerSection(warmup_steps=4, schedule=schedule)
    factors = [schedule_factor(section, step, 20) for step in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(earlier >= later > 0 for earlier, later in itertools.pairwise(factors[4:]))
    assert (factors[-1] == 1.0) == (schedule == "constant")


def test_warmup_stable_decay_keeps_the_peak_then_falls_in_a_line():
    section = OptimizerSection(warmup_steps=2, schedule="warmup_stable_decay", decay_share=0.4)
    factors = [schedule_factor(section, step, 10) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup_stable_decay"])
def test_a_schedule_falls_to_its_least_share_and_stays_there(schedule):
    section = OptimizerSection(schedule=schedule, min_ratio=0.1)
    factors = [schedule_factor(section, step, 1000) for step in range(1001)]
    assert min(factors) == factors[-1] == pytest.approx(0.1)
    assert schedule_factor(section, 5000, 1000) == pytest.approx(0.1)
    assert factors[999] == pytest.approx(0.1, abs=0.01)
