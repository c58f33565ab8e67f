"""What `bench update` hands to both sides: one batch, as each of them wants it."""

import torch

from benchmarks.trl import token_sum
from benchmarks.update import WORKLOADS, OurUpdate, UpdateSize, batch_of, given_groups, trl_inputs

SIZE = UpdateSize(num_prompts=2, num_prompt_tokens=5, num_completions=3, shortest=2, longest=6)


def test_a_batch_is_a_function_of_its_seed_and_has_the_lengths_asked_for() -> None:
    batch = batch_of(SIZE, 200, seed=1)
    assert batch == batch_of(SIZE, 200, seed=1) != batch_of(SIZE, 200, seed=2)
    assert [len(prompt) for prompt in batch.prompts] == [5, 5]
    lengths = [len(ids) for group in batch.completions for ids in group]
    assert len(lengths) == 6 and all(2 <= length <= 6 for length in lengths) and len(set(lengths)) > 1
    assert batch.num_tokens == 6 * 5 + sum(lengths)


def test_the_workloads_are_those_that_are_promised() -> None:
    ragged, shared = WORKLOADS["ragged"], WORKLOADS["shared"]
    assert (ragged.shortest, ragged.longest) == (8, 64)
    assert (shared.num_prompts, shared.num_prompt_tokens, shared.num_completions) == (1, 256, 8)


def test_trl_gets_the_same_tokens_and_advantages_that_our_trainer_makes() -> None:
    batch = batch_of(SIZE, 200, seed=1)
    inputs = trl_inputs(batch)
    rows = [(prompt, ids) for prompt, group in zip(batch.prompts, batch.completions, strict=True) for ids in group]
    for row, (prompt, ids) in enumerate(rows):
        prompt_mask, mask = inputs["prompt_mask"][row].bool(), inputs["completion_mask"][row].bool()
        assert inputs["prompt_ids"][row][prompt_mask].tolist() == list(prompt)
        assert inputs["completion_ids"][row][mask].tolist() == list(ids)
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)  # padded on the right
    reward_PG = torch.tensor([token_sum(group) for group in batch.completions])
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    assert torch.equal(inputs["advantages"].view(2, 3).sign(), centred_PG.sign())
    assert int(inputs["num_items_in_batch"]) == sum(len(ids) for _, ids in rows)


def test_our_trainer_takes_the_given_completions_with_the_models_own_log_probs() -> None:
    batch = batch_of(SIZE, 200, seed=1)
    learner, _ = OurUpdate("tiny:llama", batch, num_threads=1).build()
    groups = given_groups(learner.policy, torch.device("cpu"), batch)
    assert [group.prompt_token_ids for group in groups] == list(batch.prompts)
    assert [tuple(item.token_ids for item in group.completions) for group in groups] == list(batch.completions)
    assert all(logp < 0 for group in groups for item in group.completions for logp in item.raw_logps)
