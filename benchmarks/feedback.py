"""What the live loop learns from an application's feedback: thumbs, edits, pairs, and all of them in turns.

For each kind a server with the API and a trainer run for some seconds, while simulated users, by OpenAI's client,
continue openings and say by a lexicon what the answers are worth; a share of what they say is wrong, and of reversed
users all but that share. An edit adds a sentence. Then the base model and the last version continue held-out openings,
which the lexicon judges. With the default, ten minutes on two cores. What is learnt says nothing about people.
"""

import json
import random
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith.apps.workflows.live_simulation import (
    SimulationOptions,
    child,
    compare_versions,
    hit,
    openings,
    server,
    wait_until,
)
from tunesmith.base.core.seeds import derive
from tunesmith.collect.statistics.intervals import proportion_interval
from tunesmith.collect.store.runs import RunReader
from tunesmith.learn.rewards.builtin import TIE_BELOW, SimulatedRater

KINDS = ("thumbs", "edits", "pairs")
ACCURACY = 0.85

_PRAISE = (" It was a wonderful film.", " I loved this beautiful story.", " A great and moving film.")
_SMOLLM2 = ("--recipe", "live_smollm2", "--live.votes-per-update", "16", "--live.check.min-votes", "100")
_TINY = (
    *("--model", "tiny:llama", "--model.dtype", "float32", "--rollout.max-new-tokens", "6", "--prompts", "films"),
    *("--rollout.prompts-per-step", "8", "--rollout.completions-per-prompt", "2", "--live.votes-per-update", "8"),
    *("--live.pool", "8", "--run.num-threads", "1"),
)


class Users:
    """`with Users(...)`: so many threads ask and say what they think until the block ends."""

    def __init__(
        self,
        api: str,
        key: str,
        kind: str,
        prompts: Sequence[str],
        *,
        num_users: int,
        share_reversed: float,
        think_s: float,
        seed: int,
    ) -> None:
        self._api = api
        self._key = key
        self._kinds = KINDS if kind == "all" else (kind,)
        self._prompts = prompts
        self._num_reversed = round(share_reversed * num_users)
        self._think_s = think_s
        self._seed = seed
        self._leave = threading.Event()
        self.said: list[str] = []
        """The kind of each feedback that the server has acknowledged."""
        self.problems: list[str] = []
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(num_users)
        ]

    def __enter__(self) -> "Users":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self, number: int) -> None:
        import openai  # an extra of the tests

        draw, judge = random.Random(derive(self._seed, "user", number)), SimulatedRater()
        with openai.OpenAI(base_url=self._api, api_key=self._key, max_retries=3, timeout=60) as client:
            # People read, think, and come back: between two requests of one, exponential times.
            while not self._leave.wait(draw.expovariate(1 / self._think_s)):
                try:
                    self._turn(client, draw, judge, number)
                except openai.OpenAIError as error:
                    self.problems.append(str(error))
                    self._leave.wait(1)

    def _turn(self, client: Any, draw: random.Random, judge: SimulatedRater, number: int) -> None:
        kind, prompt = draw.choice(self._kinds), draw.choice(self._prompts)
        n = 2 if kind == "pairs" else 1
        made = client.completions.create(model="live", prompt=prompt, n=n, user=f"user {number}")
        texts = [choice.text for choice in made.choices]
        scores = [judge.score(prompt, text) for text in texts]
        is_right = (draw.random() < ACCURACY) == (number >= self._num_reversed)
        said: dict[str, Any] = {"inference_id": made.id}
        if kind == "pairs":
            if abs(scores[0] - scores[1]) < TIE_BELOW:
                return
            better = int((scores[1] > scores[0]) == is_right)
            said |= {"metric_name": "preference", "value": {"better": better, "worse": 1 - better}}
        elif kind == "thumbs":
            if abs(scores[0]) < TIE_BELOW:
                return  # neither good nor bad
            said |= {"metric_name": "thumbs", "value": (scores[0] > 0) == is_right}
        else:
            said |= {
                "metric_name": "demonstration",
                "value": texts[0].replace("\x00", "").rstrip() + draw.choice(_PRAISE),
            }
        client.post("/feedback", body=said, cast_to=object)
        self.said.append(kind)


def talked(folder: Path, kind: str, options: Namespace) -> Users:
    """The users, once they have talked to a server beside a trainer and all have left."""
    words = ["live", "--dir", str(folder), *(_TINY if options.quick else _SMOLLM2), "--seed", str(options.seed)]
    asking = {
        "num_users": options.users,
        "share_reversed": options.reversed,
        "think_s": options.think,
        "seed": options.seed,
    }
    with child("trainer", words, folder / "trainer.log") as trainer:
        prompts = openings(folder, trainer)
        with server(folder, "--openai", str(folder)) as served:
            with Users(served.api, served.key, kind, prompts, **asking) as users:
                wait_until(time.monotonic() + options.seconds, [trainer, served.child], lambda: False)
            return users


def measured(kind: str, options: Namespace, say: Say) -> dict[str, Any]:
    """The figures of one kind of feedback."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        users = talked(folder, kind, options)
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        comparison = compare_versions(SimulationOptions(folder, num_pairs=options.pairs, seed=options.seed))
        with closing(RunReader.open(folder / "runs.db")) as reader:
            versions = [one for one in reader.versions() if one.version > 0]
    hits = [hit(one.score_before, one.score_after) for one in comparison.samples]
    low, high = proportion_interval(hits, [one.prompt_id for one in comparison.samples])
    found = {
        "win_rate": sum(hits) / len(hits),
        "low": low,
        "high": high,
        "num_pairs": len(hits),
        "kl_per_sequence": comparison.kl_per_sequence,
        "feedback": len(users.said),
        "learnt": result["votes"],
        "updates": result["updates"],
        "versions_served": sum(one.accepted for one in versions),
        "versions_refused": sum(not one.accepted for one in versions),
        "feedback_to_version_s": result["vote_to_version_median_s"],
        "problems": users.problems[:5],
    }
    say(f"{kind}: win rate {found['win_rate']:.2f} ({low:.2f} to {high:.2f}), {found['feedback']} said")
    return found


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All kinds, one after the other."""
    kinds = options.kind or (*KINDS, "all")
    return {
        **head(options, "feedback", "quick", "seconds", "users", "think", "reversed"),
        **{kind: measured(kind, options, say) for kind in kinds},
    }


def _show(facts: Mapping[str, Any]) -> None:
    kinds = [kind for kind in (*KINDS, "all") if kind in facts]
    columns = ("win_rate", "low", "high", "feedback", "learnt", "updates", "versions_refused", "feedback_to_version_s")
    rows = [[kind, *(f"{facts[kind][name] or 0:.3g}" for name in columns)] for kind in kinds]
    print_table(["feedback", *columns], rows)


main = benchmark(
    measure,
    _show,
    "quick",
    "seed",
    kind={"action": "append", "choices": (*KINDS, "all"), "help": "one kind of feedback; repeatable. All if left out"},
    seconds={"type": float, "default": 120.0, "metavar": "S", "help": "seconds in which users talk, for each kind"},
    users={"type": int, "default": 3, "metavar": "N", "help": "simulated users"},
    think={"type": float, "default": 1.0, "metavar": "S", "help": "mean seconds of a user between two requests"},
    reversed={"type": float, "default": 0.0, "metavar": "SHARE", "help": "share of users who say the opposite"},
    pairs={"type": int, "default": 200, "metavar": "N", "help": "fresh pairs that are compared, about"},
)

if __name__ == "__main__":
    run("feedback")
