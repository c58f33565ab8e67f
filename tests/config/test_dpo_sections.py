import pytest
from pydantic import ValidationError

from tunesmith.base.config.algorithms.dpo import DPOSection


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"loss": "ipo", "label_smoothing": 0.1},
            "the loss ipo has none; set it to 0, or take one of exo_pair",
        ),
        ({"loss": "robust"}, "robust needs label_smoothing"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"loss": "simpo", "ties": "rao_kupper"}, "for the loss sigmoid, not for simpo"),
        ({"loss": "kto", "ties": "half"}, "half needs pairs"),
        ({"tie_theta": 1.0}, "greater than 1"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DPOSection.model_validate(values)


def test_reference_free_losses_need_no_reference() -> None:
    needs = {loss: DPOSection.model_validate({"loss": loss}).needs_reference for loss in ("sigmoid", "simpo", "orpo")}
    assert needs == {"sigmoid": True, "simpo": False, "orpo": False}
