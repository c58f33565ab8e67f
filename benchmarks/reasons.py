"""Votes with reasons against votes without: 100 with, 100 and 200 without, over several seeds.

SmolLM2 continues openings of film reviews; a simulated rater, the lexicon, votes on pairs of its answers, and a share
of the votes is wrong. A program makes the reasons from the words that the lexicon saw: "I like: warm. I do not like:
dull."; of a wrong vote they are wrong too. `votes` are learnt by DPO; `reasons` by DPO, and then by self-distillation
with the reason in the teacher's context; `reasons_alone` by the second part alone. Model and base then continue
openings that no vote was about, which the lexicon judges. The reasons say nothing about people.
"""

import random
import re
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith import train
from tunesmith.apps.workflows.live_simulation import hit
from tunesmith.base.config.sections import ModelSection, RewardSource
from tunesmith.base.core.seeds import derive, permutation
from tunesmith.collect.data.prompts import film_prompts
from tunesmith.collect.statistics.intervals import proportion_interval
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.evaluation.compare import Side, compare
from tunesmith.learn.rewards.builtin import SimulatedRater
from tunesmith.learn.rewards.scorer import Scorer

ARMS: Mapping[str, tuple[int, bool, bool]] = {
    "votes_100": (100, True, False),
    "votes_200": (200, True, False),
    "reasons_100": (100, True, True),
    "reasons_alone_100": (100, False, True),
}
"""Votes of each arm, and whether they are learnt as pairs, and by their reasons."""

NUM_HELDOUT = 40
"""Openings that no vote is about."""

TEMPLATE = "What a reader of film reviews says: {privileged_context}\n\nA review for this reader: {prompt}"

_WORD = re.compile(r"[a-z']+")
_MOST_WORDS = 3


class Reasons:
    """What the lexicon saw of two answers, in words."""

    def __init__(self) -> None:
        self._worth: Mapping[str, float] = SentimentIntensityAnalyzer().lexicon

    def of(self, chosen: str, rejected: str, *, is_right: bool) -> str:
        """The reason for `chosen`: its best words and the worst ones of `rejected`, as the rater sees them who may be
        wrong; empty if the lexicon knows no word of either.
        """
        sign = 1.0 if is_right else -1.0
        liked, disliked = self._most(chosen, sign), self._most(rejected, -sign)
        said = [f"I like: {', '.join(liked)}."] if liked else []
        return " ".join([*said, *([f"I do not like: {', '.join(disliked)}."] if disliked else [])])

    def _most(self, text: str, sign: float) -> list[str]:
        words = dict.fromkeys(_WORD.findall(text.lower()))
        worth = {word: sign * self._worth.get(word, 0.0) for word in words}
        known = sorted((word for word in words if worth[word] > 0), key=lambda word: -worth[word])
        return known[:_MOST_WORDS]


def voted(options: Namespace, seed: int) -> list[dict[str, Any]]:
    """Votes on pairs of the base model's answers to openings that are not held out, with their reasons, in a random
    order: rows of pairs.
    """
    needed = max(ARMS[name][0] for name in options.arm or ARMS)
    openings = film_prompts()[NUM_HELDOUT:]
    loaded = load_policy(ModelSection(name=_model(options)))
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=derive(seed, "votes"))
    groups = open_engine(loaded.model, loaded.tokenizer, batch_size=128).generate(openings, 6, sampling)
    rater, reasons, draw = SimulatedRater(), Reasons(), random.Random(derive(seed, "mistakes"))
    rows: list[dict[str, Any]] = []
    for group in groups:
        texts = [completion.text for completion in group.completions]
        for first, second in zip(texts[::2], texts[1::2], strict=True):
            vote = rater.vote(group.prompt, first, second)
            if vote.preference == "tie":
                continue
            is_right = draw.random() < options.accuracy
            chosen, rejected = (first, second) if (vote.preference == "a") == is_right else (second, first)
            reason = reasons.of(chosen, rejected, is_right=is_right)
            rows.append({"prompt": group.prompt.content, "chosen": chosen, "rejected": rejected, "reason": reason})
    order = permutation(derive(seed, "order"), 0, len(rows))
    return [rows[place] for place in order[:needed]]


def learnt(arm: str, rows: Sequence[Mapping[str, Any]], folder: Path, options: Namespace, seed: int) -> str:
    """The folder of the model that has learnt the arm's votes."""
    num_votes, as_pairs, with_reasons = ARMS[arm]
    model, chosen = _model(options), rows[:num_votes]
    shared: dict[str, Any] = {
        "progress": False,
        "run.seed": seed,
        "run.num_threads": options.threads,
        "optimizer.learning_rate": options.learning_rate,
        "optimizer.warmup_steps": 2,
        **({"model.dtype": "float32"} if options.quick else {"model.num_trainable_layers": 10}),
    }
    if as_pairs:
        settings = {
            "run.dir": str(folder / "dpo"),
            "pairs.heldout_fraction": 0.0,
            "dpo": {"num_epochs": 3, "pairs_per_step": 20, "micro_batch_size": 20},
        }
        pairs = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in chosen]
        model = str(train.dpo(model=model, pairs=pairs, **shared, **settings).run_dir / "final")
    if with_reasons:
        settings = {
            "run.dir": str(folder / "distill"),
            "prompts.heldout_fraction": 0.0,
            "prompts.skip_bad": options.quick,
            "rollout": {"prompts_per_step": 16, "completions_per_prompt": 2, "max_new_tokens": 24},
            "distill.context.template": TEMPLATE,
            "distill.self_weights": options.self_weights,
        }
        said = [{"prompt": row["prompt"], "privileged_context": row["reason"]} for row in chosen if row["reason"]]
        steps = 2 if options.quick else options.steps
        result = train.distill(model=model, teacher="self", prompts=said, steps=steps, **shared, **settings)
        model = str(result.run_dir / "final")
    return model


def compared(model: str, options: Namespace, seed: int) -> dict[str, Any]:
    """How often `model` is better than the base on the held-out openings, by the lexicon, and its KL to the base."""
    before, after = (load_policy(ModelSection(name=name)) for name in (_model(options), model))
    comparison = compare(
        Side.of("before", before.model, before.tokenizer),
        Side.of("after", after.model, after.tokenizer),
        film_prompts()[:NUM_HELDOUT],
        Scorer([RewardSource(source="sentiment")], policy_tokenizer=before.tokenizer),
        SamplingParams(max_new_tokens=24, temperature=1.0),
        num_completions=max(1, -(-options.pairs // NUM_HELDOUT)),
        seed=derive(seed, "reasons"),
    )
    return {
        "hits": [hit(one.score_before, one.score_after) for one in comparison.samples],
        "openings": [one.prompt_id for one in comparison.samples],
        "kl_per_sequence": comparison.kl_per_sequence,
        "distinct2_ratio": comparison.distinct2_ratio,
    }


def _model(options: Namespace) -> str:
    return "tiny:llama" if options.quick else options.model


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """The win rate of each arm, over all seeds and of each."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.arm or ARMS}
    num_reasons: list[int] = []
    for seed in range(options.seed, options.seed + options.seeds):
        rows = voted(options, seed)
        num_reasons.append(sum(bool(row["reason"]) for row in rows[:100]))
        for arm, figures in found.items():
            with tempfile.TemporaryDirectory() as place:
                figures.append(compared(learnt(arm, rows, Path(place), options, seed), options, seed))
            rate = statistics.fmean(figures[-1]["hits"])
            say(f"seed {seed}, {arm}: win rate {rate:.3f}, {figures[-1]['kl_per_sequence']:.2f} nats")
    facts = head(options, "reasons", "quick", "accuracy", "steps", "learning_rate", "self_weights")
    return {
        **facts,
        "reasons_of_100": num_reasons,
        "arms": {name: _summary(figures) for name, figures in found.items()},
    }


def _summary(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The win rate over all seeds with its interval, in which openings are the clusters, and of each seed."""
    hits = [one for each in figures for one in each["hits"]]
    low, high = proportion_interval(hits, [one for each in figures for one in each["openings"]])
    return {
        "win_rate": statistics.fmean(hits),
        "low": low,
        "high": high,
        "num_pairs": len(hits),
        "of_seeds": [statistics.fmean(each["hits"]) for each in figures],
        "kl_per_sequence": statistics.fmean(each["kl_per_sequence"] for each in figures),
        "distinct2_ratio": [each["distinct2_ratio"] for each in figures],
    }


def _show(facts: Mapping[str, Any]) -> None:
    columns = ("win_rate", "low", "high", "kl_per_sequence")
    rows = [[name, *(f"{one[column]:.3g}" for column in columns)] for name, one in facts["arms"].items()]
    print_table(["votes", *columns], rows)


main = benchmark(
    measure,
    _show,
    "model",
    "quick",
    "seed",
    "threads",
    arm={"action": "append", "choices": tuple(ARMS), "help": "one arm; repeatable. All if left out"},
    seeds={"type": int, "default": 3, "metavar": "N", "help": "seeds, from --seed on"},
    accuracy={"type": float, "default": 0.85, "metavar": "SHARE", "help": "share of votes that are right"},
    steps={"type": int, "default": 20, "metavar": "N", "help": "steps of self-distillation"},
    learning_rate={"type": float, "default": 3e-4, "metavar": "R", "help": "of both parts"},
    self_weights={"choices": ("current", "initial", "ema"), "default": "initial", "help": "of the teacher"},
    pairs={"type": int, "default": 200, "metavar": "N", "help": "pairs that are compared, for each arm and seed"},
)

if __name__ == "__main__":
    run("reasons")
