"""Whether an update is served: votes on held-out prompts, nats to the base model, and how often it beats that model.

Shape legend: B sequences.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tunesmith.batch.pack import chunks
from tunesmith.core.trace import span
from tunesmith.data.answers import Answer, collate_answers
from tunesmith.evaluation.statistics import mcnemar, proportion_interval
from tunesmith.live.pool import BASE
from tunesmith.live.state import State
from tunesmith.live.votes import Comparison
from tunesmith.models.logprob import token_logps
from tunesmith.trainers import setup


@dataclass(frozen=True, slots=True)
class WinRate:
    """Share of held-out votes that prefer a version's answer to the base model's, ties half, with its 95 % interval."""

    share: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an update may be served; `reason` says why not. `accuracy` on held-out votes, None without any."""

    accuracy: float | None
    kl: float
    reason: str = ""

    @property
    def passes(self) -> bool:
        """True if nothing speaks against it."""
        return not self.reason


@torch.no_grad()
def correct(state: State, votes: Sequence[Comparison], known: Mapping[int, bool] = MappingProxyType({})) -> list[bool]:
    """For each vote whether the policy's reward, log policy - log base, is higher for the answer that was preferred.

    `known` are answers for these weights by vote id, which are not computed again.
    """
    with span("check"):
        answers = list(dict.fromkeys(a for vote in votes if vote.vote_id not in known for a in vote.answers))
        reward = dict(zip(answers, _rewards(state, answers), strict=True))
    return [
        known[vote.vote_id] if vote.vote_id in known else reward[vote.chosen] > reward[vote.rejected] for vote in votes
    ]


def _rewards(state: State, answers: Sequence[Answer]) -> list[float]:
    base = [logp_T.sum().item() for logp_T in state.reference_logps.of(answers)]
    found = [0.0] * len(answers)
    order = sorted(range(len(answers)), key=lambda place: answers[place].prompt_ids)
    for some in chunks(order, 2 * state.cfg.dpo.micro_batch_size):
        made = collate_answers(answers, some)
        batch = setup.sent(made, state.uploader)
        logp_BT = token_logps(
            state.policy,
            batch.ids_BS,
            batch.lengths_B,
            prompt_lengths_B=batch.prompt_lengths_B,
            temperature=state.cfg.rollout.temperature,
        ).logp_BT
        for place, logp in zip(made.answer_B.tolist(), logp_BT.sum(dim=1).tolist(), strict=True):
            found[place] = logp - base[place]
    return found


def judge(state: State, before: Sequence[bool], after: Sequence[bool], kl: float, refused: str = "") -> Verdict:
    """The verdict on an update, from what the served version and it say of the same held-out votes.

    It is dropped if it is worse beyond what chance explains, if its KL is over the budget, or if it was `refused`.
    """
    section = state.cfg.live
    accuracy = sum(after) / len(after) if after else None
    if refused:
        return Verdict(accuracy, kl, refused)
    if not math.isfinite(kl):
        return Verdict(accuracy, kl, "the log-probs of its own completions are not finite")
    if section.kl.budget is not None and kl > section.kl.budget:
        return Verdict(accuracy, kl, f"{kl:.2f} nats from the base model, the budget is {section.kl.budget:g}")
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    if len(after) >= section.check.min_votes and lost > won and mcnemar(lost, won) / 2 < section.check.p_value:
        return Verdict(accuracy, kl, f"right on {sum(after)} of {len(after)} held-out votes, before on {sum(before)}")
    return Verdict(accuracy, kl)


def win_rate(votes: Iterable[Comparison], version: int) -> WinRate | None:
    """How often the answers of `version` beat the base model's in held-out votes; None if nobody compared them."""
    name = f"v{version}"
    hits: list[float] = []
    prompts: list[str] = []
    for vote in votes:
        if vote.heldout and set(vote.duel) == {BASE, name}:
            hits.append(0.5 if vote.tie else float(vote.duel[0] == name))
            prompts.append(str(vote.prompt.content))
    if not hits:
        return None
    low, high = proportion_interval(hits, prompts)
    return WinRate(sum(hits) / len(hits), low, high)
