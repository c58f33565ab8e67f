"""Sums: right answers, no prompt whose answer can be copied, and no sum on both sides of a split."""

import re

from tunesmith.collect.data.prompts import LIMIT, SHOTS, arithmetic_prompts
from tunesmith.collect.data.split import split_by_prompt


def numbers_of(content: object) -> tuple[int, int]:
    """The two numbers of the open sum that a prompt ends with."""
    match = re.fullmatch(r"(\d+) \+ (\d+) =", str(content).splitlines()[-1])
    assert match
    return int(match[1]), int(match[2])


def test_every_answer_is_the_sum_and_stands_in_the_columns() -> None:
    for prompt in arithmetic_prompts():
        a, b = numbers_of(prompt.content)
        assert prompt.columns == {"answer": str(a + b), "pair": ",".join(map(str, sorted((a, b))))}


def test_the_solved_sums_are_right_and_the_same_before_every_prompt() -> None:
    solved = re.findall(r"(\d+) \+ (\d+) = (\d+)\n", SHOTS)
    assert len(solved) == 3
    assert all(int(a) + int(b) == int(answer) for a, b, answer in solved)
    assert all(str(prompt.content).startswith(SHOTS) for prompt in arithmetic_prompts())
    assert all(str(prompt.content).count("\n") == 3 for prompt in arithmetic_prompts())


def test_every_ordered_pair_is_a_prompt_once_but_for_those_that_are_shown() -> None:
    asked = [numbers_of(prompt.content) for prompt in arithmetic_prompts()]
    shown = {(int(a), int(b)) for a, b, _ in re.findall(r"(\d+) \+ (\d+) = (\d+)\n", SHOTS)}
    shown |= {(b, a) for a, b in shown}
    everything = {(a, b) for a in range(LIMIT) for b in range(LIMIT)}
    assert len(asked) == len(set(asked))
    assert set(asked) == everything - shown
    assert LIMIT == 50
    assert len({prompt.id for prompt in arithmetic_prompts()}) == len(asked)


def test_a_fifth_of_the_unordered_pairs_is_held_out_and_none_the_other_way_round() -> None:
    for seed in range(5):
        split = split_by_prompt(arithmetic_prompts(), 0.2, seed, lambda prompt: str(prompt.columns["pair"]))
        train, heldout = (
            {frozenset(numbers_of(prompt.content)) for prompt in side} for side in (split.train, split.heldout)
        )
        assert not train & heldout
        assert len(train | heldout) == LIMIT * (LIMIT + 1) // 2 - 3
        # 254 of 1272 are expected; three standard deviations of a binomial are 43.
        assert abs(len(heldout) - 0.2 * len(train | heldout)) < 43
        assert len(split.heldout) >= 400
