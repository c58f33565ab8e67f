import itertools
import re

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from tunesmith.collect.data.prompts import film_prompts, load_prompts
from tunesmith.collect.data.split import split_by_prompt

OPENINGS = [str(prompt.content) for prompt in film_prompts()]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def word_edits(first: list[str], second: list[str]) -> int:
    """Levenshtein distance in words."""
    previous = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        current = [i]
        for j, b in enumerate(second, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (a != b)))
        previous = current
    return previous[-1]


def test_there_are_at_least_160_distinct_openings_of_3_to_9_words():
    assert len(set(OPENINGS)) == len(OPENINGS) >= 160
    assert all(3 <= len(opening.split()) <= 9 for opening in OPENINGS)


def test_openings_say_nothing_good_or_bad_themselves():
    analyzer = SentimentIntensityAnalyzer()
    assert {o: c for o in OPENINGS if (c := analyzer.polarity_scores(o)["compound"]) != 0} == {}


def test_any_two_openings_differ_in_two_words_and_share_less_than_two_thirds_of_them():
    for first, second in itertools.combinations(OPENINGS, 2):
        a, b = words(first), words(second)
        assert word_edits(a, b) >= 2, (first, second)
        assert len(set(a) & set(b)) <= 0.6 * len(set(a) | set(b)), (first, second)


def test_openings_end_where_a_continuation_follows():
    assert all(opening == opening.strip() and opening[-1].isalpha() for opening in OPENINGS)


def test_fifteen_are_held_out_whatever_the_seed():
    prompts = load_prompts("films")
    heldout = [split_by_prompt(prompts, 0.0, seed, num_heldout=15).heldout for seed in range(3)]
    assert [len(items) for items in heldout] == [15, 15, 15]
    assert heldout[0] != heldout[1] != heldout[2]
