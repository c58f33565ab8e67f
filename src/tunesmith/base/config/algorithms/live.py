"""The live loop: settings, recipe, and rules for its keys."""

# Fields are frozen, so that a subclass may narrow their type.
# pyright: reportIncompatibleVariableOverride=false

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tunesmith.base.config.algorithms.dpo import DPO_RULES, DPOSection
from tunesmith.base.config.algorithms.grpo import GRPO_RULES, OWN_LOGPS, GRPOSection
from tunesmith.base.config.algorithms.ppo import PPO_RULES, PPOSection
from tunesmith.base.config.algorithms.reward import ONE_HEAD, PolicyRewardSection
from tunesmith.base.config.recipe import Recipe, check_horizon
from tunesmith.base.config.rules import SAMPLING, Rule, always, is_, is_not, is_updated_once
from tunesmith.base.config.sections import (
    Finite,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PromptsSection,
    RolloutSection,
    Section,
)
from tunesmith.base.config.templates import checked_template


class LivePromptsSection(PromptsSection):
    """Prompts of the pairs that raters see."""

    heldout_fraction: Fraction = 0.15
    """Share of prompts held out, by a hash of the prompt; on them the policy is compared with the base model."""

    @model_validator(mode="after")
    def _check_no_prefixes(self) -> "LivePromptsSection":
        if self.prefix_tokens is not None:
            raise ValueError("prefix_tokens cuts prompts by tokens, but raters see text; give prompts that are cut")
        return self


class LiveRolloutSection(RolloutSection):
    """Sampling of the answers that raters compare."""

    prompts_per_step: PositiveInt = 24
    """Prompts of one round of pairs."""
    completions_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Completions of each prompt, in disjoint pairs of different ones."""
    max_new_tokens: PositiveInt = 24

    @model_validator(mode="after")
    def _check_backend(self) -> "LiveRolloutSection":
        if self.backend == "vllm":
            raise ValueError("backend is vllm, but the live loop draws from several models; set native or transformers")
        if self.weights == "auto":
            raise ValueError("weights is auto, which is for runs: the live loop records no choice; give model or int8")
        return self


class LiveDPOSection(DPOSection):
    """DPO on votes about the policy's own completions (Guo et al. 2024, arXiv 2402.04792)."""

    beta: Positive = 0.2
    """Scale of the rewards, beta (log policy - log reference); IPO's tau, ORPO's lambda."""
    ties: Literal["drop", "half", "rao_kupper"] = "half"
    micro_batch_size: PositiveInt = 16

    @model_validator(mode="after")
    def _check_loss_of_pairs(self) -> "LiveDPOSection":
        if self.loss == "kto":
            raise ValueError("loss is kto, which takes single labels, but votes are about pairs; set another loss")
        return self


class LivePPOSection(PPOSection):
    """PPO against a reward model trained on votes, without a critic."""

    lam: Fraction = 1.0
    critic: Literal["shared", "separate", "none"] = "none"
    """`none`: advantages are the returns (REINFORCE++)."""

    @model_validator(mode="after")
    def _check_no_critic(self) -> "LivePPOSection":
        if self.critic != "none":
            raise ValueError(f"critic is {self.critic}, but the live loop trains none; set critic: none")
        return self


class LiveKLSection(Section):
    """KL to the base model: an adaptive penalty, and a limit above which no version is served."""

    SHORTHAND = "budget"

    coef: NonNegative = 0.01
    """Lowest coefficient of the KL penalty in the loss of a pair."""
    target: Positive | None = 5.0
    """KL in nats per completion that the coefficient keeps; null fixes the coefficient."""
    budget: Positive | None = 8.0
    """Limit in nats per completion; a version above it is not served. null is off."""

    @model_validator(mode="after")
    def _check_target(self) -> "LiveKLSection":
        if self.target is not None and self.budget is not None and self.target > self.budget:
            raise ValueError(f"target is {self.target:g}, above budget, {self.budget:g}; lower the first")
        if self.target is not None and self.coef == 0:
            raise ValueError("coef is 0, which no target can move; give a small coef, or set target to null")
        return self


class LiveCheckSection(Section):
    """Test that an update must pass before it is served, on votes about held-out prompts."""

    num_votes: PositiveInt = 48
    """Number of newest held-out votes to test on."""
    min_votes: PositiveInt = 12
    """With fewer held-out votes every update passes."""
    p_value: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """An update is rejected if it agrees with fewer votes than the served version, with a one-sided p-value below this
    (McNemar's exact test)."""


class LiveFeedbackSection(Section):
    """Thumbs and grades that applications gave to answers of the API; thumbs are learnt by KTO (arXiv 2402.01306)."""

    SHORTHAND = "thumbs_weight"

    thumbs_weight: NonNegative = 1.0
    """Weight of a thumb in the loss, that of a vote being 1. 0 is off."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that count; empty: every one whose values are true or false."""
    grade_threshold: Finite | None = None
    """Grades, the numbers of `metrics`, count as a thumb up from this one on, and as a thumb down below; null: grades
    are left out."""
    desirable_weight: Positive = 1.0
    """Weight of the answers with a thumb up."""
    undesirable_weight: Positive = 1.0
    """Weight of the answers with a thumb down."""
    importance_limit: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Weigh an answer by its probability under the policy over that under which it was drawn, up to this limit; null
    is off."""
    regenerated_within_s: Positive | None = None
    """Learn that an answer which was asked for again within these seconds is worse than the one that the person kept;
    null is off."""

    @model_validator(mode="after")
    def _check_metrics(self) -> "LiveFeedbackSection":
        if self.grade_threshold is not None and not self.metrics:
            raise ValueError(
                f"grade_threshold is {self.grade_threshold:g}, but metrics names none, and each has a scale of its "
                "own; name the metrics whose values are grades"
            )
        return self


class LiveReasonsSection(Section):
    """Votes with a reason, and edits of answers, learnt by self-distillation too: the policy that reads the reason or
    the edit teaches itself that does not (SDPO, arXiv 2601.20802)."""

    SHORTHAND = "weight"

    weight: NonNegative = 0.0
    """Weight of the divergence of a vote's answers, in nats per token, beside the loss of its pair. 0 is off."""
    template: str = "(A reader of earlier answers said: {reason})\n\n{prompt}"
    """The teacher's prompt, or last turn of the user: `{prompt}` is the policy's, `{reason}` is that of the vote, and
    `{chosen}` and `{rejected}` are its answers."""
    edit_template: str = "(An answer that a reader liked: {edit})\n\n{prompt}"
    """The same where an answer was edited; `{edit}` is the new text. The answer that was edited is learnt."""

    @field_validator("template", "edit_template")
    @classmethod
    def _check_template(cls, given: str, info: ValidationInfo) -> str:
        known = ("prompt", "reason", "chosen", "rejected") if info.field_name == "template" else ("prompt", "edit")
        return checked_template(given, "prompt", known)


class LiveCanarySection(Section):
    """Trial of a version on a share of the API's requests, before it is served to all."""

    SHORTHAND = "share"

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the conversations that a new version answers while it is tried; 0 is off: it is served at once."""
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """A version is served once the share of thumbs up is not lower by this than that of the served version."""
    p_value: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Largest probability of serving one that is worse by the margin, or taking back one that is not worse."""
    wait_s: Positive = 1800.0
    """Seconds without feedback after which the checks on held-out votes decide."""
    most_s: Positive = 21600.0
    """Seconds after which a version that is not decided is taken back."""


class LiveSelectionSection(Section):
    """Choice of the pairs that raters are asked about, among the answers that were drawn for a prompt."""

    SHORTHAND = "method"

    method: Literal["random", "infomax", "drts", "delta_ucb", "d_optimal"] = "random"
    """`drts`: a likely best answer against a likely worst one, drawn from what the votes leave possible; `delta_ucb`:
    the largest plausible difference; `infomax`: the least certain outcome; `d_optimal`: the most information about the
    model of the votes. Pairs on held-out prompts are random with each of them."""
    random_share: Fraction = 0.2
    """Share of the prompts whose pairs stay random, for figures without the bias of the choice."""
    width: Positive = 2.0
    """Standard deviations of the intervals of `infomax` and `delta_ucb`."""


class LiveSection(Section):
    """Conditions under which votes become an update, and the versions that are kept."""

    SHORTHAND = "update"

    dir: str = "live"
    """Folder that the trainer and the server share."""
    database: str | None = None
    """URL of the PostgreSQL database that has the votes, without a password; null: votes.db in the folder."""
    update: Literal["dpo", "ppo", "grpo"] = "dpo"
    """Online DPO; or a reward model that learns from the votes, and steps of PPO or GRPO against it."""
    raters: Literal["equal", "estimated"] = "equal"
    """Votes count the same whoever gave them, or by what all votes say of their raters, gold items included."""
    votes_per_update: PositiveInt = 32
    """New votes that start an update."""
    update_after_s: Positive = 30.0
    """Seconds that the oldest new vote waits before an update starts with fewer votes."""
    max_votes_per_update: PositiveInt = 128
    """Most new votes in one update."""
    replay: NonNegative = 1.0
    """Old votes replayed in an update, for each new one; none while more new ones wait than an update takes."""
    pool: PositiveInt = 32
    """Pairs waiting for votes; new ones are sampled when fewer are left."""
    heldout_prompts_per_round: NonNegativeInt = 4
    """Held-out prompts of a round; half of their answers are paired with each other, half with the base model's."""
    policy_steps: PositiveInt = 2
    """Steps of PPO or GRPO in one update."""
    selection: LiveSelectionSection = LiveSelectionSection()
    kl: LiveKLSection = LiveKLSection()
    check: LiveCheckSection = LiveCheckSection()
    feedback: LiveFeedbackSection = LiveFeedbackSection()
    reasons: LiveReasonsSection = LiveReasonsSection()
    canary: LiveCanarySection = LiveCanarySection()
    keep_versions: PositiveInt = 5
    """Number of newest versions to keep for a rollback, besides the base model."""
    poll_s: Positive = 0.2
    """Seconds between polls for votes while idle."""

    @field_validator("database")
    @classmethod
    def _check_database(cls, given: str | None) -> str | None:
        # The recipe is kept in the folder and shown, so no message repeats what was given either.
        if given is not None and not re.match(r"(postgresql(\+psycopg)?|postgres)://", given):
            raise ValueError("this is no URL of PostgreSQL; give one such as postgresql://USER@HOST/NAME")
        if given is not None and re.search(r"//[^/?@]*:[^/?]*@|password=", given):
            raise ValueError(
                "the URL has a password, and recipes are stored; leave it out, and give it by PGPASSWORD or ~/.pgpass"
            )
        return given

    @model_validator(mode="after")
    def _check_max_votes(self) -> "LiveSection":
        if self.max_votes_per_update < self.votes_per_update:
            raise ValueError(
                f"max_votes_per_update is {self.max_votes_per_update}, less than votes_per_update, "
                f"{self.votes_per_update}; raise the first"
            )
        return self


class LiveRecipe(Recipe):
    """Train a policy on votes while they are given."""

    algorithm: Literal["live"] = "live"
    prompts: LivePromptsSection = LivePromptsSection()
    rollout: LiveRolloutSection = LiveRolloutSection()
    dpo: LiveDPOSection = LiveDPOSection()
    reward_model: PolicyRewardSection = PolicyRewardSection()
    ppo: LivePPOSection = LivePPOSection()
    grpo: GRPOSection = GRPOSection()
    live: LiveSection = LiveSection()

    @model_validator(mode="after")
    def _check_schedule_and_horizon(self) -> "LiveRecipe":
        if self.scale.ranks > 1 or self.scale.is_exact:
            raise ValueError("scale.ranks and scale.reduction are not for the live loop, which trains in one process")
        if self.optimizer.schedule != "constant":
            raise ValueError(
                f"optimizer.schedule is {self.optimizer.schedule}, which needs an end, but the live loop has none; "
                "set it to constant"
            )
        check_horizon(self, self.rollout, self.live.update)
        return self


def _unless_live(update: str, keys: str, others: str = "") -> Rule:
    return Rule(
        keys, is_not("live.update", *update.split()), f"live.update is not {update}; set it, or leave this out", others
    )


LIVE_RULES: tuple[Rule, ...] = (
    *SAMPLING,
    _unless_live("ppo", "ppo.*"),
    _unless_live("grpo", "grpo.*"),
    _unless_live("ppo or grpo", "reward_model.* live.policy_steps optimizer.head_learning_rate rollout.importance.*"),
    _unless_live("ppo or grpo", "rollout.recompute_logps"),
    _unless_live("dpo", "dpo.*", "dpo.ties dpo.micro_batch_size"),
    _unless_live("dpo", "live.feedback.*", "live.feedback.metrics live.feedback.grade_threshold"),
    _unless_live("dpo", "live.reasons.*"),
    Rule(
        "live.reasons.*",
        is_("live.reasons.weight", 0.0),
        "live.reasons.weight is 0, so reasons are not learnt; give a weight, or leave this out",
        "live.reasons.weight",
    ),
    Rule(
        "live.canary.*",
        lambda v: v["live.canary.share"] == 0,
        "live.canary.share is 0, so no version is tried; give a share, or leave this out",
        "live.canary.share",
    ),
    Rule("live.kl.coef live.kl.target", is_not("live.update", "dpo"), "live.update has a KL of its own; set that one"),
    Rule("dpo.reference", always, "the live loop computes log-probs of the reference once for each answer"),
    Rule("rollout.score_while_drawing", always, "the live loop scores after drawing; leave this out"),
    Rule(
        "run.* scale.*",
        always,
        "the live loop is one process that runs until it is stopped, and writes a version after each update",
        "run.seed run.measure run.hang_after_s run.num_threads run.keep_freed_memory run.name",
    ),
    Rule(
        "rollout.recompute_logps",
        lambda v: v["live.update"] == "grpo" and is_updated_once("grpo")(v),
        OWN_LOGPS,
    ),
    ONE_HEAD,
    *PPO_RULES,
    *GRPO_RULES,
    *DPO_RULES,
)
