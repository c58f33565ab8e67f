"""What is found of simulated raters, and what it is worth to a reward model; the truth of two published crowds.

Twenty raters vote on pairs of a positive and a negative sentence (rt-polarity). Each names the positive one with
probability 0.85, but for a share of them who are careless (1/2), lazy (the left one, but for one vote in five) or
reversed (0.15), in turns. Half of the pairs have a second vote. A reward model of SmolLM2's lower layers learns the
votes as they come, and weighed by `pairs.raters: estimated`; it is judged on other sentences, without raters. With
`--linear` it is a linear one on words, which takes seconds.
`regained` is the share of the accuracy that bad raters cost, against raters who are all good.

The crowds are those of the folder that TUNESMITH_DATA names. crowd-kit's aggregations are measured beside ours where it
is installed; else their best figures are those of crowd-kit 1.4.2.
"""

import csv
import gzip
import importlib
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith import train
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.pairs import write_pairs
from tunesmith.collect.data.sources import data_path
from tunesmith.collect.statistics.crowds import GivenLabel, infer_labels
from tunesmith.learn.evaluation.tfidf import TextBradleyTerry, TextPair
from tunesmith.learn.trainers.rater_weights import VotesOfRaters

NUM_RATERS = 20
ACCURACY = 0.85
LOOKS = 0.2
"""Share of the pairs at which a lazy rater looks."""

SHARES = (0.0, 0.1, 0.25, 0.4)
KINDS = ("careless", "lazy", "reversed")

CROWDS = ("duck-identification", "jn-product")
CROWD_KIT = {"duck-identification": 0.8888888888888888, "jn-product": 0.9397474443776308}
"""Accuracy of the best of crowd-kit 1.4.2's aggregations, DawidSkene on both."""

_METHODS = ("MajorityVote", "Wawa", "ZeroBasedSkill", "DawidSkene", "OneCoinDawidSkene", "GLAD", "MMSR", "KOS", "MACE")
_SENTENCES = "data:sentiment/nltk.sentence_polarity.zip"


@dataclass(frozen=True)
class Rater:
    """The chances of a simulated rater to name the better answer where it is on the left, and on the right."""

    on_left: float
    on_right: float

    @property
    def reliability(self) -> float:
        """The mean of both."""
        return (self.on_left + self.on_right) / 2


def raters(share: float) -> list[Rater]:
    """Twenty raters, of whom a share is careless, lazy or reversed."""
    made = {
        "careless": Rater(0.5, 0.5),
        "lazy": Rater(1 - LOOKS + LOOKS * ACCURACY, LOOKS * ACCURACY),
        "reversed": Rater(1 - ACCURACY, 1 - ACCURACY),
    }
    num_bad = round(share * NUM_RATERS)
    good = Rater(ACCURACY, ACCURACY)
    return [made[KINDS[place % len(KINDS)]] if place < num_bad else good for place in range(NUM_RATERS)]


@dataclass(frozen=True)
class Sentences:
    """Pairs of a positive and a negative sentence, to vote on and to judge by."""

    learnt: Sequence[tuple[str, str]]
    judged: Sequence[tuple[str, str]]

    @classmethod
    def read(cls, num_pairs: int, num_judged: int, seed: int) -> "Sentences":
        """Pairs drawn by `seed`. Raises DataError without the sentences."""
        place = data_path(_SENTENCES)
        random = np.random.default_rng(seed)
        with zipfile.ZipFile(place) as archive:
            names = {name.rsplit(".", 1)[-1]: name for name in archive.namelist() if name.endswith((".pos", ".neg"))}
            texts = {
                kind: [line.strip() for line in archive.read(name).decode("latin1").splitlines() if line.strip()]
                for kind, name in names.items()
            }
        sides = [[texts[kind][place] for place in random.permutation(len(texts[kind]))] for kind in ("pos", "neg")]
        pairs = list(zip(*sides, strict=False))
        return cls(pairs[:num_pairs], pairs[num_pairs : num_pairs + num_judged])


def votes(sentences: Sequence[tuple[str, str]], crowd: Sequence[Rater], seed: int) -> list[Pair]:
    """The votes of the crowd as rows of an export: one on each pair, and a second one on every other pair."""
    random = np.random.default_rng(seed)
    found: list[Pair] = []
    for number, (positive, negative) in enumerate(sentences):
        for rater in random.permutation(len(crowd))[: 1 + number % 2]:
            is_left = random.random() < 0.5
            is_right = random.random() < (crowd[rater].on_left if is_left else crowd[rater].on_right)
            sides = (positive, negative) if is_right else (negative, positive)
            columns = {"rater": f"rater {rater}", "chosen_side": "left" if is_left == is_right else "right"}
            found.append(Pair(Prompt(f"{number}.{rater}", "", columns), *sides))
    return found


def found_of(rows: Sequence[Pair], crowd: Sequence[Rater]) -> dict[str, float]:
    """How many of the raters' reliabilities are within their intervals, and how far they are off."""
    weigh = VotesOfRaters()
    weigh([*rows])
    assert weigh.found is not None
    truth = {f"rater {place}": rater.reliability for place, rater in enumerate(crowd)}
    pairs = [(one.reliability, truth[str(name)]) for name, one in zip(weigh.names, weigh.found.raters, strict=True)]
    return {
        "within_interval": fmean(float(one.low <= true <= one.high) for one, true in pairs),
        "mean_error": fmean(abs(one.value - true) for one, true in pairs),
        "effective_votes": weigh.found.effective,
    }


def accuracy(rows: Sequence[Pair], judged: Sequence[Pair], how: str, options: Namespace, seed: int) -> float:
    """Accuracy of a reward model that learns `rows`, `equal` or weighed by what is `estimated` of their raters."""
    if options.linear:
        return _linear(rows, judged, how)
    size = {"model": "tiny:llama", "model.dtype": "float32"} if options.quick else {"model": options.model}
    with tempfile.TemporaryDirectory() as folder:
        done = train.reward(
            pairs=cast(Any, [*rows]),
            **{
                **size,
                "pairs.heldout_source": _written(judged, Path(folder)),
                "pairs.raters": how,
                "pairs.truncate": "left",  # a byte of a sentence is a token of a tiny model
                "reward_model.num_layers": None if options.quick else options.layers,
                "reward_model.pairs_per_step": 32,
                "reward_model.micro_batch_size": 32,
                "optimizer.learning_rate": 2e-4,
                "optimizer.head_learning_rate": 1e-3,
                "optimizer.warmup_steps": 5,
                "optimizer.schedule": "linear",
                "run.dir": folder,
                "run.checkpoint_every": 0,
                "run.seed": seed,
            },
            progress=False,
        )
    return cast(float, done.summary["eval/accuracy"])


def _linear(rows: Sequence[Pair], judged: Sequence[Pair], how: str) -> float:
    learnt = VotesOfRaters()([*rows]) if how == "estimated" else rows
    model = TextBradleyTerry.fitted(_texts(learnt), weights=[pair.weight for pair in learnt])
    return fmean(float(margin > 0) for margin in model.margins(_texts(judged)))


def _texts(pairs: Sequence[Pair]) -> list[TextPair]:
    return [TextPair(str(pair.chosen), str(pair.rejected)) for pair in pairs]


def _written(pairs: Sequence[Pair], folder: Path) -> str:
    path = folder / "judged.jsonl"
    write_pairs(path, pairs)
    return str(path)


def simulated(options: Namespace, say: Say) -> dict[str, Any]:
    """The figures of each share of bad raters, means over the seeds."""
    num, num_judged = (200, 40) if options.quick else (options.pairs, options.judged)
    per_seed: list[dict[float, dict[str, float]]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        sentences = Sentences.read(num, num_judged, seed)
        judged = [Pair(Prompt(f"judged {place}", ""), *sides) for place, sides in enumerate(sentences.judged)]
        found: dict[float, dict[str, float]] = {}
        for share in SHARES:
            crowd = raters(share)
            rows = votes(sentences.learnt, crowd, seed)
            figures = found_of(rows, crowd)
            figures |= {how: accuracy(rows, judged, how, options, seed) for how in ("equal", "estimated")}
            found[share] = figures
            say(f"seed {seed}, {share:.0%} bad: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        per_seed.append(found)
    means = {
        share: {name: fmean(found[share][name] for found in per_seed) for name in per_seed[0][share]}
        for share in SHARES
    }
    good = means[0.0]["equal"]
    for share in SHARES[1:]:
        cost = good - means[share]["equal"]
        means[share]["regained"] = (means[share]["estimated"] - means[share]["equal"]) / cost if cost > 0 else 1.0
    means[0.0]["lost"] = good - means[0.0]["estimated"]
    return {f"{share:.0%}": figures for share, figures in means.items()}


def crowds(say: Say) -> dict[str, Any]:
    """Accuracy of the inferred answers of published crowds, ours and crowd-kit's best."""
    found: dict[str, Any] = {}
    for name in CROWDS:
        answers, truth_rows = (_csv(data_path(f"data:raters/{name}.{kind}.csv.gz")) for kind in ("answer", "truth"))
        truth = dict(truth_rows)
        ours = infer_labels([GivenLabel(*row) for row in answers])
        found[name] = {
            "accuracy": fmean(float(ours.labels[question] == label) for question, label in truth.items()),
            **_crowd_kit(name, answers, truth),
        }
        say(f"{name}: {found[name]}")
    return found


def _csv(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def _crowd_kit(name: str, answers: Sequence[Sequence[str]], truth: Mapping[str, str]) -> dict[str, object]:
    try:
        kit, pandas = importlib.import_module("crowdkit.aggregation"), importlib.import_module("pandas")
    except ModuleNotFoundError:
        return {"crowd_kit_best": CROWD_KIT[name], "crowd_kit": "as recorded for 1.4.2"}
    table = pandas.DataFrame(answers, columns=["task", "worker", "label"])
    scores: dict[str, float] = {}
    for method in _METHODS:
        labels = getattr(kit, method)().fit_predict(table).to_dict()
        scores[method] = fmean(float(labels[question] == label) for question, label in truth.items())
    return {"crowd_kit_best": max(scores.values()), "crowd_kit": scores}


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """Crowds first: they take seconds."""
    about = head(options, "raters", "quick", "linear", "model", "layers", "pairs", "judged", "seeds", "seed")
    return {**about, "crowds": crowds(say), "raters": simulated(options, say)}


def _show(facts: Mapping[str, Any]) -> None:
    rows = [[name, f"{one['accuracy']:.4f}", f"{one['crowd_kit_best']:.4f}"] for name, one in facts["crowds"].items()]
    print_table(["crowd", "ours", "crowd-kit's best"], rows)
    columns = ("within_interval", "mean_error", "effective_votes", "equal", "estimated", "regained", "lost")
    table = [
        [share, *(f"{one[name]:.3f}" if name in one else "" for name in columns)]
        for share, one in facts["raters"].items()
    ]
    print_table(["bad raters", *columns], table)


main = benchmark(
    measure,
    _show,
    "quick",
    "model",
    "seed",
    linear={"action": "store_true", "help": "a linear reward model on words, in place of the language model"},
    layers={"type": int, "default": 6, "metavar": "N", "help": "lowest layers that the reward model keeps"},
    pairs={"type": int, "default": 3000, "metavar": "N", "help": "pairs that are voted on, half of them twice"},
    judged={"type": int, "default": 2000, "metavar": "N", "help": "pairs that reward models are judged by"},
    seeds={"type": int, "default": 3, "metavar": "N", "help": "seeds, from --seed on"},
)

if __name__ == "__main__":
    run("raters")
