import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.config.algorithms.live import LiveKLSection
from tunesmith.base.core.errors import InputError
from tunesmith.learn.algorithms import kl
from tunesmith.learn.live.loop import adapt_kl


def test_a_fixed_coefficient_stays():
    fixed = kl.Controller(0.05)
    fixed.update(100.0, 64)
    fixed.load_state_dict({"coef": 9.0})
    assert fixed.value == 0.05 and fixed.state_dict() == {"coef": 0.05}
    assert kl.Controller(0.0).value == 0.0


@given(
    observed=st.lists(st.floats(-10, 50), min_size=1, max_size=20),
    target=st.floats(0.1, 20),
    num_sequences=st.integers(1, 100),
)
def test_the_adaptive_coefficient_follows_ziegler(observed, target, num_sequences):
    adaptive = kl.Controller(0.1, target, 1000.0)
    expected = 0.1
    for kl_per_sequence in observed:
        adaptive.update(kl_per_sequence, num_sequences)
        error = sorted((-0.2, (kl_per_sequence - target) / target, 0.2))[1]
        expected = expected + expected * error * num_sequences / 1000.0
        assert adaptive.value == pytest.approx(expected, rel=1e-10)


def test_the_adaptive_coefficient_moves_by_a_fifth_of_the_rate_at_most():
    adaptive = kl.Controller(1.0, 6.0, 100.0)
    adaptive.update(1e9, 50)
    assert adaptive.value == pytest.approx(1.1)
    adaptive.update(-1e9, 100)
    assert adaptive.value == pytest.approx(1.1 * 0.8)
    adaptive.update(6.0, 100)
    assert adaptive.value == pytest.approx(1.1 * 0.8)


def test_the_adaptive_coefficient_holds_a_process_near_its_target():
    adaptive = kl.Controller(0.001, 5.0, 500.0)
    for _ in range(2000):
        adaptive.update(1.0 / adaptive.value, 64)  # more penalty, less divergence
    assert 1.0 / adaptive.value == pytest.approx(5.0, rel=1e-3)


def test_a_resumed_controller_goes_on_where_it_stood():
    first, second = kl.Controller(0.1, 5.0, 1000.0), kl.Controller(0.1, 5.0, 1000.0)
    first.update(9.0, 64)
    second.load_state_dict(first.state_dict())
    first.update(4.0, 64)
    second.update(4.0, 64)
    assert first.value == second.value


@pytest.mark.parametrize("observed", [float("nan"), float("inf")])
def test_a_non_finite_kl_leaves_the_coefficient_alone(observed):
    adaptive = kl.Controller(0.1, 5.0, 1000.0)
    adaptive.update(observed, 64)
    assert adaptive.value == 0.1


def test_in_the_live_loop_the_penalty_shrinks_to_that_of_the_recipe_and_no_further():
    section = LiveKLSection(coef=0.01, target=5.0)
    controller = kl.Controller(section.coef, section.target, horizon=1.0)
    controller.value = 0.012
    adapt_kl(controller, 1.0, section)
    assert controller.value == 0.01


def test_values_that_cannot_work_are_refused():
    with pytest.raises(InputError, match=r"Set the horizon to 101 or more"):
        kl.Controller(0.1, 5.0, 100.0).update(6.0, 101)
    with pytest.raises(InputError, match="coef is 0"):
        kl.Controller(0.0, target=5.0)
