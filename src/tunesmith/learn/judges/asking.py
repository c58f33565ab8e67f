"""What a judge's model is to the judge: something that answers questions, and the ways in which it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tunesmith.learn.judges.rubric import Question


class AwayError(Exception):
    """A server did what may pass: it is away, late, overloaded, or answered what it was not asked.

    `was_sent` is False if it saw nothing of the request. `is_refused`: it said that it did not do what it was asked.
    `wait_s`: it asks to wait for as long.
    """

    def __init__(self, message: str, *, was_sent: bool = True, is_refused: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.is_refused = is_refused
        self.wait_s = wait_s


class RefusedError(Exception):
    """A server does not answer this question: it is too long, or not allowed."""


class FatalError(Exception):
    """A server answers no question: the key or its certificate is wrong, or it knows no such model. `was_sent` is False
    if it saw nothing of the request.
    """

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answered, and the tokens that it read and drew; None if it did not say."""

    text: str
    num_tokens: int | None


class Asker(Protocol):
    """The model of a judge. It is asked with `batch_size` questions at a time, by `num_threads` threads.

    `can_wait` is False if what fails once fails always.
    """

    batch_size: int
    num_threads: int
    can_wait: bool

    @property
    def name(self) -> str:
        """The model's name, for people."""
        ...

    @property
    def identity(self) -> str:
        """A text that is another for another model."""
        ...

    def most_tokens(self, question: Question) -> int:
        """The tokens that a question and its answer have at most. Raises RefusedError if that is too many."""
        ...

    def ask(self, questions: Sequence[Question], seed: int) -> list[Reply]:
        """The replies to questions with the same labels, in order.

        Raises AwayError, RefusedError or FatalError, and InputError for what can never be asked.
        """
        ...

    def abort(self) -> None:
        """End what is being asked, in whatever thread."""
        ...
