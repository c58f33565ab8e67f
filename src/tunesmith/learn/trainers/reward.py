"""The reward model: a scalar head on a language model, trained on which of two completions was preferred.

Bradley and Terry 1952; Stiennon et al. 2020. Shape legend: N pairs, R rankings, K completions of a ranking, B
sequences, T tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import cast

import torch
from torch import nn

from tunesmith.base.config.algorithms.reward import CommitteeSection, RewardRecipe, RewardTrainerSection
from tunesmith.base.core.errors import ConfigError, TrainingError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import Groups, derive, items_at, permutation, steps_of_epochs
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Finding
from tunesmith.collect.data.balance import balanced, beside_length
from tunesmith.collect.data.collate import (
    EncodedPreference,
    PairBatch,
    TokenIds,
    answer_lengths,
    as_pairs,
    collate_pairs,
    collate_rankings,
    shared_length,
)
from tunesmith.collect.data.pairs import PreferenceLike
from tunesmith.collect.data.sets import preference_sets
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.length_trend import LengthTrend
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.loaded import context_length, freeze_lower_layers, keep_lower_layers
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.models.sharding import shard
from tunesmith.learn.algorithms.kl import Controller
from tunesmith.learn.algorithms.preference_loss import (
    bootstrap_weights,
    bradley_terry,
    heads_loss,
    plackett_luce,
    uncontradicted,
)
from tunesmith.learn.algorithms.sums import Beside, merged
from tunesmith.learn.evaluation.reward_quality import decided_pairs, head_rewards, judge
from tunesmith.learn.evaluation.reward_sources import EvaluationFigures, Stats, decided_by_source, pairs_to_judge
from tunesmith.learn.evaluation.reward_verdict import verdict
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs, Metrics, StepResult
from tunesmith.learn.trainers.averaging import TailAverage
from tunesmith.learn.trainers.estimate import Estimate, training_estimate
from tunesmith.learn.trainers.metrics import update_metrics
from tunesmith.learn.trainers.passes import accumulate
from tunesmith.learn.trainers.rater_weights import votes_of_raters
from tunesmith.learn.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.session import Session
from tunesmith.learn.trainers.work import Rows, RunWork, Work

_MOST_KNOWN = 1024
"""Answers that the heads' spread on votes is measured on, at most, and about as many that the trend over length is
fitted to: a quantile at 95 %, or four straight parts, need no more."""

_log = get_logger(__name__)


@dataclass(slots=True)
class Reward:
    """The learner: `step` changes the reward model and the optimizer.

    With `as_rankings` the loss is Plackett-Luce over whole rankings, else Bradley-Terry over pairs. Several heads learn
    bootstrap samples, drawn with `seed`; `prompt_of` is the text of the prompt of a row, by its id, and may lack some.
    With `has_margins` the margins of the pairs are used; from the step `first_filtered` on pairs are left out as
    `committee` says; `average` is what follows the weights.
    """

    cfg: RewardTrainerSection
    model: RewardModel
    optimizer: MasterAdamW
    as_rankings: bool = False
    seed: int = 0
    prompt_of: Mapping[str, str] = field(default_factory=dict[str, str])
    counters: Mapping[str, Controller] = field(default_factory=dict[str, Controller])
    has_margins: bool = False
    committee: CommitteeSection = field(default_factory=CommitteeSection)
    first_filtered: int = 0
    average: TailAverage | None = None
    uploader: Uploader | None = field(init=False)

    def __post_init__(self) -> None:
        self.uploader = setup.uploader_to(self.model.model.device)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The reward model, and the mean of its weights if there is one."""
        return {"model": self.model, **({} if self.average is None else {"average": self.average})}

    def step(self, pairs: Sequence[EncodedPreference], index: int) -> StepResult:
        """One step: the loss of `pairs` (or rankings), accumulated over micro-batches, and an update."""
        loss_of = partial(self.micro_batch_loss, num_items=len(pairs), trains=True)
        with span("update"):
            report, stats = accumulate(self.optimizer, chunks(pairs, self.cfg.micro_batch_size), loss_of)
        if self.average is not None:
            self.average.follow(index)
        with span("metrics"):
            metrics = {**merged(stats).metrics(), **update_metrics([report])}
        return StepResult(metrics, report, lambda: [asdict(pair) for pair in pairs])

    def micro_batch_loss(
        self, items: Sequence[EncodedPreference], num_items: float, *, trains: bool = False
    ) -> tuple[torch.Tensor, Stats]:
        """The loss of one micro-batch, divided by `num_items`, and its statistics. Each completion is scored once.

        The loss that `trains` has all that the settings add to the plain one; then each of several heads learns its own
        sample of the items.
        """
        if self.as_rankings:
            return self.loss_of_rankings(items, num_items, trains=trains)
        pairs = as_pairs(items)
        batch = setup.sent(collate_pairs(pairs, pad_id=0), self.uploader)
        reward_BK = self.model.heads(batch.ids_BT, batch.lengths_B)
        if not trains and (trend := self.model.length_trend) is not None:
            reward_BK = reward_BK - reward_BK.new_tensor(trend.at(answer_lengths(pairs).tolist()))[:, None]
        return self.loss_of_pairs(pairs, batch, reward_BK, num_items, trains=trains)

    def loss_of_pairs(
        self,
        pairs: Sequence[EncodedPreference],
        batch: PairBatch,
        reward_BK: torch.Tensor,
        num_items: float,
        *,
        trains: bool,
    ) -> tuple[torch.Tensor, Stats]:
        """The Bradley-Terry loss of a batch from the rewards of its rows, of several heads the mean of theirs."""
        cfg = self.cfg
        loss_of = partial(
            bradley_terry,
            margin_B=batch.margin_N if trains and self.has_margins else None,
            tie_B=batch.tie_N,
            num_pairs=num_items,
            center_coef=cfg.center_coef if trains else 0.0,
            label_smoothing=cfg.label_smoothing if trains else 0.0,
        )
        if self.model.num_heads == 1:
            reward_B = reward_BK[:, 0]
            return loss_of(reward_B[batch.chosen_N], reward_B[batch.rejected_N], weight_B=batch.weight_N)
        sides = reward_BK[batch.chosen_N], reward_BK[batch.rejected_N]
        left_out, weight_of_pair_N = None, batch.weight_N
        if trains and self.committee.confidence is not None and self.optimizer.num_steps >= self.first_filtered:
            kept_N, left_out = uncontradicted(sides[0] - sides[1], batch.tie_N, self.committee.confidence)
            weight_of_pair_N = _product(kept_N, batch.weight_N)
        loss, stats = heads_loss(
            torch.stack(sides, dim=1),
            torch.stack([torch.ones_like(batch.chosen_N), 2 - batch.tie_N.long()], dim=1),
            self.weights(pairs, reward_BK.device) if trains else None,
            lambda reward_N2, weight_N: loss_of(
                reward_N2[:, 0], reward_N2[:, 1], weight_B=_product(weight_N, weight_of_pair_N)
            ),
        )
        return loss, stats if left_out is None else Beside(stats, left_out)

    def loss_of_rankings(
        self, items: Sequence[EncodedPreference], num_items: float, *, trains: bool
    ) -> tuple[torch.Tensor, Stats]:
        """The Plackett-Luce loss of a micro-batch, of several heads the mean of theirs."""
        ranked = setup.sent(collate_rankings(items, pad_id=0), self.uploader)
        center_coef = self.cfg.center_coef if trains else 0.0
        loss_of = partial(plackett_luce, rank_RK=ranked.rank_RK, num_rankings=num_items, center_coef=center_coef)
        if self.model.num_heads == 1:
            return loss_of(self.model(ranked.ids_BT, ranked.lengths_B)[ranked.index_RK])
        reward_RKH = self.model.heads(ranked.ids_BT, ranked.lengths_B)[ranked.index_RK]
        return heads_loss(
            reward_RKH,
            ranked.rank_RK,
            self.weights(items, reward_RKH.device) if trains else None,
            lambda reward_RK, weight_R: loss_of(reward_RK, weight_R=weight_R),
        )

    def weights(self, items: Sequence[EncodedPreference], device: torch.device) -> torch.Tensor | None:
        """weight_RH: how often each item is in the bootstrap sample of each head; None if all learn everything."""
        kind = self.cfg.heads.bootstrap
        if kind == "none":
            return None
        keys = [self.prompt_of.get(item.prompt_id, item.prompt_id) for item in items]
        if kind == "pairs":
            keys = [f"{key} {item.sequences}" for key, item in zip(keys, items, strict=True)]
        return bootstrap_weights(keys, self.model.num_heads, self.seed).to(device)

    def weights_to_judge(self) -> AbstractContextManager[None]:
        """A block in which the model has the mean of its weights, if that is followed and has begun."""
        return nullcontext() if self.average is None else self.average.written()

    def correct(self, items: Sequence[EncodedPreference]) -> None:
        """Fit the trend of the rewards over length to the answers of some of `items`, which rewards are less from then
        on, but for the loss that trains.
        """
        order, some = permutation(derive(self.seed, "trend"), 0, len(items)), dict[TokenIds, tuple[int, str]]()
        for item in (items[place] for place in order):
            prompt = self.prompt_of.get(item.prompt_id, item.prompt_id)
            lengths = zip(item.sequences, item.answer_lengths, strict=True)
            some |= {ids: (length, prompt) for ids, length in lengths}
            if len(some) >= _MOST_KNOWN:
                break
        reward_NK = self.finite_rewards(list(some))
        lengths, prompts = zip(*some.values(), strict=True)
        self.model.length_trend = LengthTrend.fitted(reward_NK.mean(-1).numpy(), lengths, prompts)

    def know(self, items: Sequence[EncodedPreference]) -> None:
        """Keep what several heads say of the answers of some of `items`, one at least."""
        order = permutation(derive(self.seed, "known"), 0, len(items))
        answers = dict.fromkeys(ids for place in order for ids in items[place].sequences)
        self.model.know(self.finite_rewards(list(itertools.islice(answers, _MOST_KNOWN))))

    def finite_rewards(self, sequences: Sequence[TokenIds]) -> torch.Tensor:
        """The reward that each head gives to each sequence, float64 of shape [N, K] on the CPU.

        Raises:
            TrainingError: some are not finite.
        """
        reward_NK = head_rewards(self.model, sequences, micro_batch_size=self.cfg.micro_batch_size)
        if num_wrong := int((~reward_NK.isfinite()).any(dim=-1).sum()):
            raise TrainingError(
                f"the rewards of {num_wrong} of {len(sequences)} answers are not finite, so the training has diverged; "
                "lower optimizer.learning_rate and start a new run"
            )
        return reward_NK

    def export(self, folder: Path, card: ModelCard) -> Path:
        """Write the reward model to `folder` in the Hugging Face layout."""
        return save_final(self.model, self.model.tokenizer, folder, card)


class RewardTask:
    """Preference pairs or rankings, and how a reward model is evaluated."""

    def __init__(self, cfg: RewardRecipe, inputs: Inputs, device: torch.device) -> None:
        _check(cfg)
        self.cfg = cfg
        self.model = new_reward_model(cfg.model, device=device, heads=cfg.reward_model.heads, seed=cfg.run.seed)
        keep_lower_layers(self.model.model, cfg.reward_model.num_layers)
        freeze_lower_layers(self.model.model, cfg.model.num_trainable_layers)
        self.model.model.score.requires_grad_(True)
        self.model.length_trend = None  # of one that is trained on, it was that of other weights
        self.corrects = cfg.reward_model.length == "post_hoc"
        self.raters = votes_of_raters(cfg.pairs)
        self.data = preference_sets(
            cfg.pairs,
            self.model.tokenizer,
            cfg.run.seed,
            cast(Sequence[PreferenceLike] | None, inputs.pairs),
            cast(Sequence[PreferenceLike] | None, inputs.heldout_pairs),
            max_length=context_length(self.model.model),
            encode=self.model.encode,
            weigh=self.raters,
        )
        section, source_of = cfg.reward_model, self.data.source_of
        if section.margin == "column" and not any(item.margin for item in self.data.train):
            _log.warning(
                "reward_model.margin is column, but no pair to train on has a margin above 0, so that it has no "
                "effect; give the rows a column `margin`, or leave the setting out"
            )
        if section.length == "balanced":
            self.data = replace(self.data, train=balanced(self.data.train, source_of))
        elif section.length == "expert":
            found = beside_length(self.data.train, source_of, keeps_margins=section.margin == "column")
            self.data = replace(self.data, train=found)
        self.prompts = Groups(self.data.groups)
        self.num_steps = cfg.run.steps or steps_of_epochs(
            section.num_epochs, len(self.data.train), section.pairs_per_step
        )

    def build(self) -> Reward:
        """The learner before its first step."""
        shard(self.model)
        optimizer = setup.optimizer_of(self.cfg, self.model, Kernels(self.cfg.model.kernels), self.num_steps)
        as_rankings = self.cfg.pairs.rankings == "plackett_luce"
        section = self.cfg.reward_model
        return Reward(
            section,
            self.model,
            optimizer,
            as_rankings,
            self.cfg.run.seed,
            self.data.train_prompts,
            has_margins=section.margin == "column" or section.length == "expert",
            committee=section.committee,
            first_filtered=math.ceil(section.committee.after * self.num_steps),
            average=TailAverage.of_run(self.model, section.average_from, self.num_steps),
        )

    def prepare(self, learner: Reward, progress: bool) -> dict[str, str]:
        """Hashes of the model, of the pairs, and of their weights if they are estimated."""
        identity = {
            "the model": fingerprint_of_tensors(learner.model),
            "the pairs": fingerprint_of_rows([*self.data.train, *self.data.heldout]),
        }
        if self.data.elsewhere.items:
            identity["the pairs of other sources"] = fingerprint_of_rows(self.data.elsewhere.items)
        if self.raters is not None:
            identity["the weights of the votes"] = fingerprint_of_rows(pair.weight for pair in self.data.train)
        return identity

    def estimate(self) -> Estimate:
        """Memory and work of a run. A completion of several pairs is computed, and counted, once."""
        train, section = self.data.train, self.cfg.reward_model
        distinct = {ids for item in train for ids in item.sequences}
        prompt = fmean(shared_length(*item.sequences[:2]) for item in train)
        per_prompt = max(1, round(len(distinct) / len(self.prompts.members)))
        rows = Rows(prompt, max(1.0, fmean(map(len, distinct)) - prompt), per_prompt)
        each = rows.tokens(len(distinct)) / len(train)
        heldout = {ids for item in (*self.data.heldout, *self.data.elsewhere.items) for ids in item.sequences}
        num_corrected = min(_MOST_KNOWN, len(distinct)) if self.corrects else 0
        evaluation = Work(scored=rows.tokens(len(heldout) + num_corrected))
        num_pairs = min(section.pairs_per_step, len(train))
        step = Work(trained=num_pairs * each, updates=1)
        judging = evaluation if self.cfg.evaluation.judge else Work()
        work = RunWork(rows, step, evaluation, once=judging)
        return training_estimate(
            self.model.model, self.cfg, work, micro_tokens=min(section.micro_batch_size, num_pairs) * each
        )

    def batch(self, index: int) -> list[EncodedPreference]:
        """The pairs of step `index` (from 0), those of one prompt together: shared completions are scored once."""
        train = self.data.train
        size = min(self.cfg.reward_model.pairs_per_step, len(train))
        return [train[i] for i in items_at(self.cfg.run.seed, index * size, size, len(train), self.prompts)]

    @torch.no_grad()
    def evaluate(self, learner: Reward) -> Metrics:
        """Accuracy, margin and loss on the held-out pairs or rankings that are no ties; empty without any.

        `eval/longer_wins` is the accuracy of preferring the longer completion, a baseline that a reward model must
        beat. Of several sources each has its accuracy and this baseline, also those that are only evaluated on.
        """
        size, figures = self.cfg.reward_model.micro_batch_size, EvaluationFigures()
        if self.corrects:
            with span("evaluate"), learner.weights_to_judge():
                learner.correct(self.data.train)
        for name, items, is_trained in decided_by_source(self.data):
            with span("evaluate"), learner.weights_to_judge():
                micros = share_of(chunks(items, size))
                stats = gathered([learner.micro_batch_loss(micro, len(items))[1] for micro in micros])
            figures.add(name, items, merged(stats), is_trained=is_trained)
        trend = learner.model.length_trend
        return {**figures.metrics(), **({} if trend is None else {"eval/length_slope": trend.slope})}

    def measure(self, learner: Reward, when: str) -> dict[str, object]:
        """Nothing apart from `evaluate`. After training the model gets the mean of its weights, if there is one, the
        trend over length, if rewards are to be corrected by it, and what several heads say of held-out answers, or
        without any of those that were learnt.
        """
        if when == "after" and learner.average is not None:
            learner.average.write()
        if when == "after" and self.corrects:
            with span("evaluate"):
                learner.correct(self.data.train)
            if learner.model.length_trend is None:
                _log.warning("the answers to each prompt are equally long, so that nothing is to be corrected")
        if when == "after" and learner.model.num_heads > 1:
            with span("evaluate"):
                learner.know(self.data.heldout or self.data.train)
        return {}

    def summary(self, learner: Reward, session: Session) -> dict[str, object]:
        """The last training loss, and the figures on held-out pairs. `evaluation.judge` adds those of
        `reward_quality.judge`, which are also written to `reward_quality.json`. A verdict that warns is a finding.
        """
        last, num_steps = session.metrics[-1], len(session.metrics)
        names = ("loss", "accuracy", "eval/accuracy", "eval/margin", "eval/num_pairs", "eval/longer_wins")
        known, trend = learner.model.known, learner.model.length_trend
        figures = {
            "steps": num_steps,
            "num_pairs": len(self.data.train),
            "num_heldout_pairs": len(self.data.heldout),
            "num_ties": sum(not item.decided for item in (*self.data.train, *self.data.heldout)),
            "refused_steps": session.num_refused,
            **{name: last[name] for name in names if name in last},
            **({} if self.raters is None else self.raters.facts),
            **({} if known is None else {"num_heads": learner.model.num_heads, "spread": known.mean}),
            **({} if trend is None else {"length_slope": trend.slope}),
        }
        heldout, elsewhere = pairs_to_judge(self.data)
        quality = None
        if self.cfg.evaluation.judge and heldout:
            size, train = self.cfg.reward_model.micro_batch_size, decided_pairs(self.data.train, {})
            quality = judge(learner.model, heldout, train, elsewhere, micro_batch_size=size)
            session.folder.write_json("reward_quality.json", quality.to_json())
            names = ("accuracy", "accuracy_low", "accuracy_high", "tfidf", "longer_wins", "brier", "ece")
            figures |= {name: getattr(quality, name) for name in names}
        found = verdict(last, num_steps, quality)
        if found is not None and found.warning:
            session.find(Finding(num_steps, found.name, "warning", found.warning))
        return figures if found is None else {**figures, "verdict": found.text}


def _check(cfg: RewardRecipe) -> None:
    """Raise ConfigError for settings that rankings, or divided parameters, do not have."""
    section = cfg.reward_model
    of_pairs = {
        "margin: column": section.margin == "column",
        f"label_smoothing: {section.label_smoothing:g}": section.label_smoothing > 0,
        f"committee: {section.committee.confidence}": section.committee.confidence is not None,
        f"length: {section.length}": section.length != "none",
    }
    for name, is_set in of_pairs.items():
        if is_set and cfg.pairs.rankings == "plackett_luce":
            raise ConfigError(f"reward_model.{name} needs pairs; set pairs.rankings: pairs, or leave it out")
    if section.average_from is not None and cfg.scale.shards_parameters:
        raise ConfigError("reward_model.average_from needs whole parameters; leave it out, or scale.shard: parameters")


def _product(first_N: torch.Tensor | None, second_N: torch.Tensor | None) -> torch.Tensor | None:
    """Weights by both; None: all weigh 1."""
    if first_N is None or second_N is None:
        return second_N if first_N is None else first_N
    return first_N * second_N
