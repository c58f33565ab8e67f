"""A live folder with both stores: the trainer's loop on a tiny model, and raters who vote without a server."""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import merged

from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.collect.store.inferences import Speaker
from tunesmith.collect.store.records import (
    CampaignSettings,
    Candidate,
    Choice,
    Feedback,
    Inference,
    KeySettings,
    NewItem,
    Presentation,
    Verdict,
)
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.learn.live import loop as live
from tunesmith.learn.live.folder import open_folder
from tunesmith.learn.live.loop import Loop
from tunesmith.learn.trainers.signals import StopRequest

MOST_AT_ONCE = 20
PROMPTS = [
    f"{opening} {number}" for number in range(6) for opening in ("The film", "A story", "Once more", "They said")
]


def live_recipe(folder: Path, **sections: Any) -> LiveRecipe:
    """A tiny Llama that learns from every eight votes; each section given is merged over these values."""
    base: dict[str, Any] = {
        "model": {"name": "tiny:llama", "dtype": "float32"},
        "prompts": {"heldout_fraction": 0.25},
        "rollout": {"prompts_per_step": 6, "completions_per_prompt": 4, "max_new_tokens": 6},
        "optimizer": {"learning_rate": 3e-3},
        "dpo": {"pairs_per_step": 8, "micro_batch_size": 4},
        "live": {
            "dir": str(folder),
            "votes_per_update": 8,
            "max_votes_per_update": 8,
            "pool": 8,
            "poll_s": 0.01,
            "kl": {"budget": None, "target": None},
            "check": {"p_value": 1e-9},
        },
        "run": {"num_threads": 1},
    }
    return LiveRecipe.model_validate(merged(base, sections))


@contextmanager
def looping(cfg: LiveRecipe) -> Iterator[Loop]:
    """The loop of a trainer in this process, at its start."""
    with open_folder(cfg) as folder:
        loop = live.build(cfg, folder, StopRequest(), PROMPTS)
        loop.begin()
        yield loop


def share_of_letters(text: str) -> float:
    """What raters here like: plain letters."""
    return sum(char.isascii() and char.isalpha() for char in text) / max(1, len(text))


@dataclass
class Voters:
    """Raters of one folder; `likes` gives a text's worth."""

    store: VoteStore
    runs: RunReader
    campaign_id: int
    rater_id: int
    likes: Callable[[str], float] = share_of_letters

    def ask(self, count: int) -> list[Presentation]:
        """What is to be judged next, once new offers are in."""
        offers = self.runs.offers_after(self.store.reader.last_offer_id(self.campaign_id), 1000)
        self.store.ingest(self.campaign_id, offers)
        return self.store.next_presentations(self.rater_id, self.campaign_id, count)

    def vote(self, count: int, verdict: Callable[[Presentation], Verdict] | None = None) -> list[Presentation]:
        """Vote on the next `count` items; those that were judged."""
        judged: list[Presentation] = []
        while len(judged) < count and (shown := self.ask(min(MOST_AT_ONCE, count - len(judged)))):
            for one in shown:
                self.store.vote(one.token, self.rater_id, (verdict or self.verdict)(one))
            judged += shown
        return judged

    def verdict(self, shown: Presentation) -> Verdict:
        """The verdict that follows from `likes`."""
        left, right = map(self.likes, shown.answers)
        return "tie" if left == right else "left" if left > right else "right"

    def answered(self, loop: Loop, version: int, count: int, now: float | None = None, **facts: Any) -> list[str]:
        """Store what `version` answered to requests of the API, of one user each; the ids that clients got."""
        names: list[str] = []
        drawn = loop.offers.draw("api", version)
        groups = [(group, one) for group in drawn.train for one in group.completions]
        for group, one in itertools.islice(itertools.cycle(groups), count):
            names.append(f"cmpl-{secrets.token_hex(8)}")
            choice = Choice(
                one.text, one.token_ids, one.raw_logps, one.raw_logps, "stop", version, source_id=f"v{version}"
            )
            answer: dict[str, Any] = {"user": names[-1], "prompt_ids": group.prompt_token_ids, "choices": (choice,)}
            answer |= {"prompt": group.prompt.content, "created_at": time.time() if now is None else now, **facts}
            self.store.record(Inference(name=names[-1], rater_id=self.key_id, model="live", options={}, **answer))
        return names

    def say(self, name: str, value: Any, metric: str = "thumbs") -> None:
        """Feedback of the key on an answer."""
        said = Feedback(metric=metric, value=value, inference=name)
        self.store.give_feedback(self.campaign_id, said, Speaker(self.key_id))

    @property
    def key_id(self) -> int:
        """The key of an application."""
        keys = [rater.id for rater in self.store.reader.raters() if rater.scopes]
        return keys[0] if keys else self.store.add_rater("app", key=KeySettings(("generate", "feedback"))).rater.id


@contextmanager
def voters(folder: Path, database: str | None = None, **settings: Any) -> Iterator[Voters]:
    """Raters on the folder's `votes.db`, which is made, or on a database."""
    folder.mkdir(parents=True, exist_ok=True)
    place = database or folder / "votes.db"
    with VoteStore.open(place, seed=0) as store, closing(RunReader.open(folder / "runs.db")) as runs:
        campaign = store.set_campaign(CampaignSettings(**settings))
        names = {rater.name: rater.id for rater in store.reader.raters()}
        rater_id = names.get("one") or store.add_rater("one").rater.id
        yield Voters(store, runs, campaign.id, rater_id)


def given_items(count: int, heldout: int = 0) -> list[NewItem]:
    """Pairs that no trainer drew: texts of letters against texts of digits."""
    return [
        NewItem(
            f"{PROMPTS[index % len(PROMPTS)]} {index}",
            (Candidate(f" good film {'abc' * (index % 3 + 1)}"), Candidate(f" {index}{'123' * (index % 4 + 1)}")),
            heldout=index < heldout,
        )
        for index in range(count)
    ]


def run_updates(loop: Loop, num_updates: int) -> None:
    """Run the loop until it has made `num_updates` updates."""
    while loop.position.num_updates < num_updates:
        loop.next_action()


def learn(loop: Loop, people: Voters) -> None:
    """Vote and run the loop until it has made another update."""
    num_updates = loop.position.num_updates
    while loop.position.num_updates == num_updates:
        people.vote(8)
        loop.next_action()


def until(folder: Path, num_updates: int) -> None:
    """Run a trainer that ends after `num_updates` updates."""
    with looping(live_recipe(folder)) as loop:
        run_updates(loop, num_updates)
        loop.finish()
