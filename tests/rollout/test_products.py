"""The choice of `rollout.weights: auto`: the faster form of the weights, and the model's own where that must be."""

import logging
from typing import Any

import pytest
import torch

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout import products
from tunesmith.engine.rollout.products import product_seconds, with_chosen_weights

FASTER = {"model": 1.0, "int8": 0.5}


def chosen(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], family: str = "llama", **rollout: Any) -> str:
    """The choice where products take `seconds`."""
    monkeypatch.setattr(products, "_measured", lambda *_: seconds)
    monkeypatch.setattr(products, "has_native", lambda *_: True)
    scale, section = {"reduction": rollout.pop("reduction", "float32")}, rollout.pop("grpo", {})
    cfg = GRPORecipe.model_validate(
        {"rollout": {"weights": "auto", **rollout}, "grpo": section, "scale": scale, "run": {"num_threads": 1}}
    )
    return with_chosen_weights(cfg, language_model(tiny_model(family).model)).rollout.weights


@pytest.mark.parametrize(("int8_s", "weights"), [(0.5, "int8"), (0.8, "int8"), (0.81, "model"), (2.0, "model")])
def test_it_is_8_bits_where_they_are_faster_by_a_fifth_and_that_is_logged(
    int8_s: float, weights: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(monkeypatch, {"model": 1.0, "int8": int8_s}) == weights
    assert f"auto: {weights}, because products of a decoding step take 1 s, and {int8_s:g} s in 8 bits" in caplog.text


def test_it_is_the_models_dtype_where_that_must_be_and_where_there_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(monkeypatch, FASTER, importance={"mode": "off"}) == "model"
        assert chosen(monkeypatch, FASTER, reduction="exact") == "model"
        assert chosen(monkeypatch, FASTER, grpo={"num_minibatches": 2}) == "model"
    assert "but rollout.importance is off" in caplog.text and "but scale.reduction is exact" in caplog.text
    assert "but the update would then need a pass for the old policy" in caplog.text
    assert chosen(monkeypatch, FASTER, backend="transformers") == "model"
    assert chosen(monkeypatch, FASTER, "qwen3_moe") == "model"


def test_given_weights_are_kept_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, FASTER, weights="model") == "model"
    assert chosen(monkeypatch, {"model": 1.0, "int8": 2.0}, weights="int8") == "int8"
    assert GRPORecipe().rollout.weights == "model", "the default"


def test_the_measurement_is_made_once_and_draws_no_random_numbers() -> None:
    policy, cfg = language_model(tiny_model("llama", dtype=torch.float32).model), GRPORecipe()
    before = torch.get_rng_state()
    first = product_seconds(policy, cfg)
    if first is None:
        pytest.skip("no kernel for 8 bits on this processor")
    assert min(first.values()) > 0
    assert product_seconds(policy, cfg) is first
    assert torch.equal(torch.get_rng_state(), before)


def test_the_live_loop_records_no_choice() -> None:
    with pytest.raises(ValueError, match="weights is auto, which is for runs"):
        LiveRecipe.model_validate({"rollout": {"weights": "auto"}})
