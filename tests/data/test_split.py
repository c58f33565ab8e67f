import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.pairs import load_preferences
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import prompt_key, split_by_prompt


def prompts(*texts: str) -> list[Prompt]:
    return load_prompts(list(texts))


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "A ", "b\n"]), min_size=2), st.floats(0, 1), st.integers(0, 9))
def test_no_prompt_stands_on_both_sides_and_nothing_is_lost(texts: list[str], fraction: float, seed: int):
    items = prompts(*texts)
    split = split_by_prompt(items, fraction, seed)
    assert {prompt_key(p) for p in split.train}.isdisjoint(prompt_key(p) for p in split.heldout)
    assert sorted((*split.train, *split.heldout), key=lambda p: int(p.id[8:-1])) == items


def test_the_share_is_about_the_fraction_and_both_sides_keep_their_order():
    items = prompts(*(f"prompt {number}" for number in range(2000)))
    split = split_by_prompt(items, 0.1, seed=0)
    assert 150 <= len(split.heldout) <= 250
    assert split.heldout == [item for item in items if item in split.heldout]
    assert split == split_by_prompt(items, 0.1, seed=0)
    assert split != split_by_prompt(items, 0.1, seed=1)


def test_rows_added_later_move_no_prompt():
    items = prompts(*(f"prompt {number}" for number in range(200)))
    few = {prompt_key(p) for p in split_by_prompt(items[:100], 0.2, seed=0).heldout}
    all_rows = {prompt_key(p) for p in split_by_prompt(items, 0.2, seed=0).heldout}
    assert few <= all_rows


def test_the_ends_of_the_fraction_and_the_smallest_sets():
    items = prompts("a", "b")
    assert split_by_prompt(items, 0.0, seed=0).heldout == []
    assert split_by_prompt(items, 1.0, seed=0).train == []
    for seed in range(10):
        for fraction in (0.001, 0.999):
            split = split_by_prompt(items, fraction, seed)
            assert (len(split.train), len(split.heldout)) == (1, 1)
    assert split_by_prompt([], 0.5, seed=0).train == []


def test_an_exact_number_of_prompts_can_be_held_out():
    items = prompts("a", "b", "c", "A")
    split = split_by_prompt(items, 0.0, 0, num_heldout=2)
    assert len({prompt_key(item) for item in split.heldout}) == 2
    with pytest.raises(DataError, match="3 prompts are to be held out of 3 distinct ones"):
        split_by_prompt(items, 0.0, 0, num_heldout=3)


def test_pairs_are_split_by_prompt_and_fall_with_the_prompt_itself():
    rows = [{"prompt": f"p {n // 3}", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(90)]
    pairs = split_by_prompt(load_preferences(rows), 0.3, seed=4)
    alone = split_by_prompt(prompts(*(f"p {n}" for n in range(30))), 0.3, seed=4)
    assert {pair.prompt.content for pair in pairs.heldout} == {p.content for p in alone.heldout}
    assert len(pairs.heldout) == 3 * len(alone.heldout)


def test_pairs_without_prompt_are_split_by_the_dialogue_before_the_answer():
    first, second, other, nothing = load_preferences(
        [
            {"chosen": "\n\nHuman: Hi?\n\nAssistant: I am", "rejected": "\n\nHuman: Hi?\n\nAssistant: I was"},
            {"chosen": "\n\nHuman: Hi?\n\nAssistant: No", "rejected": "\n\nHuman: Hi?\n\nAssistant: Yes"},
            {"chosen": "\n\nHuman: Ho?\n\nAssistant: No", "rejected": "\n\nHuman: Ho?\n\nAssistant: Yes"},
            {"chosen": "x", "rejected": "y"},
        ]
    )
    assert prompt_key(first) == prompt_key(second) != prompt_key(other)
    assert prompt_key(nothing)


def test_pairs_of_single_lines_are_split_by_the_words_that_both_begin_with_and_not_by_chance():
    rows = [
        ("The film was good", "The film was bad"),
        ("The film was long", "The film was longer"),
        ("The film was it", "The film wasn't"),
        ("The plot", "They left"),
        ("The end", "The start"),
    ]
    first, second, cut, chance, word = load_preferences([{"chosen": a, "rejected": b} for a, b in rows])
    assert prompt_key(first) == "the film was"
    assert prompt_key(second) == "the film was"
    assert len({prompt_key(pair) for pair in (first, cut, chance, word)}) == 4


def test_conversations_without_prompt_are_split_by_their_common_messages():
    user = {"role": "user", "content": "Hi?"}
    replies = [{"role": "assistant", "content": text} for text in ("a", "b", "c")]
    first, second = load_preferences(
        [{"chosen": [user, replies[0]], "rejected": [user, reply]} for reply in replies[1:]]
    )
    assert prompt_key(first) == prompt_key(second) == prompt_key(load_prompts([[user]])[0])
