"""`compare` by name: a model against itself is a draw, and the log-probs are the models' own."""

from pathlib import Path

import pytest
import torch

from tunesmith.batch.rollout import SamplingParams
from tunesmith.core.errors import InputError
from tunesmith.evaluation.compare import recompute
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import language_model
from tunesmith.models.tiny import tiny_model
from tunesmith.rollout.transformers_backend import TransformersEngine
from tunesmith.schema.records import Prompt
from tunesmith.workflows.comparison import ComparisonOptions, run_comparison, summed_logps


def _prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "film {i} was"}}\n' for i in range(3)))
    return str(file)


def test_a_model_against_itself_is_a_draw(tmp_path: Path) -> None:
    options = ComparisonOptions(num_completions=2, max_new_tokens=6, seed=1)
    result = run_comparison("tiny:llama", "tiny:llama", _prompts(tmp_path), "length", options)
    assert result.num_improved == 0
    assert result.mean_before == result.mean_after
    assert result.kl_per_sequence == 0.0
    assert result.p_value == 1.0


def test_two_models_differ_and_every_figure_follows_from_the_samples_file(tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    options = ComparisonOptions(num_completions=2, max_new_tokens=6, out=page)
    result = run_comparison("tiny:llama", "tiny:qwen2", _prompts(tmp_path), "unique_chars", options)
    assert result.kl_per_sequence != 0.0
    assert recompute(result.write_samples_jsonl(tmp_path / "samples.jsonl")) == result.figures()
    assert "<html" in page.read_text()


def test_summed_log_probs_equal_what_the_engine_sampled_by() -> None:
    loaded = tiny_model("gpt2")
    prompts = [Prompt(str(i), "film " * (i + 1)) for i in range(6)]
    groups = TransformersEngine(loaded.model, loaded.tokenizer).generate(
        prompts, 2, SamplingParams(max_new_tokens=5, seed=0)
    )
    expected = [sum(completion.logps) for group in groups for completion in group.completions]
    torch.testing.assert_close(
        torch.tensor(summed_logps(language_model(loaded.model, Kernels()))(groups)),
        torch.tensor(expected),
        atol=1e-4,
        rtol=0,
    )


def test_a_missing_prompt_file_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"absent\.jsonl"):
        run_comparison("tiny:llama", "tiny:llama", "absent.jsonl", "length")
