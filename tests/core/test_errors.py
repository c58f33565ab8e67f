"""The exception tree: what the command line relies on."""

import pytest

from tunesmith.base.core import errors

INPUT_ERRORS = [
    errors.ConfigError,
    errors.DataError,
    errors.ModelError,
    errors.RewardError,
    errors.RunError,
    errors.CheckpointError,
    errors.MissingDependencyError,
]


@pytest.mark.parametrize("kind", INPUT_ERRORS)
def test_bad_input_is_a_value_error_with_exit_code_2(kind: type[errors.TunesmithError]):
    with pytest.raises(ValueError, match="what was given") as caught:
        raise kind("what was given")
    assert isinstance(caught.value, errors.TunesmithError)
    assert kind.exit_code == 2


def test_training_that_cannot_go_on_is_no_input_error():
    assert errors.TrainingError.exit_code == 1
    assert not issubclass(errors.TrainingError, errors.InputError)


def test_every_error_is_one_of_the_tree():
    kinds = [item for item in vars(errors).values() if isinstance(item, type) and item.__module__ == errors.__name__]
    assert all(issubclass(kind, errors.TunesmithError) for kind in kinds)
