"""A curve's plateau begins where it comes and stays near its last level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.core.errors import InputError
from tunesmith.evaluation.plateau import plateau


def test_a_curve_that_rises_and_stays_has_its_plateau_where_it_stops_rising() -> None:
    found = plateau([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, *[10] * 15], window=3)
    assert (found.first, found.level, found.is_flat) == (1.0, 10.0, True)
    assert found.step == 10  # 9, 10, 10: 0.33 below the level, within a tenth of 9


def test_a_curve_that_still_rises_at_its_end_is_not_flat() -> None:
    found = plateau(list(range(20)), window=4)
    assert not found.is_flat
    assert found.step > 14


def test_a_dip_late_in_the_curve_moves_the_plateau_behind_it() -> None:
    values = [0.0, 0, 0, 5, 5, 5, 5, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5]
    assert plateau(values, window=2).step > 9


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 8))
def test_the_step_is_one_of_the_curve_and_a_constant_is_flat_from_the_start(values: list[float], window: int) -> None:
    assert 1 <= plateau(values, window=window).step <= len(values)
    assert plateau([2.0] * len(values), window=window).step == 1


def test_an_empty_curve_is_refused() -> None:
    with pytest.raises(InputError, match="without values"):
        plateau([])
