"""A prompt on both sides is found whatever its case and white space, and never by the split itself."""

from hypothesis import given
from hypothesis import strategies as st

from tunesmith.collect.data.pairs import load_preferences
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import Leak, leak_finding, leaks, split_by_prompt

WORDS = st.lists(st.sampled_from(["a", "A ", " a", "b", "ß", "SS", "é", "c\n", "d"]), min_size=1, max_size=30)


def test_a_shared_prompt_is_a_leak_with_both_places():
    train = load_prompts(["The film", "A story", "the  FILM"])
    heldout = load_prompts(["New", " the film\n"])
    assert leaks(train, heldout) == (Leak(heldout="prompts[1]", train="prompts[0]"),)
    assert leaks(train, load_prompts(["New"])) == leaks(train, []) == ()


def test_pairs_rankings_and_prompts_leak_into_each_other():
    rows = [{"prompt": "Q", "chosen": "a", "rejected": "b"}, {"prompt": "R", "completions": ["a", "b"]}]
    preferences = load_preferences(rows)
    assert [leak.train for leak in leaks(preferences, load_prompts(["r", "q"]))] == ["pairs[1]", "pairs[0]"]


def test_a_dialogue_leaks_by_what_stands_before_the_answer():
    rows = [
        {"chosen": f"\n\nHuman: Hi?\n\nAssistant: {a}", "rejected": "\n\nHuman: Hi?\n\nAssistant: no"} for a in "xy"
    ]
    assert len(leaks(load_preferences(rows[:1]), load_preferences(rows[1:]))) == 1


@given(WORDS, st.floats(0, 1), st.integers(0, 9))
def test_the_split_by_hash_leaks_nothing(texts: list[str], fraction: float, seed: int):
    split = split_by_prompt(load_prompts(texts), fraction, seed)
    assert leaks(split.train, split.heldout) == ()


def test_a_finding_counts_leaks_and_shows_the_first():
    found = [Leak(f"test:{n}", f"train:{n}") for n in range(5)]
    finding = leak_finding(found, num_heldout=9)
    assert finding is not None and (finding.name, finding.severity) == ("leak", "warning")
    assert "5 of 9 held-out prompts are trained on (test:0 = train:0" in finding.message
    assert "and 2 more" in finding.message
    assert leak_finding([], num_heldout=9) is None
