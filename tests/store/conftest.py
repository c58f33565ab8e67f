"""A store in a file or a database of its own, and items to fill it with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.store.votes import VoteStore


def _pairs(count: int, first: int = 0) -> list[NewItem]:
    return [
        NewItem(f"prompt {number}", (Candidate(f"good {number}"), Candidate(f"poor {number}!")))
        for number in range(first, first + count)
    ]


@pytest.fixture
def pairs() -> Callable[..., list[NewItem]]:
    """`pairs(3)`: three pairs whose texts tell them apart."""
    return _pairs


@pytest.fixture
def path(place: str | Path) -> str | Path:
    return place


@pytest.fixture
def store(path: str | Path) -> Iterator[VoteStore]:
    with VoteStore.open(path, seed=1) as store:
        yield store


@pytest.fixture
def campaign(store: VoteStore) -> Callable[..., int]:
    """`campaign(overlap=2)`: the id of a campaign with these settings and the default name."""

    def make(**settings: object) -> int:
        return store.set_campaign(CampaignSettings(**settings), now=0.0).id  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture
def rater(store: VoteStore) -> Callable[[str], int]:
    """`rater("ann")`: the id of a new rater."""
    return lambda name: store.add_rater(name, now=0.0).rater.id
