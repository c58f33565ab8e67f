"""The simulated rater: a lexicon of words that people rated, in the place of a person who votes.

It is a stand-in for tests, demos and first runs. Whatever is learned from it is a preference for words that sound
positive, and no result of it says anything about human raters.
"""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from tunesmith.core.errors import InputError
from tunesmith.schema.records import Prompt, Text, Vote, plain_text

RATER_NAME = "simulated rater (VADER lexicon)"
"""How votes, tables and reports name this rater: never without the word simulated."""

TIE_BELOW = 0.05
"""Scores closer than this are a tie: VADER itself calls a compound between -0.05 and 0.05 neutral."""


class SimulatedRater:
    """Scores text by its sentiment and votes for the more positive of two completions.

    The score is the compound of VADER (Hutto and Gilbert 2014): in [-1, 1], from a lexicon of about 7,500 words rated
    by people, with rules for negation, degree and punctuation. No person votes.
    """

    name = RATER_NAME

    def __init__(self, tie_below: float = TIE_BELOW) -> None:
        if not 0 <= tie_below <= 2:
            raise InputError(f"tie_below is {tie_below}; scores lie in [-1, 1], so give 0 to 2")
        self._tie_below = tie_below
        self._analyzer = SentimentIntensityAnalyzer()

    def score(self, prompt: Text, completion: Text) -> float:
        """The compound sentiment in [-1, 1].

        A text prompt and its completion are one running text and are rated as one: "was not" + " good" is negative. In
        a conversation the reply alone is rated, not the words of the other side.
        """
        text = plain_text(completion)
        if isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + text
        return float(self._analyzer.polarity_scores(text)["compound"])

    def vote(self, prompt: Prompt, a: Text, b: Text) -> Vote:
        """The vote between completions `a` and `b`: the higher score wins, a difference below `tie_below` is a tie."""
        score_a, score_b = self.score(prompt.content, a), self.score(prompt.content, b)
        if score_a == score_b or abs(score_a - score_b) < self._tie_below:
            preference = "tie"
        else:
            preference = "a" if score_a > score_b else "b"
        return Vote(prompt, a, b, preference, rater=self.name, score_a=score_a, score_b=score_b)
