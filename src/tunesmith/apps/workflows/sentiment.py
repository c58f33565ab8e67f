"""`tunesmith sentiment`: film reviews, from demonstrations to a policy that praises, judged by something else.

1. SFT: the base model learns how reviews begin, from one part of them.
2. A reward model with a classifier head learns from the labels of a second part, on pairs of a piece of a positive and
   a piece of a negative review.
3. PPO writes on from the first 2 to 8 tokens of a third part, and follows the reward model.
4. The model before and after PPO continue held-out beginnings. The judge is TF-IDF and logistic regression on
   sentences of another data set and on the last part of the reviews: it shares no text with the reward model.

After Ziegler et al. 2019 (arXiv 1909.08593) and the example that TRL began with.
"""

import gc
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tunesmith.apps.workflows.evaluation import Outcome
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.algorithms.sft import SFTRecipe
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.seeds import derive, permutation
from tunesmith.base.runs.environment import peak_rss_gb
from tunesmith.base.runs.folder import RunFolder
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.collate import prefix_prompts
from tunesmith.collect.data.reviews import Review, load_reviews, pieces
from tunesmith.collect.statistics.intervals import Plateau, plateau
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.learn.evaluation.compare import Comparison, Side, compare
from tunesmith.learn.evaluation.tfidf import TextClassifier
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import run
from tunesmith.observe.reports.html import write_comparison_report

NUM_COMPARED = 15
"""Beginnings that are kept away from training and compared at the end."""

COMPARED_COMPLETIONS = 24

PIECE_WORDS = (8, 32)
"""Words in a piece that the reward model learns from: about as many as the policy writes."""

PIECES_PER_REVIEW = 8
JUDGE_PIECES = 6
SHARES = (0.25, 0.4, 0.15)
"""Of the reviews for SFT, for the reward model and for the judge; PPO takes its beginnings from the rest."""

JUDGE_HELDOUT = 0.1


@dataclass(frozen=True, slots=True)
class SentimentOptions:
    """Options of the workflow. `quick` takes a twentieth of the reviews and two steps of each stage.

    `model` replaces that of the recipes; all of its layers are kept and trained. `level` is that of all trainings.
    """

    reviews: str = "data:sentiment/imdb5k.text2vec.jsonl.gz"
    judge: str = "data:sentiment/nltk.sentence_polarity.zip"
    model: str | None = None
    seed: int = 0
    out: str = "runs"
    quick: bool = False
    level: str | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The reviews of each stage; no review is in two of them."""

    demonstrations: Sequence[Review]
    labelled: Sequence[Review]
    judged: Sequence[Review]
    beginnings: Sequence[Review]
    heldout: Sequence[Review]


@dataclass(frozen=True, slots=True)
class Judge:
    """The independent classifier, and its accuracy on rows of its data that it was not fitted on."""

    classifier: TextClassifier
    accuracy: float
    num_texts: int

    def positive(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """The probability that prompt and completion together praise, of each: a reward function."""
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        return self.classifier.probabilities(texts).tolist()


@dataclass(frozen=True, slots=True)
class Stage:
    """Inputs of every stage: options, the run folder, the recipes of the three trainings."""

    options: SentimentOptions
    folder: RunFolder
    sft_recipe: SFTRecipe
    reward_recipe: RewardRecipe
    policy_recipe: PPORecipe

    def say(self, number: int, text: str) -> None:
        """Announce stage `number` of four on stderr."""
        setup.say(f"\n[{number}/4] {text}", enabled=True)


def run_sentiment(options: SentimentOptions) -> Outcome:
    """Run all stages and write the folder; the figures that `tunesmith sentiment --json` prints.

    Raises InputError for reviews that cannot be used.
    """
    watch = setup.Stopwatch()
    parts = split_reviews(load_reviews(options.reviews), options)
    judge = fit_judge([*load_reviews(options.judge), *parts.judged], options.seed)
    stage = prepare(options)

    sft_run = train_sft(stage, parts.demonstrations)
    reward_run = train_reward_model(stage, parts.labelled)
    policy_run = train_policy(stage, parts.beginnings, sft_run, reward_run)
    comparison = compare_models(stage, parts.heldout, judge, sft_run, policy_run)

    curve = plateau([row["reward"] for row in policy_run.metrics])
    facts = figures(stage, comparison, judge, reward_run, curve)
    facts["minutes"] = watch.minutes
    stage.folder.write_json("result.json", facts)
    write_comparison_report(
        stage.folder.path / "report.html",
        comparison.to_json(),
        title="Film reviews before and after PPO",
        policy_metrics=list(policy_run.metrics),
        notes=notes(curve, judge, reward_run),
    )
    return Outcome(facts, comparison, stage.folder.path)


def split_reviews(reviews: Sequence[Review], options: SentimentOptions) -> Parts:
    """The reviews shuffled by the seed and dealt out. Raises DataError if there are too few, or one label alone."""
    order = [reviews[i] for i in permutation(derive(options.seed, "reviews"), 0, len(reviews))]
    order = order[: max(len(order) // 20, 4 * NUM_COMPARED)] if options.quick else order
    if len(order) < 4 * NUM_COMPARED:
        raise DataError(f"{options.reviews} has {len(order)} reviews; give {4 * NUM_COMPARED} or more")
    heldout, rest = order[:NUM_COMPARED], order[NUM_COMPARED:]
    first, second, third = (int(len(rest) * share) for share in itertools.accumulate(SHARES))
    parts = Parts(rest[:first], rest[first:second], rest[second:third], rest[third:], heldout)
    if len({review.is_positive for review in parts.labelled}) < 2:
        raise DataError(f"{options.reviews} has one label alone; give reviews with `label` 0 and 1")
    return parts


def fit_judge(texts: Sequence[Review], seed: int) -> Judge:
    """The judge, fitted on most of `texts`; the rest says how often it is right."""
    order = [texts[i] for i in permutation(derive(seed, "judge"), 0, len(texts))]
    num_heldout = max(1, int(len(order) * JUDGE_HELDOUT))
    heldout, train = (short_texts(some, seed) for some in (order[:num_heldout], order[num_heldout:]))
    classifier = TextClassifier.fitted([one.text for one in train], [one.is_positive for one in train])
    says = classifier.probabilities([one.text for one in heldout]) > 0.5
    right = [bool(said) == one.is_positive for said, one in zip(says, heldout, strict=True)]
    return Judge(classifier, sum(right) / len(right), len(train))


def short_texts(reviews: Sequence[Review], seed: int) -> list[Review]:
    """The reviews, those that are longer than a piece as pieces: about as long as what is judged."""
    return [
        replace(review, text=text)
        for review in reviews
        for text in (
            pieces(review, PIECE_WORDS, JUDGE_PIECES, seed)
            if len(review.text.split()) > PIECE_WORDS[1]
            else [review.text]
        )
    ]


def prepare(options: SentimentOptions) -> Stage:
    """The folder and the three recipes, with this run's seed, model and folder filled in."""
    chosen: dict[str, object] = {**asdict(options), "workflow": "sentiment"}
    folder = RunFolder.create(Path(options.out), "sentiment_imdb", {"sentiment": chosen})
    overrides: dict[str, object] = {"run.seed": options.seed, "run.dir": str(folder.path)}
    overrides |= {"run.steps": 2} if options.quick else {}
    overrides |= {"level": options.level} if options.level else {}
    # The recipes count the layers of their own model.
    named: dict[str, object] = {"model": {"name": options.model}} if options.model else {}
    whole: dict[str, object] = {"reward_model.num_layers": None} if options.model else {}
    trained: dict[str, object] = {"model.num_trainable_layers": None} if options.model else {}
    small = {"rollout.prompts_per_step": 8, "ppo.num_minibatches": 1} if options.quick else {}
    given = {**overrides, **named}
    sft_recipe = load_recipe("sft", recipe="sentiment_imdb_sft", overrides={**given, **trained}).recipe
    reward_recipe = load_recipe("reward", recipe="sentiment_imdb_reward", overrides={**given, **whole}).recipe
    policy_recipe = load_recipe("ppo", recipe="sentiment_imdb", overrides={**given, **trained, **small}).recipe
    assert isinstance(sft_recipe, SFTRecipe)
    assert isinstance(reward_recipe, RewardRecipe)
    assert isinstance(policy_recipe, PPORecipe)
    setup.prepare(policy_recipe)
    return Stage(options, folder, sft_recipe, reward_recipe, policy_recipe)


def train_sft(stage: Stage, reviews: Sequence[Review]) -> setup.RunResult:
    """The base model after it has learnt how `reviews` begin."""
    stage.say(1, f"the base model learns how {len(reviews)} reviews begin")
    result = run(stage.sft_recipe, Inputs(demonstrations=[review.text for review in reviews]))
    gc.collect()
    return result


def train_reward_model(stage: Stage, reviews: Sequence[Review]) -> setup.RunResult:
    """The reward model after pairs of a piece of a positive and a piece of a negative review of `reviews`.

    Whole reviews are held out: pieces of one review may overlap.
    """
    num_heldout = max(1, int(len(reviews) * stage.reward_recipe.pairs.heldout_fraction))
    heldout, pairs = (
        labelled_pairs(some, stage.options.seed) for some in (reviews[:num_heldout], reviews[num_heldout:])
    )
    stage.say(2, f"a reward model learns from {len(pairs)} pieces of positive and as many of negative reviews")
    result = run(stage.reward_recipe, Inputs(pairs=pairs, heldout_pairs=heldout))
    gc.collect()
    return result


def labelled_pairs(reviews: Sequence[Review], seed: int) -> list[Pair]:
    """Pieces of positive against pieces of negative reviews, one of each in a pair; what is left over is dropped.

    The difference of two logits is what logistic regression on labels fits, without its constant: which pieces meet is
    of no importance.
    """
    sides = [
        [
            (review.id, text)
            for review in reviews
            if review.is_positive is wanted
            for text in pieces(review, PIECE_WORDS, PIECES_PER_REVIEW, seed)
        ]
        for wanted in (True, False)
    ]
    return [
        Pair(Prompt(f"{good_id} {bad_id}", ""), good, bad)
        for (good_id, good), (bad_id, bad) in zip(*sides, strict=False)
        if good != bad
    ]


def train_policy(
    stage: Stage, reviews: Sequence[Review], sft_run: setup.RunResult, reward_run: setup.RunResult
) -> setup.RunResult:
    """The policy that starts from the SFT model, is held near it, and follows the reward model."""
    stage.say(3, f"PPO writes on from the first tokens of {len(reviews)} reviews and follows the reward model")
    model = stage.policy_recipe.model.model_copy(update={"name": str(sft_run.run_dir)})
    source = RewardSource(source=str(reward_run.run_dir))
    cfg = stage.policy_recipe.model_copy(update={"model": model, "reward": (source,)})
    column = cfg.prompts.text_column
    result = run(cfg, Inputs(prompts=[{column: review.text} for review in reviews]))
    gc.collect()
    return result


def compare_models(
    stage: Stage, reviews: Sequence[Review], judge: Judge, sft_run: setup.RunResult, policy_run: setup.RunResult
) -> Comparison:
    """The model before and after PPO on the first tokens of `reviews`, by the judge."""
    num = 2 if stage.options.quick else COMPARED_COMPLETIONS
    stage.say(4, f"before and after, {num} completions of each of {len(reviews)} held-out beginnings")
    cfg, seed = stage.policy_recipe, derive(stage.options.seed, "compare")
    before, after = (
        load_policy(cfg.model.model_copy(update={"name": str(run.run_dir)})) for run in (sft_run, policy_run)
    )
    texts = [Prompt(review.id, review.text) for review in reviews]
    assert cfg.prompts.prefix_tokens is not None, "the recipe says how long beginnings are"
    beginnings = prefix_prompts(texts, before.tokenizer, cfg.prompts.prefix_tokens, seed)
    return compare(
        Side.of("after SFT", before.model, before.tokenizer),
        Side.of("after PPO", after.model, after.tokenizer),
        beginnings,
        Scorer([judge.positive], policy_tokenizer=before.tokenizer),
        SamplingParams(max_new_tokens=cfg.rollout.max_new_tokens),
        num_completions=num,
        seed=seed,
    )


def figures(
    stage: Stage, comparison: Comparison, judge: Judge, reward_run: setup.RunResult, curve: Plateau
) -> dict[str, object]:
    """The object that `tunesmith sentiment --json` prints, but for its minutes."""
    samples = comparison.write_samples_jsonl(stage.folder.path / "samples.jsonl")
    names = (
        "num_improved", "num_prompts", "mean_before", "mean_after", "p_value", "kl_per_sequence",
        "distinct2_before", "distinct2_after", "distinct2_ratio",
    )  # fmt: skip
    return {
        **{name: getattr(comparison, name) for name in names},
        "judge_accuracy": judge.accuracy,
        "reward_model_accuracy": reward_run.summary.get("accuracy"),
        "reward_first": curve.first,
        "reward_plateau": curve.level,
        "plateau_step": curve.step,
        "plateau_is_flat": curve.is_flat,
        "peak_rss_gb": peak_rss_gb(),
        "seed": stage.options.seed,
        "report": str(stage.folder.path / "report.html"),
        "samples": str(samples),
    }


def notes(curve: Plateau, judge: Judge, reward_run: setup.RunResult) -> list[str]:
    """Notes of the page on the training and the judge."""
    flat = "stays within a tenth of that" if curve.is_flat else "is still changing at the end"
    accuracy = reward_run.summary.get("accuracy")
    model = f", which is right on {accuracy:.0%} of held-out pairs" if isinstance(accuracy, float) else ""
    return [
        f"The reward is the reward model's{model}. It goes from {curve.first:.2f} to {curve.level:.2f}, and from step "
        f"{curve.step} on it {flat}.",
        f"The judge is TF-IDF and logistic regression on {judge.num_texts:,} other texts, and right on "
        f"{judge.accuracy:.0%} of texts it has not seen. It says how probable praise is, for beginning and completion "
        "together.",
    ]
