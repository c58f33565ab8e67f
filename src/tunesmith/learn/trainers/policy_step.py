"""One training step of the algorithms that draw completions and learn from their rewards: PPO, GRPO, best-of-n.

`PolicyStep.step` is the whole step, in the order in which things happen. An algorithm is a subclass that says which
completions are learnt and with which advantage (`credit`), and which metrics it has of its own (`figures`); PPO also
has a critic, which gives each token its own advantage (`batch_of`). Shape legend: P prompts, G completions per
prompt, B sequences (the completions that are learnt), T completion tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch

from tunesmith.base.config.policy_sections import UpdateSection
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.core.seeds import derive, permutation
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import PolicyBatch, Sequences, chunks, completion_of_rows, pack, units_of
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.kernels.masking import check_shapes, total
from tunesmith.engine.kernels.policy_loss.records import PolicyTokens
from tunesmith.engine.models.division import divide
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.logprob import TokenScores
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.workers.ahead import drawn_ahead
from tunesmith.learn.algorithms import policy_loss
from tunesmith.learn.algorithms.direct_loss import DirectStats
from tunesmith.learn.algorithms.kl import Controller
from tunesmith.learn.algorithms.policy_loss import Correction, LeftOut, PolicyStats, UpdateSize
from tunesmith.learn.algorithms.value_loss import ValueStats
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers import metrics, passes, setup
from tunesmith.learn.trainers.api import Counter, Metrics, PolicyWithKL, StepResult
from tunesmith.learn.trainers.ptx import MicroLoss, Ptx, ReplyLoss, replied_sequences
from tunesmith.learn.trainers.rollouts import PolicyTask, Rollouts

BatchT = TypeVar("BatchT", bound=PolicyBatch)


@dataclass(frozen=True, slots=True)
class Credit:
    """The completions that a step learns, `learnt_PG`, and the advantage of each, `[P, G]`, or of each of its turns,
    `[P, G, K]`; in PPO its reward, from which `batch_of` computes the advantages of its tokens.

    `figures` are metrics of the choice. `compared_PG` are the completions that it was made from, which a mean over
    completions counts also where they are not learnt; None is all whose reward is known.
    """

    learnt_PG: torch.Tensor
    advantage_PG: torch.Tensor
    figures: Metrics = field(default_factory=Metrics)
    compared_PG: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a micro-batch, a scalar with gradients, and statistics: of the policy's surrogate, of the weights that
    correct for the distribution that was drawn from, of the critic, and of tokens that are not learnt.
    """

    loss: torch.Tensor
    policy: PolicyStats | DirectStats
    correction: Correction | None = None
    value: ValueStats | None = None
    left_out: LeftOut | None = None


@dataclass(slots=True)
class PolicyStep(PolicyWithKL):
    """The learner: `step` changes the policy, the optimizer and the KL controller.

    `pool` holds the prompts that a step may draw further ones from. With `ptx` each update learns demonstrations too,
    and with `replies` what an environment replied.
    """

    TOGETHER: ClassVar[int] = 1
    """Completions that are compared in the loss, so that minibatches and micro-batches do not tear them apart; of 1
    not even the samples are together.
    """

    cfg: Any
    rollouts: Rollouts
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: MasterAdamW
    kl: Controller
    tokenizer: PreTrainedTokenizerBase
    pool: Sequence[Prompt] = ()
    ptx: Ptx | None = None
    replies: ReplyLoss | None = None

    @classmethod
    def build(cls, task: PolicyTask, cfg: PolicyRecipe) -> Self:
        """The learner before its first step."""
        policy, reference, controller = task.policy_and_reference(cfg.section.kl)
        divide(policy, reference, draws=True)
        optimizer = task.optimizer(policy.module, policy.kernels)
        drawing = task.rollouts(policy, optimizer)
        tokenizer, pool = task.loaded.tokenizer, task.data.train
        beside = task.ptx(policy, optimizer), task.reply_loss(policy, optimizer)
        return cls(cfg.section, drawing, policy, reference, optimizer, controller, tokenizer, pool, *beside)

    @property
    def engine(self) -> Engine:
        """The engine that draws."""
        return self.rollouts.engine

    @property
    def counters(self) -> Mapping[str, Counter]:
        """The controller of the KL coefficient, and the completions that were drawn ahead."""
        return {"kl": self.kl, **drawn_ahead(self.rollouts.engine)}

    @property
    def is_on_policy(self) -> bool:
        """True if a rollout is used for a single update, whose own pass gives the log-probs of the old policy."""
        return bool(self.cfg.num_epochs * self.cfg.num_minibatches == 1)

    @property
    def needs_old_pass(self) -> bool:
        """True if the old policy's log-probs are needed, and the engine did not record them exactly."""
        return not (self.is_on_policy or self.rollouts.is_exact or self.cfg.is_divergence_bound)

    def step(self, prompts: Sequence[Prompt], index: int) -> StepResult:
        """Step `index` (from 0): draw, score, decide what is learnt, update the policy, adapt the KL coefficient."""
        size, temperature = self.cfg.micro_batch_size, self.rollouts.cfg.temperature
        groups, scores = self.draw(prompts, index)
        batch_rows = partial(metrics.batch_rows, groups, scores)
        sample_rows = partial(metrics.sample_rows, groups, scores, tokenizer=self.tokenizer)
        reference_logp_BT, kl_PG = self.kl_in_reward(groups)
        with span("advantages"):
            credit = self.credit(groups, scores, kl_PG)
            advantage_PG = credit.advantage_PG
            of_completion_PG = advantage_PG if advantage_PG.dim() == 2 else advantage_PG[..., 0]
            found = {"credit.learnt_PG": credit.learnt_PG, "credit.advantage_PG": of_completion_PG}
            check_shapes(**{"scores.valid_PG": scores.valid_PG, **found})  # an algorithm may be somebody else's
            rows = torch.nonzero((credit.learnt_PG & metrics.has_tokens(groups)).flatten()).flatten().tolist()
        with span("metrics"):
            figures = {**scores.metrics(), **credit.figures, **metrics.completion_metrics(groups, rows)}
            figures["num_tokens"] = float(sum(one.num_sampled for group in groups for one in group.completions))
        replied = [] if self.replies is None else replied_sequences(groups)
        if not rows and not replied:  # in no group do the rewards differ, or all of them failed
            return StepResult({**figures, "updates": 0.0, "refused_steps": 0.0}, None, batch_rows, sample_rows)
        if not rows:
            with span("update"):
                stats = self.update_beside(index, replied)
            return StepResult(
                {**figures, **stats.metrics()}, metrics.worst_report(stats.reports), batch_rows, sample_rows
            )

        with span("pack"):
            sequences = setup.sent(pack(groups, pad_id=0, rows=rows), self.uploader)
            learnt_B = completion_of_rows(groups, rows)  # one of several samples has as many rows
            advantage_B = advantage_PG.flatten(0, 1)[learnt_B].to(sequences.mask_BT.device)
        sequences = passes.with_frozen_states(self.policy, sequences, size)
        old = self.old_scores(sequences)
        if reference_logp_BT is not None:  # computed for all completions, because it is in their rewards
            learnt = set(rows)
            computed = [place for place, row in enumerate(completion_of_rows(groups)) if row in learnt]
            reference_logp_BT = reference_logp_BT[computed, : sequences.mask_BT.shape[1]]
        elif self.reference is not None:
            with span("reference"):
                reference_logp_BT = passes.logps(self.reference, sequences, temperature, size)
        with span("advantages"):
            batch = self.batch_of(sequences, old, reference_logp_BT, advantage_B)

        sample_rows = partial(sample_rows, learnt=metrics.Learnt(learnt_B, batch.advantage_BT))
        with span("update"):
            num_units = len(units_of(sequences, self.TOGETHER))
            stats = self.update(batch, index, num_compared(credit, scores, len(prompts)) / num_units, replied)
        with span("metrics"):
            figures |= {**stats.metrics(), **self.figures(scores, batch, stats)}
            if "objective/kl" in figures:
                self.kl.update(figures["objective/kl"], len(rows))
            figures["objective/kl_coef"] = self.kl.value
        return StepResult(figures, metrics.worst_report(stats.reports), batch_rows, sample_rows)

    def update(
        self,
        batch: PolicyBatch,
        index: int,
        drawn_per_unit: float = 1.0,
        replied: Sequence[LearntSequence] = (),
    ) -> metrics.UpdateStats:
        """Optimizer steps on the minibatches of each epoch over `batch`, until the KL exceeds its target, if any; in
        means a row, or the rows of `TOGETHER` completions, count as `drawn_per_unit`. What was `replied` is learnt
        beside it.
        """
        cfg, stats = self.cfg, metrics.UpdateStats()
        seed = derive(self.rollouts.seed, "minibatches", index)
        size = cfg.micro_batch_size
        for minibatch in minibatches(batch, cfg, seed, self.TOGETHER):
            num_drawn = drawn_per_unit * len(units_of(minibatch.sequences, self.TOGETHER))
            tokens_seed = derive(seed, "tokens", len(stats.reports))
            of_update = update_size(minibatch.sequences, size, num_drawn, tokens_seed)
            loss_of = partial(self.micro_batch_loss, size=of_update, is_first=not stats.reports)
            beside = self.losses_beside(index, len(stats.reports), replied)
            together = self.TOGETHER
            stats.add(
                *passes.accumulate_rows(self.optimizer, minibatch, size, loss_of, beside=beside, together=together)
            )
            if stats.is_beyond(getattr(cfg, "target_kl", None)):  # direct losses have no ratio to stop by
                break
        return stats

    def update_beside(self, index: int, replied: Sequence[LearntSequence]) -> metrics.UpdateStats:
        """The updates of a step that has no advantages, by what is learnt beside them alone."""
        stats = metrics.UpdateStats()
        for number in range(self.cfg.num_epochs * self.cfg.num_minibatches):
            if beside := self.losses_beside(index, number, replied):
                stats.add(*passes.accumulate(self.optimizer, beside, lambda loss: loss()))
        return stats

    def losses_beside(self, index: int, update: int, replied: Sequence[LearntSequence] = ()) -> list[MicroLoss]:
        """The losses of update `update` of step `index` beside that of the policy, if the recipe has any: of
        demonstrations, and of the minibatch's share of what was `replied`.
        """
        num_minibatches = self.cfg.num_minibatches
        ptx = [] if self.ptx is None else self.ptx.losses(index * self.cfg.num_epochs * num_minibatches + update)
        own = replied[update % num_minibatches :: num_minibatches]
        return [*ptx, *([] if self.replies is None else self.replies.losses(own))]

    def micro_batch_loss(
        self, micro: PolicyBatch, size: UpdateSize, *, is_first: bool
    ) -> tuple[torch.Tensor, metrics.MicroStats]:
        """The loss of one micro-batch, a scalar, with its statistics; `is_first`: of the step's first update."""
        new = self.forward(micro.sequences)
        found = self.loss(micro, new, size)
        seen = (micro.sequences, new.logp_BT, new.entropy_BT, found.correction, micro.reference_logp_BT)
        first = metrics.FirstPass.of_batch(*seen) if is_first else None
        return found.loss, metrics.MicroStats(found.policy, found.value, first, left_out=found.left_out)

    # An algorithm has its own `credit`, and perhaps others in place of those below.

    def credit(self, groups: Sequence[Group], scores: Scores, kl_PG: torch.Tensor | None) -> Credit:
        """The completions that are learnt; `kl_PG` is their KL to the reference, if that is part of their reward."""
        raise NotImplementedError

    def figures(self, scores: Scores, batch: PolicyBatch, stats: metrics.UpdateStats) -> Metrics:
        """Metrics of a finished step: the KL of what was learnt to the reference, if there is one, in nats per
        completion, by the log-probs that it was drawn with.
        """
        if batch.reference_logp_BT is None:
            return {}
        tensors = batch.old_logp_BT, batch.reference_logp_BT, batch.sequences.mask_BT
        return {"objective/kl": metrics.kl_per_sequence(*tensors)}

    def draw(self, prompts: Sequence[Prompt], index: int) -> tuple[list[Group], Scores]:
        """The groups of step `index` and their scores."""
        return self.rollouts.draw(prompts, "rollout", index)

    def kl_in_reward(self, groups: Sequence[Group]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(Log-probs of all completions under the reference, `[P * G, T]`; their KL, `[P, G]`) if the KL is part of the
        reward of a completion, else nothing.
        """
        cfg = self.cfg
        if self.reference is None or cfg.kl.place != "reward":
            return None, None
        return passes.sequence_kl(
            self.reference, groups, cfg.kl, self.rollouts.cfg.temperature, cfg.micro_batch_size, self.uploader
        )

    def old_scores(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(Log-probs of the tokens under the policy that drew them; values, if there are any), `[B, T]`, no gradient.

        Without a pass of their own the log-probs are those that the engine recorded.
        """
        if not self.needs_old_pass:
            return sequences.raw_logp_BT, None
        with span("old_policy"):
            temperature = self.rollouts.cfg.temperature
            return passes.logps(self.policy, sequences, temperature, self.cfg.micro_batch_size), None

    def batch_of(
        self,
        sequences: Sequences,
        old: tuple[torch.Tensor, torch.Tensor | None],
        reference_logp_BT: torch.Tensor | None,
        advantage_B: torch.Tensor,
    ) -> PolicyBatch:
        """The batch of the update: here each token has the advantage of its completion, or of its turn."""
        of_turn_BK = advantage_B if advantage_B.dim() == 2 else advantage_B[:, None]
        advantage_BT = of_turn_BK
        if sequences.turns is not None and advantage_B.dim() == 2:
            advantage_BT = of_turn_BK.gather(1, sequences.turns.index_BT)
        return PolicyBatch(sequences, old[0], reference_logp_BT, advantage_BT * sequences.mask_BT)

    def forward(self, sequences: Sequences) -> TokenScores:
        """Scores of the completion tokens under the current weights, with gradients."""
        return passes.completion_scores(self.policy, sequences, self.rollouts.cfg.temperature)

    def loss(self, micro: PolicyBatch, new: TokenScores, size: UpdateSize) -> Loss:
        """The loss of a micro-batch whose tokens have the scores `new`, over the denominators of the whole update:
        surrogate, entropy bonus, and KL to the reference if its place is the loss.

        The engine may have drawn from a distribution other than the old policy's, or from older weights;
        `rollout.importance` says how that is corrected.
        """
        section, drawing, mask_BT = self.cfg, self.rollouts.cfg, micro.sequences.mask_BT
        kl_coef = self.kl.value if section.kl.place == "loss" else 0.0
        old_logp_BT = new.logp_BT.detach() if self.is_on_policy else micro.old_logp_BT
        if section.is_divergence_bound:
            old_logp_BT = micro.sequences.raw_logp_BT
        correction = policy_loss.importance_correction(
            old_logp_BT, micro.sequences.sampled_logp_BT, mask_BT, drawing.importance
        )
        advantage_BT = policy_loss.learnt_advantages(
            micro.advantage_BT,
            mask_BT,
            section,
            logp_BT=new.logp_BT,
            old_logp_BT=old_logp_BT,
            drawn_logp_BT=micro.sequences.raw_logp_BT,
            entropy_BT=new.entropy_BT,
            seed=size.seed,
        )
        tokens = PolicyTokens(
            new.logp_BT,
            old_logp_BT,
            advantage_BT * correction.weight_BT,
            mask_BT,
            micro.reference_logp_BT if kl_coef > 0 else None,
            new.entropy_BT if section.entropy_coef > 0 else None,
        )
        denominator = policy_loss.loss_denominator(
            section.loss_normalization, mask_BT, size, self.rollouts.max_completion_tokens
        )
        terms = policy_loss.terms_of(section, section.kl, kl_coef)
        left_out = None
        if section.leaves_out_tokens:
            is_out_BT = mask_BT.bool() & (advantage_BT != micro.advantage_BT)
            left_out = policy_loss.LeftOut(total(mask_BT), total(is_out_BT))
        loss, stats = policy_loss.policy_loss(tokens, terms, denominator, size.num_tokens)
        return Loss(loss, stats, correction, left_out=left_out)


def num_compared(credit: Credit, scores: Scores, num_prompts: int) -> int:
    """Completions that a mean over completions counts: those that were compared, learnt or not, of as many groups as
    the step has prompts. Groups that were drawn in place of others (dynamic sampling) do not count again.
    """
    compared_P = (scores.valid_PG if credit.compared_PG is None else credit.compared_PG).sum(dim=1)
    return min(int(compared_P.sum()), num_prompts * int(compared_P.max()))


def minibatches(batch: BatchT, section: UpdateSection, seed: int, together: int = 1) -> Iterator[BatchT]:
    """Minibatches of every epoch over the rollout, which do not tear `together` completions apart, see `units_of`."""
    for rows in minibatch_rows(units_of(batch.sequences, together), section, seed):
        yield batch.select(rows)


def minibatch_rows(units: Sequence[Sequence[int]], section: UpdateSection, seed: int) -> Iterator[list[int]]:
    """Row numbers of each minibatch of every epoch, a pure function of `seed` and epoch; those of a unit are in one.

    Rows keep the order of the rollout, so that those of one prompt are together and the prompt is computed once.
    """
    size = -(-len(units) // section.num_minibatches)
    for epoch in range(section.num_epochs):
        for chosen in chunks(permutation(seed, epoch, len(units)), size):
            yield [row for unit in sorted(chosen) for row in units[unit]]


def update_size(
    sequences: Sequences, micro_batch_size: int, num_drawn: float | None = None, seed: int = 0
) -> UpdateSize:
    """Size of a minibatch: the global denominators of its losses, because every rank knows all of it.

    `num_drawn` is the number of completions to count where some of those that were drawn are not in the minibatch.
    """
    num_rows = len(sequences.lengths_B)
    return UpdateSize(
        num_tokens=sequences.num_tokens,
        num_sequences=num_rows if num_drawn is None else num_drawn,
        num_micro_batches=-(-num_rows // micro_batch_size),
        seed=seed,
    )
