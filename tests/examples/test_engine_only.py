"""The engine alone draws what the library draws, with the log-probs of the trainer."""

import pytest


@pytest.mark.parametrize("model", ["tiny:llama", pytest.param("tiny:gpt2", marks=pytest.mark.nightly)])
def test_completions_equal_those_of_the_library_and_log_probs_those_of_the_trainer(output_of, model):
    printed = output_of("engine_only.py", "--model", model, "--new-tokens", "12", "--completions", "4")
    assert "4 of 4 greedy completions equal model.generate" in printed
    assert "log-probs from the trainer's: 0 nats" in printed
