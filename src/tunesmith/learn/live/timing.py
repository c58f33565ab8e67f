"""About how long an update takes, by a trial of the policy."""

from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.config.spec import Passes
from tunesmith.learn.live.offers import Offers
from tunesmith.learn.live.vote_dpo import VoteDPO
from tunesmith.learn.live.votes import VoteMemory
from tunesmith.learn.trainers.estimate import work_of_step
from tunesmith.learn.trainers.work import Rows, Work, announce_time, trial, trial_engine


def _rows(cfg: LiveRecipe, offers: Offers) -> Rows:
    return Rows(offers.prompts.mean_tokens, cfg.rollout.max_new_tokens, cfg.rollout.completions_per_prompt)


def _num_drawn(cfg: LiveRecipe, num_prompts: int) -> tuple[int, int]:
    """(Completions of `num_prompts` prompts, those that are drawn at a time)."""
    num = num_prompts * cfg.rollout.completions_per_prompt
    return num, min(num, cfg.rollout.batch_size if cfg.rollout.backend == "transformers" else cfg.rollout.num_slots)


def announce_update(
    learner: VoteDPO, offers: Offers, memory: VoteMemory, number: int, cost: Work | None = None, *, num_labels: int = 0
) -> Work:
    """Print to stderr about how long update `number`, on the fresh votes and `num_labels` thumbs, takes; returns the
    cost of each kind of work, by a trial of a few seconds unless it is given.
    """
    cfg = offers.cfg
    if cost is None:
        _, num_slots = _num_drawn(cfg, cfg.rollout.prompts_per_step)
        drawing = trial_engine(learner.policy, offers.tokenizer, cfg.rollout), offers.sampling("trial"), num_slots
        cost = trial(learner.policy, _rows(cfg, offers), *drawing, optimizer=cfg.optimizer)
    announce_time(update_work(cfg, learner, offers, memory, num_labels).seconds(cost), f"update {number}")
    return cost


def update_work(cfg: LiveRecipe, learner: VoteDPO, offers: Offers, memory: VoteMemory, num_labels: int = 0) -> Work:
    """The work of an update on the fresh votes and `num_labels` thumbs: its steps, its check, and the completions that
    are offered next.
    """
    rows, section = _rows(cfg, offers), cfg.live
    num_fresh = min(len(memory.fresh), section.max_votes_per_update)
    num_votes = num_fresh + min(round(section.replay * num_fresh), len(memory.learnt))
    heldout = memory.heldout_decided(section.check.num_votes)
    voted = {answer for vote in (*memory.fresh.values(), *heldout) for answer in vote.answers}
    num_missing = len(voted - learner.reference_logps.keys())
    work = Work(scored=rows.tokens(num_missing + 4 * len(heldout)))  # both answers, before and after
    num_prompts = cfg.rollout.prompts_per_step
    num_drawn, num_slots = _num_drawn(cfg, num_prompts + section.heldout_prompts_per_round)
    work += Work.drawing(num_drawn, rows.completion, num_slots) + Work(scored=rows.tokens(num_drawn))
    learnt = cfg.dpo if section.update == "dpo" else cfg.reward_model
    num_labels = round((1 + section.replay) * min(num_labels, section.max_votes_per_update))
    num_batches = -(-(num_votes + num_labels) // learnt.pairs_per_step)
    work += Work(scored=rows.tokens(2 * num_labels))  # mismatched answers, by policy and reference
    work += Work(trained=rows.tokens(2 * num_votes + num_labels), updates=num_batches) * learnt.num_epochs
    if section.update == "dpo":
        return work
    policy = cfg.ppo if section.update == "ppo" else cfg.grpo
    passes = Passes.of_drawing(cfg, section=policy, old_policy=True)
    _, num_slots = _num_drawn(cfg, num_prompts)
    return work + work_of_step(passes, rows, num_slots, reward_models=1.0) * section.policy_steps
