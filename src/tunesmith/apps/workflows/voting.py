"""Votes on the completions of a rollout: by a rater in code, or by a person with two keys in the terminal."""

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol, TextIO

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import one_line
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Preference, Prompt, Text, Vote, plain_text
from tunesmith.engine.batch.rollout import Group

NUM_ASKED = 60
"""Votes that a person is asked for; one in four is held out."""

MIN_VOTES = 12
"""Fewer votes than this teach nothing that could be told from noise."""

_KEYS: dict[str, Preference] = {"1": "a", "2": "b", "0": "tie"}


class Rater(Protocol):
    """Anyone who can say which of two completions is better."""

    def vote(self, prompt: Prompt, a: Text, b: Text) -> Vote:
        """The vote between `a` and `b`."""
        ...


def votes_on(groups: Sequence[Group], rater: Rater) -> list[Vote]:
    """The rater's votes on every two different completions of one prompt, group after group."""
    votes: list[Vote] = []
    for group in groups:
        texts = [completion.text for completion in group.completions]
        votes += [rater.vote(group.prompt, a, b) for a, b in itertools.combinations(texts, 2) if a != b]
    return votes


def ask_votes(
    train: Sequence[Group], heldout: Sequence[Group], *, seed: int, num_asked: int = NUM_ASKED
) -> tuple[list[Vote], list[Vote]]:
    """A person's votes on both parts, asked in the terminal: `1` or `2` for the better text, `0` for a tie, `q` to
    stop.

    Raises:
        InputError: if fewer than MIN_VOTES were given, or none of them on held-out prompts.
    """
    questions = [*_questions(heldout, num_asked // 4, seed), *_questions(train, num_asked - num_asked // 4, seed)]
    random.Random(derive(seed, "questions")).shuffle(questions)
    heldout_ids = {group.prompt.id for group in heldout}
    votes: list[Vote] = []
    sys.stderr.write("Which text do you like better? Keys: 1, 2, 0 for neither, q to stop.\n")
    with _keys(sys.stdin) as keys:
        for number, (prompt, a, b) in enumerate(questions, start=1):
            opening = plain_text(prompt.content)
            sys.stderr.write(
                f"\n{number}/{len(questions)}\n  1  {one_line(opening + a)}\n  2  {one_line(opening + b)}\n> "
            )
            sys.stderr.flush()
            preference = _answer(keys)
            if preference is None:
                break
            votes.append(Vote(prompt, a, b, preference, rater="you"))
    kept = (
        [vote for vote in votes if vote.prompt.id in heldout_ids],
        [v for v in votes if v.prompt.id not in heldout_ids],
    )
    if len(votes) < MIN_VOTES or not all(any(vote.preference != "tie" for vote in part) for part in kept):
        raise InputError(
            f"{len(votes)} votes are too few to learn from; give at least {MIN_VOTES}, not all of them ties"
        )
    return kept[1], kept[0]


def _questions(groups: Sequence[Group], count: int, seed: int) -> list[tuple[Prompt, str, str]]:
    """`count` pairs, one of each group before a second of any; the order of the two is random."""
    draw = random.Random(derive(seed, "sides", count))
    questions: list[tuple[Prompt, str, str]] = []
    for _ in range(-(-count // max(1, len(groups)))):
        for group in draw.sample(list(groups), len(groups)):
            first, second = draw.sample([completion.text for completion in group.completions], 2)
            if first != second:
                questions.append((group.prompt, first, second))
    return questions[:count]


def _answer(keys: Iterator[str]) -> Preference | None:
    for key in keys:
        if key in _KEYS:
            sys.stderr.write(f"{key}\n")
            return _KEYS[key]
        if key in ("q", "\x04"):
            return None
        if key == "\x03":
            raise KeyboardInterrupt
    return None


@contextlib.contextmanager
def _keys(stream: TextIO) -> Iterator[Iterator[str]]:
    """Single key presses of a terminal, without Return; the characters of a pipe."""
    characters = iter(lambda: stream.read(1), "")
    if not stream.isatty():
        yield characters
        return
    import termios
    import tty

    settings = termios.tcgetattr(stream)
    try:
        tty.setcbreak(stream)
        yield characters
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, settings)
