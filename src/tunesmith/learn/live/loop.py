"""The live loop: draw pairs for raters, read their votes, and serve every update that passes its checks.

The trainer offers pairs in `runs.db` and reads votes from `votes.db`, which the server writes: another process, which
may start and stop at any time. `Loop.update` is one update from votes to served version.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean, median

from tunesmith.base.config.algorithms.live import LiveKLSection, LiveRecipe
from tunesmith.base.core.errors import DataError, StoreError, TrainingError
from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.seeds import Groups, derive, permutation_of_groups
from tunesmith.base.core.trace import span, trace
from tunesmith.base.runs.environment import rss_gb
from tunesmith.base.runs.folder import PLACES
from tunesmith.collect.data import sets
from tunesmith.collect.data.answers import Answer
from tunesmith.collect.data.prompts import PromptLike
from tunesmith.collect.statistics.rater_report import crowd_report, known_weights
from tunesmith.collect.store.records import Command, Deleted
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.language_model import model_of_recipe, reference_of
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import context_length, freeze_lower_layers, room_for_prompts
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.rollout.factory import engine_for
from tunesmith.learn.algorithms import kl
from tunesmith.learn.live.canary import decide, trial_of
from tunesmith.learn.live.feedback import FeedbackMemory, LabelledAnswer, with_pairs
from tunesmith.learn.live.folder import LiveFolder, open_folder
from tunesmith.learn.live.offers import Offers, Rollout
from tunesmith.learn.live.regenerated import RegeneratedMemory
from tunesmith.learn.live.reward import RewardUpdate
from tunesmith.learn.live.selection import Selection
from tunesmith.learn.live.timing import announce_update
from tunesmith.learn.live.versions import CheckResult, Position, Versions, check
from tunesmith.learn.live.vote_dpo import NUM_STEPS, VoteDPO
from tunesmith.learn.live.votes import VotedPair, VoteMemory, weighed
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Metrics, StepResult
from tunesmith.learn.trainers.metrics import update_metrics
from tunesmith.learn.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.signals import StopRequest, stop_signals
from tunesmith.learn.trainers.token_check import token_facts
from tunesmith.learn.trainers.work import Work
from tunesmith.observe.profiling.meter import measured

_log = get_logger(__name__)

_OVER_BUDGET_UPDATES = 4
"""Updates of the KL controller when the KL exceeds the budget; they about double the coefficient."""

_HEARTBEAT_S = 2.0
"""Seconds between heartbeats while the trainer waits."""

_PAGE_SIZE = 1000
"""Votes that are read at a time."""


class Interrupted(Exception):
    """A signal stopped an update. It is discarded; its votes are learnt from at the next start."""


@dataclass(frozen=True, slots=True)
class LiveResult:
    """Result of a trainer: the served version and its folder (empty for the base model), number of updates, votes that
    the version was trained on, its nats per completion to the base model, and the median seconds from vote to version.
    """

    serving: int
    path: str
    updates: int
    votes: int
    kl_per_sequence: float | None
    vote_to_version_median_s: float | None


@dataclass(slots=True)
class Loop:
    """The running trainer.

    `job` is the id of this start in `runs.db`. `start` counts the starts so far and seeds the rollouts of `refill`: job
    ids are time-based. `known_correct` says by vote id whether the served version agrees with a held-out vote.
    `can_draw` is False if the last rollout had no two different completions of a prompt. `cost` is that of a trial.
    """

    cfg: LiveRecipe
    learner: VoteDPO
    offers: Offers
    memory: VoteMemory
    feedback: FeedbackMemory
    regenerated: RegeneratedMemory
    folder: LiveFolder
    versions: Versions
    stop: StopRequest
    job: int = 0
    start: int = 0
    reward: RewardUpdate | None = None
    known_correct: dict[int, bool] = field(default_factory=dict[int, bool])
    num_refills: int = 0
    can_draw: bool = True
    last_heartbeat_s: float = -math.inf
    cost: Work | None = None
    once: Once = field(default_factory=lambda: Once(_log))

    @property
    def position(self) -> Position:
        """Counters and cursors."""
        return self.versions.position

    def begin(self) -> None:
        """Resume from the newest checkpoint, or start at version 0. Errors as in `Versions.resume`."""
        self.versions.resume()
        self.read_again()
        self.job = self.folder.runs.start_job("train", {"serving": self.position.serving})
        self.start = self.folder.runs.num_jobs("train")
        if self.cfg.live.update != "dpo":
            self.reward = RewardUpdate(self.cfg, self.learner, self.offers, self.memory)
        self.heartbeat("ready")

    def read_again(self) -> None:
        """Read what was read before, from the beginning, as the position has it."""
        fresh, cursor, last = set(self.position.fresh), 0, self.position.vote_cursor
        while cursor < last:
            page = self.folder.votes.votes_after(cursor, _PAGE_SIZE)
            for vote in (vote for vote in page if vote.id <= last):
                self.memory.add([vote], learnt=vote.id not in fresh)
            cursor = page[-1].id if page else last
        self.read_feedback(0, self.position.feedback_cursor, self.position.fresh_feedback)
        self.read_requests(0, self.position.request_cursor, self.position.fresh_regenerated)

    def next_action(self) -> None:
        """Do what is due first: a command, an update, a refill of offers, or waiting."""
        command = self.read_votes()
        if command is not None:
            self.execute(command)
        elif self.position.tried and self.trial_is_over(time.time()):
            self.refill(is_new=True)
        elif not self.position.tried and self.update_is_due(time.time()):
            self.update()
        elif self.can_draw and len(self.offers.open) < self.cfg.live.pool:
            self.refill()
        else:
            if time.monotonic() - self.last_heartbeat_s >= _HEARTBEAT_S:
                self.heartbeat("waiting")
            time.sleep(self.cfg.live.poll_s)

    def read_votes(self) -> Command | None:
        """Read all new votes; returns the next command, if any. None while `votes.db` cannot be read, which the server
        may repair.
        """
        position, votes = self.position, self.folder.votes
        try:
            while page := votes.votes_after(position.vote_cursor, _PAGE_SIZE):
                self.memory.add(page)
                self.offers.open -= {vote.offer_id for vote in page if vote.offer_id is not None}
                heldout = [vote for vote in page if vote.heldout]
                sources = [side.source_id for vote in heldout for side in (vote.chosen, vote.rejected)]
                self.versions.update_win_rates(sources, list(self.memory.heldout.values()))
                position.vote_cursor = page[-1].id
            position.feedback_cursor = self.read_feedback(position.feedback_cursor)
            position.request_cursor = self.read_requests(position.request_cursor)
            commands = votes.commands_after(position.command_cursor, 1)
        except StoreError as error:
            self.once.warning(f"votes cannot be read: {error}")
            return None
        return commands[0] if commands else None

    def read_feedback(self, cursor: int, last: int | None = None, fresh: Iterable[int] | None = None) -> int:
        """Read feedback with ids above `cursor`, up to `last`; of it all but `fresh` was learnt before, None: nothing.

        Returns the new cursor.
        """
        while last is None or cursor < last:
            page = self.folder.votes.feedback_after(cursor, _PAGE_SIZE)
            if not page:
                break
            cursor = page[-1].id
            said = [one for one in page if last is None or one.id <= last]
            requests = self.folder.votes.inferences(one.inference for one in said if self.feedback.counts(one))
            self.feedback.add(said, requests, fresh=fresh)
        return cursor

    def read_requests(self, cursor: int, last: int | None = None, fresh: Iterable[int] | None = None) -> int:
        """Read requests of the API as `read_feedback` does feedback, after it; find the pairs of regenerated answers.

        Returns the new cursor; the same one where such pairs are not learnt.
        """
        if not self.learns_regenerated:
            return cursor
        while last is None or cursor < last:
            page = self.folder.votes.inferences_after(cursor, _PAGE_SIZE)
            if not page:
                break
            cursor = page[-1].id
            self.regenerated.add(one for one in page if last is None or one.id <= last)
        self.regenerated.settle(fresh)
        return cursor

    def execute(self, command: Command) -> None:
        """Execute a command; an invalid one is skipped with a warning."""
        self.position.command_cursor = command.id
        self.note_fresh()  # what was read since the last checkpoint, whose cursor is behind it
        if command.kind == "forget":
            self.forget(Deleted(**json.loads(command.argument)))
            self.folder.save(self.versions.checkpoint(), keep=1)  # older ones hold the answers that were deleted
            return
        if command.kind == "rollback" and command.argument.isdecimal():
            self.heartbeat("going back")
            if self.versions.roll_back(int(command.argument)):
                self.known_correct = {}
                self.refill(is_new=True)
                _log.info("went back to version %s", command.argument)
                return
        else:
            _log.warning("command %d is skipped: %s %r", command.id, command.kind, command.argument)
        self.folder.save(self.versions.checkpoint())

    def forget(self, deleted: Deleted) -> None:
        """Note which versions learnt from data that was deleted, and read the votes again, without it."""
        self.heartbeat("forgetting")
        self.versions.mark_learnt(deleted)
        self.memory.clear()
        self.feedback.clear()
        self.regenerated.clear()
        self.read_again()
        self.note_fresh()
        self.forget_others()
        if self.reward is not None:  # as after a restart, it is trained anew, on what is left
            self.reward = RewardUpdate(self.cfg, self.learner, self.offers, self.memory)
        if deleted.request_id is None:  # the second of two commands
            _log.info("somebody's data was deleted; it is not learnt from any more")

    def forget_others(self, drawn: Iterable[Answer] = ()) -> None:
        """Drop what was computed of all answers but those that are remembered or just `drawn`."""
        kept = *self.memory.answers, *self.feedback.answers, *self.regenerated.answers
        self.learner.keep_reference_logps([*drawn, *kept])
        self.offers.forget_features(self.memory.train)

    def trial_is_over(self, now: float) -> bool:
        """Serve the tried version, or take it back, as soon as the feedback or the time says which; True if so.

        Updates wait meanwhile: one on top of a version that is taken back would be lost with it.
        """
        position = self.position
        labels = (*self.feedback.fresh.values(), *self.feedback.learnt.values())
        trial = trial_of(labels, position.tried, position.serving, position.tried_since)
        verdict, note = decide(trial, self.cfg.live.canary, now)
        if verdict == "wait":
            self.versions.note_trial(note)
            return False
        self.heartbeat("ending a trial")
        version = position.tried
        self.known_correct = self.known_correct if verdict == "serve" else {}
        self.note_fresh()
        self.versions.end_trial(note, is_served=verdict == "serve")
        job = self.folder.runs.start_job("trial")
        self.folder.runs.end_job(job, verdict, {"version": version, "note": note})
        _log.info("version %d was tried: %s, %s", version, verdict, note)
        return True

    def note_fresh(self) -> None:
        """Note in the position which votes, thumbs and regenerated answers wait for an update."""
        self.position.fresh, self.position.fresh_feedback = sorted(self.memory.fresh), sorted(self.feedback.fresh)
        self.position.fresh_regenerated = sorted(self.regenerated.fresh)

    def update_is_due(self, now: float) -> bool:
        """True if there are enough fresh votes and thumbs, or one has waited too long."""
        section = self.cfg.live
        waiting = [vote.created_at for vote in (*self.memory.fresh.values(), *self.regenerated.fresh.values())]
        waiting += [label.created_at for label in self.feedback.fresh.values()] if self.learns_thumbs else []
        return len(waiting) >= section.votes_per_update or now - min(waiting, default=now) >= section.update_after_s

    @property
    def learns_thumbs(self) -> bool:
        """True if thumbs are learnt from; they are read all the same, for the trial of a version."""
        return self.cfg.live.update == "dpo" and self.cfg.live.feedback.thumbs_weight > 0

    @property
    def learns_regenerated(self) -> bool:
        """True if pairs of regenerated answers are learnt from."""
        return self.cfg.live.update == "dpo" and self.cfg.live.feedback.regenerated_within_s is not None

    def update(self) -> CheckResult:
        """Train on the fresh votes and thumbs, and serve the result if it passes its checks; else restore everything.

        Raises Interrupted, with unusable weights, after a signal.
        """
        section, position = self.cfg.live, self.position
        self.heartbeat("learning")
        job = self.folder.runs.start_job("update")
        labelled = len(self.feedback.fresh) if self.learns_thumbs else 0
        labelled += 2 * len(self.regenerated.fresh)
        waiting = self.learner, self.offers, self.memory, position.num_updates + 1
        self.cost = announce_update(*waiting, self.cost, num_labels=labelled)
        keep = partial(self.folder.files.append, PLACES)
        with measured(self.cfg.run.measure, position.num_updates + 1, keep) as times:
            heldout = self.memory.heldout_decided(section.check.num_votes)
            correct_before = self.learner.correct(heldout, self.known_correct)
            before = self.versions.snapshot()
            votes = self.memory.take(section.max_votes_per_update)
            labels = self.feedback.take(section.max_votes_per_update) if self.learns_thumbs else []
            pairs = self.regenerated.take(section.max_votes_per_update)
            position.num_updates += 1
            position.last_vote = max(position.last_vote, *(one.vote_id for one in votes), 0)
            position.last_feedback = max(position.last_feedback, *(one.feedback_id for one in labels), 0)
            position.last_request = max(position.last_request, *(-one.vote_id for one in pairs), 0)
            steps = self.learn(votes, labels, pairs)
            not_finite = next((step.report.bad_part for step in steps if step.report and step.report.refused), "")
            correct_after = self.learner.correct(heldout)
            drawn = self.offers.draw("update", position.num_updates)  # measures the KL, then becomes the next offers
            nats = self.mean_kl(drawn)
            result = check(section, correct_before, correct_after, nats, not_finite)
            with span("save"):
                if result.passes:
                    self.known_correct = dict(zip((vote.vote_id for vote in heldout), correct_after, strict=True))
                else:
                    self.versions.take_back(before)
                adapt_kl(self.learner.kl, nats, section.kl)
                self.forget_others(drawn.answers)
                self.note_fresh()
                version = self.versions.add(result, [one.created_at for one in (*votes, *labels, *pairs)])
        new = {"votes": votes, "feedback": labels, "regenerated": pairs}
        learnt = {f"{name}/new": float(len(units)) for name, units in new.items()}
        metrics = {**mean_metrics(steps), **self.metrics(result, drawn, learnt, steps), **times.metrics()}
        self.folder.files.append_metrics(position.num_updates, metrics)
        self.versions.publish(version)
        if result.passes:
            self.offer(drawn, is_new=True)
        self.folder.runs.end_job(job, "done" if result.passes else "dropped", {"reason": result.reason})
        became = "tried" if position.tried else "served"
        outcome = f"version {position.version} is {became}" if result.passes else f"dropped: {result.reason}"
        numbers = position.num_updates, len(votes) + len(pairs), len(labels), outcome, nats, times.wall_s
        _log.info("update %d: %d pairs, %d thumbs, %s, %.2f nats, %.1f s", *numbers)
        return result

    def learn(
        self, fresh: Sequence[VotedPair], thumbs: Sequence[LabelledAnswer], regenerated: Sequence[VotedPair]
    ) -> list[StepResult]:
        """The optimizer steps of one update, on fresh votes, thumbs and regenerated answers, and some learnt before."""
        seed = derive(self.cfg.run.seed, "update", self.position.num_updates)
        # While new ones wait, old ones are not learnt again: a policy that falls behind would learn from old answers.
        is_behind = bool(self.memory.fresh or (self.learns_thumbs and self.feedback.fresh))
        share = 0.0 if is_behind else self.cfg.live.replay
        taken = {label.feedback_id for label in thumbs}
        votes = [*fresh, *self.memory.replay(round(share * len(fresh)), seed, [vote.vote_id for vote in fresh])]
        labels = [*thumbs, *self.feedback.replay(round(share * len(thumbs)), seed, taken)]
        chosen = {label.feedback_id for label in labels}
        pairs, single = with_pairs(labels, (one for id, one in self.feedback.learnt.items() if id not in chosen))
        old = self.regenerated.replay(round(share * len(regenerated)), seed, [-pair.vote_id for pair in regenerated])
        pairs += [*regenerated, *old]
        if self.reward is None:
            steps = self.preference_steps([*self.weigh(votes), *pairs], self.learner.weighed(single), seed)
        else:
            steps = self.reward.steps(votes, seed, self.position.num_steps, self.progress, self.weigh)
        results: list[StepResult] = []
        for result in steps:
            self.position.num_steps += 1
            results += [] if result.report is None else [result]  # None: all rewards of each group were equal
        return results

    def weigh(self, votes: Sequence[VotedPair]) -> list[VotedPair]:
        """The votes, by what all that were read say of their raters, if `live.raters` asks for it."""
        if self.cfg.live.raters == "equal":
            return list(votes)
        judged = [one for one in self.folder.votes.judged_pairs() if one.vote_id <= self.position.vote_cursor]
        return weighed(votes, known_weights(crowd_report(judged)))

    def preference_steps(
        self, votes: Sequence[VotedPair], labels: Sequence[LabelledAnswer], seed: int
    ) -> Iterator[StepResult]:
        """Steps of online DPO, with thumbs by KTO; what was said of one prompt is in one batch."""
        section, units = self.cfg.dpo, [*votes, *labels]
        for epoch in range(section.num_epochs):
            order = permutation_of_groups(seed, epoch, Groups(unit.answers[0].prompt_ids for unit in units))
            # Batches of about equal size: a short last one would get the same weight as a full one.
            num_batches = math.ceil(len(order) / section.pairs_per_step)
            for batch in chunks(order, math.ceil(len(order) / num_batches)):
                self.progress("learning")
                pairs = [one for index in batch if isinstance(one := units[index], VotedPair)]
                thumbs = [one for index in batch if isinstance(one := units[index], LabelledAnswer)]
                yield self.learner.step(pairs, self.position.num_steps, thumbs)

    def mean_kl(self, drawn: Rollout) -> float:
        """Mean over completions of log policy - log reference, in nats, with the engine's log-probs of the policy."""
        with span("reference"):
            reference = self.learner.reference_logp(drawn.answers)
            sides = zip(drawn.completions, reference, strict=True)
            return fmean(sum(one.raw_logps) - logp_T.sum().item() for one, logp_T in sides)

    def metrics(self, result: CheckResult, drawn: Rollout, learnt: Metrics, steps: Sequence[StepResult]) -> Metrics:
        """Metrics of an update besides those of its loss, with the numbers `learnt` of votes and thumbs.

        Raises TrainingError after too many refused ones.
        """
        position = self.position
        reports = [step.report for step in steps if step.report is not None]
        if reports and reports[-1].num_refused_in_row >= self.cfg.optimizer.max_refused_steps:
            raise TrainingError(
                f"{reports[-1].num_refused_in_row} optimizer steps in a row were not finite, the last in "
                f"{reports[-1].bad_part}; version {position.serving} is served as before. Start again with a lower "
                "--optimizer.learning-rate"
            )
        metrics: Metrics = {
            **(update_metrics(reports) if reports else {}),
            "kl": result.kl,
            "objective/kl_coef": self.learner.kl.value,
            "completions/mean_length": fmean(len(one.token_ids) for one in drawn.completions),
            **learnt,
            "votes/heldout": float(len(self.memory.heldout)),
            "votes/total": float(position.num_votes),
            "version": float(position.serving),
            "accepted": float(result.passes),
            "memory/rss_gb": rss_gb(),
        }
        if result.accuracy is not None:
            metrics["heldout/accuracy"] = result.accuracy
        num_learnt = int(sum(learnt.values()))
        if result.passes and num_learnt and not position.tried:
            metrics["votes/to_version_s"] = median(position.latencies_s[-num_learnt:])
        return metrics

    def refill(self, *, is_new: bool = False) -> None:
        """Draw and offer more pairs of the served version; with `is_new`, earlier offers become stale."""
        self.heartbeat("drawing")
        self.num_refills += 1
        with trace():
            drawn = self.offers.draw("refill", self.start, self.num_refills)
        self.offer(drawn, is_new=is_new or self.num_refills == 1)

    def offer(self, drawn: Rollout, *, is_new: bool) -> None:
        """Offer pairs of `drawn` to raters; with `is_new`, earlier offers become stale."""
        pairs = self.offers.pair(drawn, self.position.version, self.memory.train)
        self.can_draw = bool(pairs)
        if not pairs:
            _log.warning("all completions of a prompt are equal: no pairs to compare until the policy changes")
            return
        retired = self.position.last_offer + 1 if is_new else 0
        ids = self.folder.runs.add_offers(pairs, retires_before=retired)
        self.offers.open = set(ids) if is_new else self.offers.open | set(ids)
        self.position.last_offer = max(ids)

    def heartbeat(self, state: str) -> None:
        """Write to `runs.db` that the trainer is alive, and what it does."""
        with span("heartbeat"):
            self.folder.beat(self.position.num_updates, state)
        self.last_heartbeat_s = time.monotonic()

    def progress(self, state: str) -> None:
        """A heartbeat between the steps of an update. Raises Interrupted after a signal."""
        if self.stop.signal is not None:
            raise Interrupted
        self.heartbeat(state)

    def finish(self) -> LiveResult:
        """The result, also written to `result.json`."""
        position = self.position
        version, latencies_s = self.versions.find(position.serving), position.latencies_s
        result = LiveResult(
            serving=position.serving,
            path=version.path if version else "",
            updates=position.num_updates,
            votes=position.num_votes,
            kl_per_sequence=version.kl if version else None,
            vote_to_version_median_s=median(latencies_s) if latencies_s else None,
        )
        self.folder.files.write_json("result.json", asdict(result))
        self.folder.runs.end_job(self.job, "ended")
        self.heartbeat("ended")
        return result


def adapt_kl(controller: kl.Controller, nats: float, section: LiveKLSection) -> None:
    """Adapt the KL coefficient to the nats per completion. It does not fall below the recipe's: without penalty, the
    policy would be far over the budget before the coefficient has grown again.
    """
    for _ in range(_OVER_BUDGET_UPDATES if section.budget is not None and nats > section.budget else 1):
        controller.update(nats, 1)
    controller.value = max(controller.value, section.coef)


def mean_metrics(results: Sequence[StepResult]) -> Metrics:
    """Means over the steps that have the metric; numbers of tokens are summed."""
    means: Metrics = {}
    for name in dict.fromkeys(name for one in results for name in one.metrics):
        values = [one.metrics[name] for one in results if name in one.metrics]
        means[name] = sum(values) if name in ("num_tokens", "rollout/unused_tokens") else sum(values) / len(values)
    return means


def build(cfg: LiveRecipe, folder: LiveFolder, stop: StopRequest, prompts: Iterable[PromptLike] | None = None) -> Loop:
    """The loop at version 0, the model that `cfg` names. `prompts` replace those of `cfg`.

    Raises InputError for a model or prompts that cannot be used.
    """
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    model, tokenizer, context = loaded.model, loaded.tokenizer, context_length(loaded.model)
    max_length = room_for_prompts(model, cfg.rollout.max_new_tokens)
    given = None if prompts is None else list(prompts)
    found = sets.prompt_sets(cfg.prompts, tokenizer, cfg.run.seed, given, max_length=max_length)
    if cfg.live.heldout_prompts_per_round and not found.heldout:
        raise DataError(
            "no prompts are held out, so updates cannot be checked; give prompts.heldout_fraction a larger share, "
            "prompts.heldout_source a file, or set live.heldout_prompts_per_round to 0"
        )
    token_facts(model, tokenizer, found.prompts).check()
    identity = {
        "the model": fingerprint_of_tensors(model),
        "the prompts": fingerprint_of_rows((one.id, one.content) for one in (*found.train, *found.heldout)),
        "the device": device.type,
    }
    policy = model_of_recipe(model, cfg.model)
    reference = reference_of(policy, cfg.model)
    freeze_lower_layers(model, cfg.model.num_trainable_layers)
    optimizer = MasterAdamW(model, cfg.optimizer, total_steps=NUM_STEPS, kernels=policy.kernels)
    controller = kl.Controller(cfg.live.kl.coef, cfg.live.kl.target, horizon=1.0)
    temperature, weight = cfg.rollout.temperature, cfg.live.reasons.weight
    learner = VoteDPO(
        cfg.dpo, policy, reference, optimizer, controller, tokenizer, temperature, cfg.live.feedback, weight
    )
    engine = engine_for(cfg.rollout, policy, tokenizer, lambda: learner.optimizer)  # a rollback replaces it
    section = cfg.live.selection
    selection = None if section.method == "random" else Selection(section, reference)
    offers = Offers(cfg, found, engine, reference, tokenizer, selection)
    cut = {one.content: one.token_ids for one in (*found.train, *found.heldout) if one.token_ids is not None}
    longest, keeps_ties = context or 10**9, cfg.dpo.ties != "drop"
    memory = VoteMemory(tokenizer, longest, keeps_ties=keeps_ties, prompt_ids=cut, reasons=cfg.live.reasons)
    feedback = FeedbackMemory(cfg.live.feedback, longest)
    regenerated = RegeneratedMemory(feedback, cfg.live.feedback.regenerated_within_s or 0.0)
    versions = Versions(cfg, learner, folder, identity)
    return Loop(cfg, learner, offers, memory, feedback, regenerated, folder, versions, stop)


def run(
    cfg: LiveRecipe, *, provenance: Mapping[str, str] | None = None, prompts: Iterable[PromptLike] | None = None
) -> LiveResult:
    """Learn from votes in the folder `cfg.live.dir` until SIGTERM or SIGINT; returns the result, as in `result.json`.

    A folder that was used before is resumed: weights, optimizer and votes are as they were.

    Raises:
        InputError: for a config, model or prompts that cannot be used, or a folder that is in use.
        TrainingError: if too many updates in a row are not finite.
    """
    with open_folder(cfg, provenance) as folder, stop_signals() as stop:
        loop = build(cfg, folder, stop, prompts)
        loop.begin()
        database = f" --database {cfg.live.database}" if cfg.live.database else ""
        where = cfg.live.dir, f"tunesmith serve --dir {cfg.live.dir}{database}"
        _log.info("version %d is served; waiting for votes in %s (serve with `%s`)", loop.position.serving, *where)
        try:
            while stop.signal is None:
                loop.next_action()
        except Interrupted:
            _log.info("an update was discarded; its votes are learnt from at the next start")
        return loop.finish()
