"""Which noise, settings and seen tokens belong to which row."""

import torch

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.rollout.sampler import RequestSampling, Sampler, SeenTokens, noise_keys
from tunesmith.engine.rollout.scheduler import Chunk, Plan, Rows
from tunesmith.engine.rollout.sequence import Limits, Sequence


def sequence(
    request: int, sample: int, prompt: tuple[int, ...], drawn: tuple[int, ...] = (), **limits: int
) -> Sequence:
    made = Sequence(request, sample, prompt, Limits(max_new_tokens=9, **limits), lambda ids: str(ids))  # type: ignore[arg-type]
    made.token_ids.extend(drawn)
    return made


def plan(running: list[Sequence], starting: tuple[Sequence, ...] = ()) -> Plan:
    chunks = [Chunk(0, 0, len(starting[0].prompt_ids), starting)] if starting else []
    return Plan([], running, Rows(), chunks, Rows())


def test_a_prompts_key_is_its_ids_wherever_it_stands() -> None:
    first, second = (1, 2, 3), (4, 5)
    keys = noise_keys([first, second], 2)
    assert noise_keys([second], 2)[0] == keys[1]
    assert noise_keys([second, first], 2) == [keys[1], keys[0]]
    assert keys[0].prompt != keys[1].prompt


def test_a_prompt_that_stands_twice_goes_on_counting_samples() -> None:
    first, again = noise_keys([(1, 2), (1, 2)], 3)
    assert (first.first_sample, again.first_sample) == (0, 3)
    assert first.prompt == again.prompt


def test_seen_tokens_are_those_of_prompt_and_completion() -> None:
    seen = SeenTokens(torch.zeros(0, 10, dtype=torch.bool))
    running = sequence(0, 0, (1, 2), (5,))
    rows = seen.lookup(plan([running]))
    assert rows.mask_SV[rows.slot_B[0]].nonzero()[:, 0].tolist() == [1, 2, 5]
    running.append(7, -1.0, -1.0)
    seen.add([running], torch.tensor([7]))
    rows = seen.lookup(plan([running]))
    assert rows.mask_SV[rows.slot_B[0]].nonzero()[:, 0].tolist() == [1, 2, 5, 7]


def test_first_tokens_of_a_prompt_share_its_row_and_the_row_is_filled_anew_afterwards() -> None:
    seen = SeenTokens(torch.zeros(0, 10, dtype=torch.bool))
    starting = (sequence(0, 0, (3, 4)), sequence(0, 1, (3, 4)))
    rows = seen.lookup(plan([sequence(1, 0, (8,), (9,))], starting))
    assert rows.slot_B[1] == rows.slot_B[2] != rows.slot_B[0]
    assert rows.mask_SV[rows.slot_B[1]].nonzero()[:, 0].tolist() == [3, 4]
    later = sequence(2, 0, (0,), (6,))
    rows = seen.lookup(plan([later]))
    assert rows.mask_SV[rows.slot_B[0]].nonzero()[:, 0].tolist() == [0, 6]


def test_rows_of_ended_completions_are_used_again() -> None:
    seen = SeenTokens(torch.zeros(0, 10, dtype=torch.bool))
    for turn in range(100):
        running = [sequence(turn, sample, (1,), (2,)) for sample in range(8)]
        rows = seen.lookup(plan(running))
        assert len(set(rows.slot_B.tolist())) == 8
        seen.release(running)
    assert len(rows.mask_SV) == 16


def test_stop_ids_are_forbidden_until_the_shortest_length_and_bias_holds_always() -> None:
    logits_RV = torch.zeros(2, 6)
    logits_RV[:, 4] = 50.0
    sampling = SamplingParams(max_new_tokens=9, temperature=0.0, logit_bias={1: 30.0})
    (key,) = noise_keys([(1,)], 2)
    sampler = Sampler([RequestSampling(sampling, 0, key, frozenset({4}))], 6, Kernels("torch"))
    early = sequence(0, 0, (1,), (2,), min_new_tokens=3)
    late = sequence(0, 1, (1,), (2, 2, 2), min_new_tokens=3)
    assert sampler.draw(plan([early, late]), logits_RV).token_B.tolist() == [1, 4]
    assert sampler.draw(plan([late, late]), logits_RV).token_B.tolist() == [4, 4]
