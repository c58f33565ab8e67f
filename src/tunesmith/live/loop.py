"""The live loop: a policy learns from votes while they are given, and the next pairs come from what it has learnt.

Online preference optimisation (Guo et al. 2024, arXiv 2402.04792; Qi et al. 2024, 2406.05534). The trainer offers pairs
in `runs.db`, reads votes from `votes.db`, and answers every few votes with an update. What passes the checks of
`check` becomes the next version, from which new pairs are drawn; anything else is taken back. The server is
another process, which may come and go. Shape legend: N votes, S sides (0 preferred, 1 not), A distinct answers of a
micro-batch, B the same as rows, T completion tokens.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from tunesmith.algorithms import direct_loss, kl, sums
from tunesmith.algorithms.direct_loss import DirectStats, PairLogps
from tunesmith.algorithms.sums import merged
from tunesmith.batch.pack import chunks
from tunesmith.config.schema import LiveRecipe
from tunesmith.core.log import get_logger
from tunesmith.core.seeds import derive, permutation_of_groups
from tunesmith.core.trace import span, trace
from tunesmith.data.answers import AnswerBatch, AnswerTable, collate_answers
from tunesmith.data.prompts import PromptLike
from tunesmith.live import check, pool, serving
from tunesmith.live.check import Verdict
from tunesmith.live.folder import open_folder
from tunesmith.live.reward import RewardUpdate
from tunesmith.live.serving import LiveResult, Loop
from tunesmith.live.state import State, build, contents, restore
from tunesmith.live.votes import Comparison
from tunesmith.models.logprob import length_mask, token_logps
from tunesmith.runs.checkpoint import snapshot
from tunesmith.trainers import setup
from tunesmith.trainers.api import Metrics, StepResult
from tunesmith.trainers.dpo import TokenSums, token_metrics
from tunesmith.trainers.signals import stop_signals

__all__ = ["LiveResult", "State", "build", "run", "step", "update"]

_log = get_logger(__name__)


_HOLD_BACK = 4
"""An update over the budget moves the KL coefficient so many times, to about the double: else many would be dropped."""


@dataclass(frozen=True, slots=True)
class VoteBatch:
    """The answers of some votes, their log-probs under the base model, and which two each vote is about."""

    answers: AnswerBatch
    base_BT: torch.Tensor
    answer_SN: torch.Tensor
    tie_N: torch.Tensor


class Left(Exception):
    """A signal came in the middle of an update, which is given up: its votes are learnt at the next start."""


def step(state: State, votes: Sequence[Comparison]) -> StepResult:
    """One optimizer step: the loss of `votes` and the KL to the base model on their answers, and an update."""
    num_votes = sums.sum_over_ranks(len(votes))  # one global denominator
    with span("reference"):
        state.reference_logps.of(answer for vote in votes for answer in vote.answers)
    stats: list[DirectStats] = []
    tokens: list[TokenSums] = []
    total_loss = torch.zeros((), device=state.device)
    for micro in chunks(votes, state.cfg.dpo.micro_batch_size):
        with span("update/forward"):
            loss, micro_stats, micro_tokens = micro_batch_loss(state, micro, num_votes)
        with span("update/backward"):
            state.optimizer.scaled(loss).backward()
        total_loss += loss.detach()
        stats.append(micro_stats)
        tokens.append(micro_tokens)
    with span("update/optimizer"):
        report = state.optimizer.step(loss=total_loss.item())  # refuses what is not finite
    metrics = {**merged(stats).metrics(), **token_metrics(tokens)}
    return StepResult(metrics, report, lambda: [asdict(vote.as_pair()) for vote in votes])


def micro_batch_loss(
    state: State, votes: Sequence[Comparison], num_votes: float
) -> tuple[torch.Tensor, DirectStats, TokenSums]:
    """The loss of some votes, divided by `num_votes`, with its statistics. An answer of several votes is computed once.

    To the loss of preferences (`algorithms.direct_loss`) comes the KL coefficient times the nats per answer to the
    base model, with the gradient of KL(policy, base) where the answers are the policy's own.
    """
    sent = setup.sent(batch_of(state, votes), state.uploader)
    batch = sent.answers
    scores = token_logps(
        state.policy,
        batch.ids_BS,
        batch.lengths_B,
        prompt_lengths_B=batch.prompt_lengths_B,
        temperature=state.cfg.rollout.temperature,
    )
    base_BT = sent.base_BT.to(scores.logp_BT)
    length_B = batch.lengths_B - batch.prompt_lengths_B
    mask_BT = length_mask(length_B, scores.logp_BT.shape[1])

    place_A = torch.argsort(batch.answer_B)  # rows in the order of the table
    logp_A, base_A = scores.logp_BT.sum(dim=1)[place_A], base_BT.sum(dim=1)[place_A]
    both = sent.answer_SN
    logps = PairLogps(logp_A[both], length_B[place_A][both], base_A[both], sent.tie_N)
    loss, stats = direct_loss.paired(logps, state.cfg.dpo, num_pairs=num_votes)
    if state.kl.value > 0:
        loss = loss + state.kl.value * kl.penalty_loss("k1", scores.logp_BT, base_BT, mask_BT, 2 * num_votes)
    return loss, stats, TokenSums.of_batch(length_B, scores.entropy_BT)


def batch_of(state: State, votes: Sequence[Comparison]) -> VoteBatch:
    """The votes as tensors on the CPU. An answer of several votes stands once."""
    table = AnswerTable()
    pairs = [(table.place(vote.chosen), table.place(vote.rejected)) for vote in votes]
    batch = collate_answers(table.answers, range(len(table.answers)))
    base = state.reference_logps.of(table.answers[place] for place in batch.answer_B.tolist())
    base_BT = torch.nn.utils.rnn.pad_sequence(base, batch_first=True)
    return VoteBatch(batch, base_BT, torch.tensor(pairs).T, torch.tensor([vote.tie for vote in votes]))


def update(loop: Loop) -> Verdict:
    """Learn from the fresh votes, and serve the result if it passes its checks; else everything is as it was before.

    Raises Left, with weights that are good for nothing, if a signal asks the trainer to end.
    """
    state, position = loop.state, loop.state.position
    loop.beat("learning")
    job = loop.folder.runs.start_job("update")
    with trace() as times:
        asked = state.memory.heldout_decided(state.cfg.live.check.num_votes)
        correct_before = check.correct(state, asked, loop.known_correct)
        before = snapshot(contents(state))
        fresh = state.memory.take(state.cfg.live.max_votes_per_update)
        position.num_updates += 1
        results = learn(loop, fresh)
        reports = [one.report for one in results if one.report is not None]
        refused = next((f"{one.bad_part} is not finite" for one in reports if one.refused), "")
        correct_after = check.correct(state, asked)
        drawn = pool.draw(state, "update", position.num_updates)  # tells the KL, and is what raters see next
        nats = pool.mean_kl(state, drawn)
        verdict = check.judge(state, correct_before, correct_after, nats, refused)
        if verdict.passes:
            loop.known_correct = dict(zip((vote.vote_id for vote in asked), correct_after, strict=True))
        else:
            restore(state, before)
        move_penalty(state, nats)
        serving.forget(loop, drawn)
        with span("save"):
            version = serving.write_version(loop, verdict, fresh)
    figures = serving.figures_of(loop, verdict, drawn, fresh, reports)
    serving.record(loop, {**mean_metrics(results), **figures, **times.metrics()})
    serving.announce(loop, version, drawn)
    loop.folder.runs.end_job(job, "done" if verdict.passes else "dropped", {"reason": verdict.reason})
    _log.info(
        "update %d: %d votes, %s, %.2f nats, %.1f s",
        position.num_updates,
        len(fresh),
        f"version {position.serving} is served" if verdict.passes else f"dropped: {verdict.reason}",
        nats,
        times.wall_s,
    )
    return verdict


def move_penalty(state: State, nats: float) -> None:
    """Let the KL coefficient follow the nats per completion; it does not fall below where it began.

    A policy that is far below the target would lose its penalty, and be far above the budget before it is back.
    """
    section = state.cfg.live.kl
    if section.target is None or not math.isfinite(nats):
        return
    if nats > section.target or state.kl.value > section.coef:
        for _ in range(_HOLD_BACK if section.budget is not None and nats > section.budget else 1):
            state.kl.update(nats, 1)


def learn(loop: Loop, fresh: Sequence[Comparison]) -> list[StepResult]:
    """The optimizer steps of one update: fresh votes and some of the old ones, those of one prompt together."""
    state, cfg = loop.state, loop.state.cfg
    seed = derive(cfg.run.seed, "update", state.position.num_updates)
    old = state.memory.replay(round(cfg.live.replay * len(fresh)), seed, fresh)
    votes = [*fresh, *old]
    if loop.reward is not None:
        return list(reward_steps(loop, loop.reward, votes, seed))
    results: list[StepResult] = []
    for epoch in range(cfg.dpo.num_epochs):
        order = permutation_of_groups(seed, epoch, [vote.chosen.prompt_ids for vote in votes])
        for places in even_chunks(order, cfg.dpo.pairs_per_step):
            if loop.leaves:
                raise Left
            results.append(step(state, [votes[place] for place in places]))
            state.position.num_steps += 1
            loop.beat("learning")
    return results


def reward_steps(loop: Loop, reward: RewardUpdate, votes: Sequence[Comparison], seed: int) -> Iterator[StepResult]:
    """The steps of PPO or GRPO, one after the other."""
    for result in reward.learn(votes, seed, loop.beat):
        yield result
        if loop.leaves:
            raise Left


def even_chunks(items: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """Consecutive parts of about equal length, at most `size`: a short last step would be as loud as a whole one."""
    return chunks(items, math.ceil(len(items) / math.ceil(len(items) / size)))


def mean_metrics(results: Sequence[StepResult]) -> Metrics:
    """Means over the optimizer steps of an update; tokens are added up."""
    means: Metrics = {}
    for name in dict.fromkeys(name for one in results for name in one.metrics):
        values = [one.metrics[name] for one in results if name in one.metrics]
        means[name] = sum(values) if name == "num_tokens" else sum(values) / len(values)
    return means


def run(
    cfg: LiveRecipe, *, provenance: Mapping[str, str] | None = None, prompts: Iterable[PromptLike] | None = None
) -> LiveResult:
    """Learn from votes in the folder `cfg.live.dir` until SIGTERM or SIGINT; what it came to, as in `result.json`.

    A folder that was used before goes on from its newest version: weights, optimizer and votes are as they were.

    Raises:
        InputError: for a config, model or prompts that cannot be used, or a folder that is in use.
        TrainingError: if too many updates in a row are not finite.
    """
    with open_folder(cfg, provenance) as folder, stop_signals() as stop:
        loop = serving.begin(build(cfg, prompts=prompts), folder, stop)
        try:
            while not loop.leaves:
                turn(loop)
        except Left:
            _log.info("an update was given up; its votes are learnt at the next start")
        return serving.finish(loop)


def turn(loop: Loop) -> None:
    """What is most pressing now: a command, an update, more pairs, or a moment's wait."""
    command = serving.read(loop)
    if command is not None:
        serving.obey(loop, command)
    elif serving.is_due(loop, time.time()):
        update(loop)
    elif serving.needs_pairs(loop):
        serving.refill(loop)
    else:
        serving.wait(loop)
