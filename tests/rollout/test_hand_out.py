"""Engines hand out groups as they end: each once, and the same that the call returns."""

from typing import Any

import pytest
import torch

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine

PROMPTS = [Prompt(str(i), "A story of " + "many " * i) for i in range(9)]
SAMPLING = SamplingParams(max_new_tokens=24, seed=5, stop_strings=("a", "e", "o"))


def handed_out(backend: Any, n: int = 3, **options: Any) -> tuple[list[tuple[int, Group, int]], list[Group]]:
    """Each group that was handed out, with its place and how many completions had ended by then; and all groups."""
    loaded = tiny_model("llama", dtype=torch.bfloat16)
    engine = open_engine(loaded.model, loaded.tokenizer, backend=backend, **options)
    found: list[tuple[int, Group, int]] = []
    ended = [0]

    def progress(done: int, _: int) -> None:
        ended[0] = done

    groups = engine.generate(
        PROMPTS,
        n,
        SAMPLING,
        on_progress=progress,
        on_group=lambda place, group: found.append((place, group, ended[0])),
    )
    return found, groups


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("n", [1, 3])
def test_each_group_is_handed_out_once_as_it_is_returned(backend: str, n: int) -> None:
    found, groups = handed_out(backend, n)
    assert sorted(place for place, _, _ in found) == list(range(9))
    assert {place: group for place, group, _ in found} == dict(enumerate(groups))


def test_the_native_engine_hands_out_groups_while_it_draws_others() -> None:
    found, groups = handed_out("native", num_slots=6)
    when = [ended for _, _, ended in found]
    assert when == sorted(when)
    assert when[0] <= 12 and sum(ended < 27 for ended in when) >= 6
    again, _ = handed_out("native", num_slots=6)
    assert [(place, ended) for place, _, ended in again] == [(place, ended) for place, _, ended in found]
    assert len({len(c.token_ids) for group in groups for c in group.completions}) > 3


def test_the_transformers_engine_hands_out_groups_at_the_end() -> None:
    """It draws from torch's global generator, from which a reward may draw too."""
    found, _ = handed_out("transformers", batch_size=6)
    assert [ended for _, _, ended in found] == [27] * 9
