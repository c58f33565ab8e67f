"""The sections of the live loop: what is offered to raters, when votes become an update, and which update is served."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.algorithm_sections import DPOSection, PPOSection
from tunesmith.config.rollout_sections import RolloutSection
from tunesmith.config.sections import Fraction, NonNegative, Positive, PositiveInt, PromptsSection, Section


class LivePromptsSection(PromptsSection):
    """Prompts of the pairs that raters see."""

    heldout_fraction: Fraction = Field(
        default=0.15,
        description="Share of prompts kept away from training, by a hash of the prompt; on them the policy is compared "
        "with the base model.",
    )

    @model_validator(mode="after")
    def _prompts_are_whole(self) -> "LivePromptsSection":
        if self.prefix_tokens is not None:
            raise ValueError("prefix_tokens cuts prompts by tokens, but raters see text; give prompts that are cut")
        return self


class LiveRolloutSection(RolloutSection):
    """How the answers that raters compare are drawn."""

    prompts_per_step: PositiveInt = Field(default=24, description="Prompts of one round of pairs.")
    completions_per_prompt: Annotated[int, Field(ge=2)] = Field(
        default=4, description="Completions of each prompt; every two that differ become a pair, each in one pair."
    )
    max_new_tokens: PositiveInt = Field(default=24, description="Limit of a completion, in tokens.")


class OnlineDPOSection(DPOSection):
    """Direct preference optimisation on votes about what the policy itself wrote (Guo et al. 2024, 2402.04792)."""

    beta: Positive = Field(
        default=0.2, description="Scale of the rewards, beta (log policy - log reference); IPO's tau, ORPO's lambda."
    )
    ties: Literal["drop", "half", "rao_kupper"] = Field(
        default="half",
        description="Votes that call both equal: leave them out, count half a vote for each side, or give ties a "
        "probability of their own (Rao and Kupper 1967, with `sigmoid`).",
    )
    micro_batch_size: PositiveInt = Field(
        default=16, description="Pairs in one forward and backward pass; gradients are accumulated."
    )

    @model_validator(mode="after")
    def _votes_are_about_pairs(self) -> "OnlineDPOSection":
        if self.loss == "kto":
            raise ValueError("loss is kto, which takes single labels, but votes are about pairs; set another loss")
        return self


class LivePPOSection(PPOSection):
    """PPO against a reward model that learns from votes: no critic, which would have to be learnt beside it."""

    lam: Fraction = Field(default=1.0, description="Lambda of generalised advantage estimation.")
    critic: Literal["shared", "separate", "none"] = Field(
        default="none", description="`none`: advantages are the rewards to come (REINFORCE++)."
    )

    @model_validator(mode="after")
    def _has_no_critic(self) -> "LivePPOSection":
        if self.critic != "none":
            raise ValueError(f"critic is {self.critic}, but the live loop trains none; set critic: none")
        return self


class LiveKLSection(Section):
    """How near the policy is held to the base model: an adaptive penalty, and a budget that nothing served exceeds."""

    SHORTHAND = "budget"

    coef: NonNegative = Field(
        default=0.01, description="Lowest coefficient of the KL penalty that is added to the loss of a pair."
    )
    target: Positive | None = Field(
        default=5.0, description="Nats per completion at which the coefficient aims; null keeps it fixed."
    )
    budget: Positive | None = Field(
        default=8.0, description="Nats per completion; a version above it is not served. null is off."
    )

    @model_validator(mode="after")
    def _target_is_below_budget(self) -> "LiveKLSection":
        if self.target is not None and self.budget is not None and self.target > self.budget:
            raise ValueError(f"target is {self.target:g}, above budget, {self.budget:g}; lower the first")
        if self.target is not None and self.coef == 0:
            raise ValueError("coef is 0, which no target can move; give a small coef, or set target to null")
        return self


class LiveCheckSection(Section):
    """What an update must pass before it is served: votes on held-out prompts, which are never learnt from."""

    num_votes: PositiveInt = Field(default=48, description="Newest held-out votes that are asked.")
    min_votes: PositiveInt = Field(default=12, description="With fewer held-out votes nothing is turned down for them.")
    p_value: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05,
        description="An update is dropped if it is right on fewer held-out votes than the served version, with a "
        "one-sided p-value below this (McNemar's exact test).",
    )


class LiveSection(Section):
    """When votes become an update, and what is kept."""

    SHORTHAND = "update"

    dir: str = Field(default="live", description="Folder that the trainer and the server share.")
    update: Literal["dpo", "ppo", "grpo"] = Field(
        default="dpo",
        description="Online DPO; or a reward model that learns from the votes, and steps of PPO or GRPO against it.",
    )
    votes_per_update: PositiveInt = Field(default=32, description="New votes that start an update.")
    update_after_s: Positive = Field(
        default=30.0, description="An update with fewer new votes, at least one, starts when the oldest waits so long."
    )
    max_votes_per_update: PositiveInt = Field(default=128, description="New votes that one update takes at most.")
    replay: NonNegative = Field(
        default=1.0, description="Old votes that are learnt again in an update, for each new one."
    )
    pool: PositiveInt = Field(
        default=32, description="Pairs that wait for votes; where fewer are left, new ones are drawn."
    )
    heldout_prompts_per_round: int = Field(
        default=4,
        ge=0,
        description="Held-out prompts of a round: half of the answers meet each other, half those of the base model.",
    )
    policy_steps: PositiveInt = Field(default=2, description="Steps of PPO or GRPO in one update.")
    kl: LiveKLSection = LiveKLSection()
    check: LiveCheckSection = LiveCheckSection()
    keep_versions: PositiveInt = Field(
        default=5, description="Newest versions whose weights are kept, to go back to; the base model is kept always."
    )
    poll_s: Positive = Field(default=0.2, description="Seconds between looks for votes while nothing else is to do.")

    @model_validator(mode="after")
    def _most_is_at_least_what_starts(self) -> "LiveSection":
        if self.max_votes_per_update < self.votes_per_update:
            raise ValueError(
                f"max_votes_per_update is {self.max_votes_per_update}, less than votes_per_update, "
                f"{self.votes_per_update}; raise the first"
            )
        return self
