"""Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300), RLOO (Ahmadian et al. 2024), and variants.

Several completions are drawn for each prompt, and each is compared with the others of its group: no critic. Groups
whose rewards are all equal have no gradient and are left out. Shape legend: P prompts, G completions per prompt, R
rewards. The step is `PolicyStep.step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from tunesmith.base.config.algorithms.grpo import GRPOSection, Keep
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import PolicyBatch
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.learn.algorithms import advantages
from tunesmith.learn.rewards.scorer import Scores, joined
from tunesmith.learn.trainers import rollouts
from tunesmith.learn.trainers.api import Metrics
from tunesmith.learn.trainers.metrics import UpdateStats
from tunesmith.learn.trainers.policy_step import Credit, PolicyStep


@dataclass(slots=True)
class GRPO(PolicyStep):
    """The learner: `step` changes the policy, the optimizer and the KL controller."""

    cfg: GRPOSection

    def draw(self, prompts: Sequence[Prompt], index: int) -> tuple[list[Group], Scores]:
        """The groups of `prompts` and their scores.

        Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) then draws groups of further prompts, one
        for each group without a gradient, until enough groups have one or the recipe's limit is reached.
        """
        groups: list[Group] = []
        parts: list[Scores] = []
        num_missing, wanted = len(prompts), list(prompts)
        further = rollouts.further_prompts(self.pool, prompts, self.rollouts.seed, index)
        for attempt in range(1 + self.cfg.dynamic_sampling):
            stream = f"refill {attempt}" if attempt else "rollout"
            has_greedy = self.cfg.baseline == "greedy"
            drawn, scores = self.rollouts.draw(wanted, stream, index, with_greedy=has_greedy)
            groups.extend(drawn)
            parts.append(scores)
            num_missing -= int(self.teaching(drawn, self.judged(drawn, scores)).sum())
            wanted = list(islice(further, num_missing))
            if not wanted:
                break
        return groups, joined(parts)

    def credit(self, groups: Sequence[Group], scores: Scores, kl_PG: torch.Tensor | None) -> Credit:
        """Each completion compared with its group, of the groups whose rewards differ."""
        judged = self.judged(groups, scores)
        differs_P = self.teaching(groups, judged)  # by rewards alone: a KL in them is no signal
        figures = {
            "frac_reward_zero_std": (~differs_P).float().mean().item(),
            "groups/num_drawn": float(len(groups)),
            "groups/num_dropped": float((~differs_P).sum().item()),
        }
        learnt_PG = judged.valid_PG & differs_P[:, None] & ~left_out(self.cfg, groups)
        if kl_PG is not None:
            judged = replace(judged, total_PG=judged.total_PG - self.kl.value * kl_PG.to(judged.total_PG))
        of_turns = [self.compare(scores, lengths(groups)) for scores in self.at_turns(groups, judged)]
        advantage_PG = torch.stack(of_turns, dim=-1) if self.cfg.turn_advantages == "place" else of_turns[0]
        if self.cfg.turn_advantages == "anchor":
            among = self.among_states(groups, judged)
            advantage_PG = advantage_PG[..., None] + self.cfg.anchor_coef * among.advantage_PGK
            num_turns = turn_rewards(groups)[1].sum().item()
            figures["groups/anchored_turns"] = among.is_shared_PGK.sum().item() / max(1, num_turns)
        return Credit(learnt_PG, advantage_PG, figures, judged.valid_PG)

    def at_turns(self, groups: Sequence[Group], scores: Scores) -> list[Scores]:
        """The scores that turns are compared by: for each turn `scores` less what was given before it, valid for the
        trajectories that come to it. Without a comparison by place, `scores` alone.
        """
        if self.cfg.turn_advantages != "place":
            return [scores]
        given_PGK, has_turn_PGK = turn_rewards(groups)
        before_PGK = self.rollouts.scorer.weight_of("environment") * (given_PGK.cumsum(dim=-1) - given_PGK)
        return [
            replace(
                scores, total_PG=scores.total_PG - before_PGK[..., k], valid_PG=scores.valid_PG & has_turn_PGK[..., k]
            )
            for k in range(given_PGK.shape[-1])
        ]

    def among_states(self, groups: Sequence[Group], scores: Scores) -> advantages.StateAdvantages:
        """The advantage of each turn among those of its state. What was not given for a turn, such as the reward of a
        function, counts as given for the last one.
        """
        given_PGK, has_turn_PGK = turn_rewards(groups)
        reward_PGK = (self.rollouts.scorer.weight_of("environment") * given_PGK).to(scores.total_PG)
        last_PG1 = (has_turn_PGK.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        rest_PG1 = (scores.total_PG - reward_PGK.sum(dim=-1))[..., None]
        return advantages.among_states(
            reward_PGK.scatter_add(-1, last_PG1, rest_PG1),
            turn_states(groups, has_turn_PGK.shape[-1]),
            has_turn_PGK & scores.valid_PG[..., None],
            discount=self.cfg.anchor_discount,
            baseline=self.cfg.baseline,
            scale=self.cfg.scale,
        )

    def compare(self, scores: Scores, length_PG: torch.Tensor) -> torch.Tensor:
        """Advantage of each completion by the rewards of its group, `[P, G]`; only those that are valid take part."""
        cfg, valid_PG = self.cfg, scores.valid_PG
        if cfg.pass_at > 1:
            return advantages.pass_at(cfg.pass_at, scores.total_PG, valid_PG).advantage_PG
        if cfg.multi_objective_aggregation == "normalize_then_sum":
            part_RPG = torch.stack(list(scores.parts.values()))
            weights = torch.tensor(self.rollouts.scorer.weights)
            return advantages.normalized_sum(part_RPG, weights, valid_PG).advantage_PG
        return advantages.group_relative(
            scores.total_PG,
            valid_PG,
            baseline=cfg.baseline,
            scale=cfg.scale,
            length_PG=length_PG,
            greedy_P=scores.greedy_P,
        ).advantage_PG

    def judged(self, groups: Sequence[Group], scores: Scores) -> Scores:
        """The scores that are compared: valid are the completions that the recipe keeps of those whose reward is known,
        and the reward for short ones is added.
        """
        cfg, valid_PG, total_PG = self.cfg, scores.valid_PG, scores.total_PG
        if scores.greedy_P is not None:
            valid_PG = valid_PG & ~scores.greedy_P.isnan()[:, None]
            scores = replace(scores, valid_PG=valid_PG)
        if cfg.keep is not None:
            valid_PG = kept_of(scores, lengths(groups), cfg.keep, cfg.keep_by)
        if cfg.length_penalty > 0:
            short_PG = advantages.length_reward(total_PG, lengths(groups), valid_PG)
            total_PG = total_PG + cfg.length_penalty * short_PG
        return replace(scores, valid_PG=valid_PG, total_PG=total_PG)

    def teaching(self, groups: Sequence[Group], scores: Scores) -> torch.Tensor:
        """True for each group with a gradient, `[P]`: its rewards, or those of one of its turns, differ."""
        differs_P = torch.stack([self.differing(of_turn) for of_turn in self.at_turns(groups, scores)]).any(dim=0)
        if self.cfg.turn_advantages == "anchor":
            differs_P |= (self.among_states(groups, scores).advantage_PGK != 0).flatten(1).any(dim=1)
        return differs_P

    def differing(self, scores: Scores) -> torch.Tensor:
        """True for each group with a gradient, `[P]`: its rewards differ, or one of several that are compared alone."""
        if self.cfg.pass_at > 1:
            return advantages.pass_at(self.cfg.pass_at, scores.total_PG, scores.valid_PG).varies_P
        if scores.greedy_P is not None:
            return advantages.differs_from(scores.total_PG, scores.greedy_P, scores.valid_PG)
        if self.cfg.multi_objective_aggregation == "sum_then_normalize":
            return advantages.rewards_differ(scores.total_PG, scores.valid_PG)
        differs_P = torch.zeros(len(scores.total_PG), dtype=torch.bool)
        for weight, part_PG in zip(self.rollouts.scorer.weights, scores.parts.values(), strict=True):
            if weight != 0:
                differs_P |= advantages.rewards_differ(part_PG, scores.valid_PG & ~part_PG.isnan())
        return differs_P

    def figures(self, scores: Scores, batch: PolicyBatch, stats: UpdateStats) -> Metrics:
        """The KL to the reference, in the first update alone: there the policy is that of the step's begin."""
        first = stats.first
        if not first.has_reference:
            return {}
        return {"objective/kl": first.kl_per_sequence, "kl": first.kl_sum / first.num_tokens}


def turn_rewards(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """(What an environment gave for each turn, 0 where it gave nothing; whether there is such a turn), `[P, G, K]`."""
    turns = [[[t for s in one.samples for t in s.trajectory_turns] for one in group.completions] for group in groups]
    most = max(1, *(len(own) for of_group in turns for own in of_group))
    given_PGK = torch.zeros(len(groups), len(turns[0]), most)
    has_turn_PGK = torch.zeros(given_PGK.shape, dtype=torch.bool)
    for p, of_group in enumerate(turns):
        for g, own in enumerate(of_group):
            given_PGK[p, g, : len(own)] = torch.tensor([turn.reward or 0.0 for turn in own])
            has_turn_PGK[p, g, : len(own)] = True
    return given_PGK, has_turn_PGK


def turn_states(groups: Sequence[Group], num_turns: int) -> torch.Tensor:
    """The number of the state that each turn begins in, `[P, G, K]`: two turns of a group have the same one if they
    answer the same messages, as GiGPO's anchor states; the first turn of each answers the prompt.
    """
    state_PGK = torch.zeros(len(groups), len(groups[0].completions), num_turns, dtype=torch.int64)
    for p, group in enumerate(groups):
        known: dict[object, int] = {}
        for g, completion in enumerate(group.completions):
            numbers = [known.setdefault(answered, len(known)) for answered in _answered(completion)][:num_turns]
            state_PGK[p, g, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return state_PGK


def _answered(completion: Completion) -> list[object]:
    """The messages that each turn of a trajectory answers: those since the turn before."""
    answered: list[list[object]] = [[]]
    for message in () if completion.trajectory is None else completion.trajectory.messages:
        if message["role"] == "assistant":
            answered.append([])
        else:
            answered[-1].append((message["role"], message["content"]))
    return [tuple(messages) for messages in answered[:-1]]


def lengths(groups: Sequence[Group]) -> torch.Tensor:
    """Tokens of each completion, `[P, G]`."""
    return torch.tensor([[completion.num_sampled for completion in group.completions] for group in groups])


def kept_of(scores: Scores, length_PG: torch.Tensor, num: int, by: Keep) -> torch.Tensor:
    """True for `num` completions of each group, `[P, G]`: the shortest, or those with the highest reward per token; of
    equal ones the first. Those whose reward failed are not kept.

    GFPO (Shrivastava et al. 2025, arXiv 2508.09726) draws more completions and learns the concise ones, so that lengths
    do not grow.
    """
    score_PG = -length_PG.double() if by == "shortest" else scores.total_PG.double() / length_PG
    return advantages.highest(score_PG, scores.valid_PG, num)


def left_out(cfg: GRPOSection, groups: Sequence[Group]) -> torch.Tensor:
    """True for completions that the length limit ended, `[P, G]`, if the recipe does not learn from them."""
    truncated = [[completion.finish_reason == "length" for completion in group.completions] for group in groups]
    return torch.tensor(truncated) & cfg.mask_truncated_completions
