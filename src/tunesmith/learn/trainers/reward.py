"""The reward model: a scalar head on a language model, trained on which of two completions was preferred.

Bradley and Terry 1952; Stiennon et al. 2020. Shape legend: N pairs, R rankings, K completions of a ranking, B
sequences, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import cast

import torch
from torch import nn

from tunesmith.base.config.algorithms.reward import RewardRecipe, RewardTrainerSection
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.core.seeds import Groups, items_at, steps_of_epochs
from tunesmith.base.core.trace import span
from tunesmith.collect.data.collate import EncodedPreference, as_pairs, collate_pairs, collate_rankings
from tunesmith.collect.data.pairs import PreferenceLike
from tunesmith.collect.data.sets import preference_sets
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.batch.upload import Uploader
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import new_reward_model
from tunesmith.engine.models.loaded import context_length, freeze_lower_layers, keep_lower_layers
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.models.sharding import shard
from tunesmith.learn.algorithms.kl import Controller
from tunesmith.learn.algorithms.preference_loss import PreferenceStats, RankingStats, bradley_terry, plackett_luce
from tunesmith.learn.algorithms.sums import merged
from tunesmith.learn.evaluation.reward_quality import decided_pairs, judge
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs, Metrics, StepResult
from tunesmith.learn.trainers.estimate import Estimate, training_estimate
from tunesmith.learn.trainers.metrics import update_metrics
from tunesmith.learn.trainers.passes import accumulate
from tunesmith.learn.trainers.rater_weights import votes_of_raters
from tunesmith.learn.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.session import Session
from tunesmith.learn.trainers.work import Rows, RunWork, Work


@dataclass(slots=True)
class Reward:
    """The learner: `step` changes the reward model and the optimizer.

    With `as_rankings` the loss is Plackett-Luce over whole rankings, else Bradley-Terry over pairs.
    """

    cfg: RewardTrainerSection
    model: RewardModel
    optimizer: MasterAdamW
    as_rankings: bool = False
    counters: Mapping[str, Controller] = field(default_factory=dict[str, Controller])
    uploader: Uploader | None = field(init=False)

    def __post_init__(self) -> None:
        self.uploader = setup.uploader_to(self.model.model.device)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The reward model."""
        return {"model": self.model}

    def step(self, pairs: Sequence[EncodedPreference], index: int) -> StepResult:
        """One step: the loss of `pairs` (or rankings), accumulated over micro-batches, and an update."""
        cfg = self.cfg
        options = {"with_margin": cfg.margin == "column", "center_coef": cfg.center_coef}
        loss_of = partial(self.micro_batch_loss, num_items=len(pairs), **options)
        with span("update"):
            report, stats = accumulate(self.optimizer, chunks(pairs, cfg.micro_batch_size), loss_of)
        with span("metrics"):
            metrics = {**merged(stats).metrics(), **update_metrics([report])}
        return StepResult(metrics, report, lambda: [asdict(pair) for pair in pairs])

    def micro_batch_loss(
        self,
        items: Sequence[EncodedPreference],
        num_items: float,
        *,
        with_margin: bool = False,
        center_coef: float = 0.0,
    ) -> tuple[torch.Tensor, PreferenceStats | RankingStats]:
        """The loss of one micro-batch, divided by `num_items`, and its statistics. Each completion is scored once."""
        if self.as_rankings:
            ranked = setup.sent(collate_rankings(items, pad_id=0), self.uploader)
            reward_RK = self.model(ranked.ids_BT, ranked.lengths_B)[ranked.index_RK]
            return plackett_luce(reward_RK, ranked.rank_RK, num_rankings=num_items, center_coef=center_coef)
        batch = setup.sent(collate_pairs(as_pairs(items), pad_id=0), self.uploader)
        reward_B = self.model(batch.ids_BT, batch.lengths_B)
        chosen_N, rejected_N = reward_B[batch.chosen_N], reward_B[batch.rejected_N]
        margin_N = batch.margin_N if with_margin else None
        return bradley_terry(
            chosen_N,
            rejected_N,
            margin_N,
            batch.tie_N,
            num_pairs=num_items,
            center_coef=center_coef,
            weight_B=batch.weight_N,
        )

    def export(self, folder: Path, card: ModelCard) -> Path:
        """Write the reward model to `folder` in the Hugging Face layout."""
        return save_final(self.model, self.model.tokenizer, folder, card)


class RewardTask:
    """Preference pairs or rankings, and how a reward model is evaluated."""

    def __init__(self, cfg: RewardRecipe, inputs: Inputs, device: torch.device) -> None:
        if cfg.pairs.rankings == "plackett_luce" and cfg.reward_model.margin == "column":
            raise ConfigError("reward_model.margin: column needs pairs; set pairs.rankings: pairs, or margin: none")
        self.cfg = cfg
        self.model = new_reward_model(cfg.model, device=device)
        keep_lower_layers(self.model.model, cfg.reward_model.num_layers)
        freeze_lower_layers(self.model.model, cfg.model.num_trainable_layers)
        self.model.model.score.requires_grad_(True)
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
        self.prompts = Groups(self.data.train_prompts[pair.prompt_id] for pair in self.data.train)
        section = cfg.reward_model
        self.num_steps = cfg.run.steps or steps_of_epochs(
            section.num_epochs, len(self.data.train), section.pairs_per_step
        )

    def build(self) -> Reward:
        """The learner before its first step."""
        shard(self.model)
        optimizer = setup.optimizer_of(self.cfg, self.model, Kernels(self.cfg.model.kernels), self.num_steps)
        as_rankings = self.cfg.pairs.rankings == "plackett_luce"
        return Reward(self.cfg.reward_model, self.model, optimizer, as_rankings)

    def prepare(self, learner: Reward, progress: bool) -> dict[str, str]:
        """Hashes of the model, of the pairs, and of their weights if they are estimated."""
        identity = {
            "the model": fingerprint_of_tensors(learner.model),
            "the pairs": fingerprint_of_rows([*self.data.train, *self.data.heldout]),
        }
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
        heldout = {ids for item in self.data.heldout for ids in item.sequences}
        evaluation = Work(scored=rows.tokens(len(heldout)))
        step = Work(trained=min(section.pairs_per_step, len(train)) * each, updates=1)
        judging = evaluation if self.cfg.evaluation.judge else Work()
        work = RunWork(rows, step, evaluation, once=judging)
        return training_estimate(self.model.model, self.cfg, work, micro_tokens=section.micro_batch_size * each)

    def batch(self, index: int) -> list[EncodedPreference]:
        """The pairs of step `index` (from 0), those of one prompt together: shared completions are scored once."""
        train = self.data.train
        size = min(self.cfg.reward_model.pairs_per_step, len(train))
        return [train[i] for i in items_at(self.cfg.run.seed, index * size, size, len(train), self.prompts)]

    @torch.no_grad()
    def evaluate(self, learner: Reward) -> Metrics:
        """Accuracy, margin and loss on the held-out pairs or rankings that are no ties; empty without any.

        `eval/longer_wins` is the accuracy of preferring the longer completion, a baseline that a reward model must
        beat.
        """
        items = [item for item in self.data.heldout if item.decided]
        if not items:
            return {}
        with span("evaluate"):
            micros = share_of(chunks(items, self.cfg.reward_model.micro_batch_size))
            stats = gathered([learner.micro_batch_loss(micro, len(items))[1] for micro in micros])
        decided = [pair for item in items for pair in item.decided]
        longer = sum((len(better) > len(worse)) + 0.5 * (len(better) == len(worse)) for better, worse in decided)
        metrics = {f"eval/{name}": value for name, value in merged(stats).metrics().items() if name != "tie_fraction"}
        return {**metrics, "eval/num_pairs": float(len(decided)), "eval/longer_wins": longer / len(decided)}

    def measure(self, learner: Reward, when: str) -> dict[str, object]:
        """Nothing apart from `evaluate`."""
        return {}

    def summary(self, learner: Reward, session: Session) -> dict[str, object]:
        """The last training loss, and the figures on held-out pairs. `evaluation.judge` adds those of
        `reward_quality.judge`, which are also written to `reward_quality.json`.
        """
        last = session.metrics[-1]
        names = ("loss", "accuracy", "eval/accuracy", "eval/margin", "eval/num_pairs", "eval/longer_wins")
        figures = {
            "steps": len(session.metrics),
            "num_pairs": len(self.data.train),
            "num_heldout_pairs": len(self.data.heldout),
            "num_ties": sum(not item.decided for item in (*self.data.train, *self.data.heldout)),
            "refused_steps": session.num_refused,
            **{name: last[name] for name in names if name in last},
            **({} if self.raters is None else self.raters.facts),
        }
        heldout = decided_pairs(self.data.heldout, self.data.heldout_prompts)
        if not self.cfg.evaluation.judge or not heldout:
            return figures
        size = self.cfg.reward_model.micro_batch_size
        quality = judge(learner.model, heldout, decided_pairs(self.data.train, {}), micro_batch_size=size)
        session.folder.write_json("reward_quality.json", quality.to_json())
        names = ("accuracy", "accuracy_low", "accuracy_high", "tfidf", "longer_wins", "brier", "ece", "num_pairs")
        judged = {"num_train_pairs": len(self.data.train), **{name: getattr(quality, name) for name in names}}
        return {**figures, **judged}


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens at the beginning of both."""
    differences = (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differences, min(len(first), len(second)))
