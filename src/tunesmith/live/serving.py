"""What surrounds an update of the live loop: votes and commands in, versions, pairs and figures out."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch

from tunesmith.config.sections import LoraSection
from tunesmith.core import faults
from tunesmith.core.errors import StoreError, TrainingError
from tunesmith.core.log import Once, get_logger
from tunesmith.core.trace import trace
from tunesmith.data.answers import Answer
from tunesmith.live import check, pool
from tunesmith.live.check import Verdict
from tunesmith.live.folder import LiveFolder
from tunesmith.live.pool import Pool, Round
from tunesmith.live.reward import RewardUpdate
from tunesmith.live.state import Position, State, contents, fresh_optimizer, restore, trained
from tunesmith.live.votes import Comparison
from tunesmith.models.load import load_policy
from tunesmith.models.optimizer import StepReport
from tunesmith.runs.checkpoint import Checkpoint
from tunesmith.runs.environment import rss_gb
from tunesmith.store.records import Command, PolicyVersion, StoredVote
from tunesmith.trainers.api import Metrics
from tunesmith.trainers.metrics import update_metrics
from tunesmith.trainers.restart import check_identity
from tunesmith.trainers.signals import StopRequest

_log = get_logger(__name__)

_BEAT_S = 2.0
"""Seconds between signs of life while the trainer waits."""

_PAGE = 1000
"""Votes that are read at a time."""


@dataclass(frozen=True, slots=True)
class LiveResult:
    """What a trainer came to: the served version and its folder (empty for the base model), updates made, votes learnt
    from, and the median of seconds from a vote to the version that learnt from it.
    """

    serving: int
    path: str
    updates: int
    votes: int
    kl_per_sequence: float | None
    vote_to_version_median_s: float | None

    def to_json(self) -> dict[str, object]:
        """All figures as JSON types."""
        return asdict(self)


@dataclass(slots=True)
class Loop:
    """The running trainer: state, folder, pool, and when it last gave a sign of life.

    `job` is the id of this start in `runs.db`, `start` counts the starts there have been: rounds that refill the pool
    are drawn from a stream of their own at each. Ids would not do, they begin at the clock.
    `known_correct` says of held-out votes, by id, whether the served version is right on them.
    """

    state: State
    folder: LiveFolder
    stop: StopRequest
    job: int
    start: int
    pool: Pool = field(default_factory=Pool)
    reward: RewardUpdate | None = None
    known_correct: dict[int, bool] = field(default_factory=dict[int, bool])
    once: Once = field(default_factory=lambda: Once(_log))
    num_refills: int = 0
    is_worth_drawing: bool = True
    beaten_s: float = -math.inf

    def beat(self, what: str) -> None:
        """A sign of life, and what the trainer is doing."""
        self.folder.runs.beat(what)
        self.beaten_s = time.monotonic()

    @property
    def leaves(self) -> bool:
        """True once a signal has asked the trainer to end."""
        return self.stop.signal is not None


def begin(state: State, folder: LiveFolder, stop: StopRequest) -> Loop:
    """The loop as its newest checkpoint has it, or at version 0. What a crash kept from `runs.db` is written there.

    Raises:
        RunError: if model, prompts or device are not those of the checkpoint, or no checkpoint is whole.
    """
    found, logs = folder.newest(), {}
    if found is not None:
        take_over(state, found.state, folder)
        restore(state, found)
        logs = found.state.get("log_sizes", {})
    else:
        state.position.note_version(PolicyVersion(0, time.time(), kl=0.0, serving=True), state.cfg.live.keep_versions)
    folder.log.cut_logs(logs if isinstance(logs, Mapping) else {})
    folder.runs.truncate_metrics(state.position.num_updates + 1)
    for row in state.position.versions:
        folder.runs.add_version(PolicyVersion(**row))
    folder.link_final(state.position.serving)
    job = folder.runs.start_job("train", {"serving": state.position.serving})
    loop = Loop(state, folder, stop, job, folder.runs.num_jobs("train"))
    if state.cfg.live.update != "dpo":
        loop.reward = RewardUpdate(state)
    loop.beat("ready")
    return loop


def take_over(state: State, saved: Mapping[str, object], folder: LiveFolder) -> None:
    """Put the position of a checkpoint, and the votes that were read until then, into `state`."""
    require_identity(saved["identity"], state.identity, folder)
    values = saved["position"]
    assert isinstance(values, Mapping)
    state.position = Position(**values)
    fresh, cursor = set(state.position.fresh), 0
    while cursor < state.position.vote_cursor:
        page = folder.votes.votes_after(cursor, _PAGE)
        known = [vote for vote in page if vote.id <= state.position.vote_cursor]
        for vote in known:
            state.memory.add([vote], learnt=vote.id not in fresh)
        cursor = page[-1].id if page else state.position.vote_cursor


def require_identity(saved: object, found: Mapping[str, str], folder: LiveFolder) -> None:
    """Raise RunError if model, prompts or device are not those of the checkpoint."""
    assert isinstance(saved, Mapping)
    check_identity(saved, found, folder.path)


def read(loop: Loop) -> Command | None:
    """Take in all votes that came; the next command, if there is one.

    While `votes.db` cannot be read, nothing has come: the server may be about to put it right.
    """
    position, votes = loop.state.position, loop.folder.votes
    try:
        while page := votes.votes_after(position.vote_cursor, _PAGE):
            loop.state.memory.add(page)
            loop.pool.open -= {vote.offer_id for vote in page if vote.offer_id is not None}
            note_win_rates(loop, page)
            position.vote_cursor = page[-1].id
        commands = votes.commands_after(position.command_cursor, 1)
    except StoreError as error:
        loop.once.warning(f"votes cannot be read: {error}")
        return None
    return commands[0] if commands else None


def note_win_rates(loop: Loop, came: Sequence[StoredVote]) -> None:
    """Write how often versions beat the base model, for those that new votes are about."""
    position = loop.state.position
    names = {name for vote in came if vote.heldout for name in (vote.chosen.source_id, vote.rejected.source_id)}
    for row in position.versions:
        version = PolicyVersion(**row)
        found = check.win_rate(loop.state.memory.heldout.values(), version.version)
        if f"v{version.version}" not in names or version.version == 0 or found is None:
            continue
        version = replace(version, win_rate=found.share, win_rate_low=found.low, win_rate_high=found.high)
        row |= asdict(version)
        loop.folder.runs.add_version(version)


def obey(loop: Loop, command: Command) -> None:
    """Do what an admin asked for; a command that cannot be done is said and passed over."""
    loop.state.position.command_cursor = command.id
    if command.kind == "rollback" and command.argument.isdecimal():
        loop.beat("going back")
        if rollback(loop, int(command.argument), f"gone back to from version {loop.state.position.serving}"):
            return
    else:
        _log.warning("command %d is passed over: %s %r", command.id, command.kind, command.argument)
    loop.folder.save(checkpoint_of(loop))


def is_due(loop: Loop, now: float) -> bool:
    """True if enough votes came, or one waits for too long."""
    section, fresh = loop.state.cfg.live, loop.state.memory.fresh
    if len(fresh) >= section.votes_per_update:
        return True
    return bool(fresh) and now - min(vote.created_at for vote in fresh.values()) >= section.update_after_s


def needs_pairs(loop: Loop) -> bool:
    """True if raters will soon have nothing to compare."""
    return loop.is_worth_drawing and len(loop.pool.open) < loop.state.cfg.live.pool


def wait(loop: Loop) -> None:
    """A moment in which votes may come."""
    if time.monotonic() - loop.beaten_s >= _BEAT_S:
        loop.beat("waiting")
    time.sleep(loop.state.cfg.live.poll_s)


def write_version(loop: Loop, verdict: Verdict, fresh: Sequence[Comparison]) -> PolicyVersion:
    """The record of an update: a version, with its weights on disk if it passed. The position is that after it."""
    state, position = loop.state, loop.state.position
    position.newest += 1
    position.fresh = sorted(state.memory.fresh)
    path = ""
    num_votes = position.num_votes + len(fresh)
    if verdict.passes:
        figures = {"votes": num_votes, "kl_per_sequence": verdict.kl, "heldout_accuracy": verdict.accuracy}
        path = str(loop.folder.save_version(state, position.newest, figures))
        faults.reach("live/version")
    now = time.time()
    version = PolicyVersion(
        version=position.newest,
        created_at=now,
        parent=position.serving,
        path=path,
        heldout_accuracy=verdict.accuracy,
        num_votes=num_votes,
        kl=verdict.kl,
        accepted=verdict.passes,
        serving=verdict.passes,
        note=verdict.reason,
    )
    waited = [*position.unserved, *(vote.created_at for vote in fresh)]
    if verdict.passes:
        position.note_latencies(waited, now)
        position.unserved, position.serving, position.num_votes = [], version.version, num_votes
    else:
        position.unserved = waited
    position.note_version(version, state.cfg.live.keep_versions)
    return version


def announce(loop: Loop, version: PolicyVersion, drawn: Round) -> None:
    """Write a checkpoint, then the version to `runs.db`; if it is served, raters get its pairs from now on."""
    loop.folder.save(checkpoint_of(loop))
    faults.reach("live/saved")
    loop.folder.runs.add_version(version)
    if not version.serving:
        return
    loop.folder.link_final(version.version)
    loop.folder.prune(loop.state.cfg.live.keep_versions, version.version)
    offer(loop, drawn, is_new=True)


def forget(loop: Loop, drawn: Round) -> None:
    """Free log-probs of answers that no vote and none of the pairs of `drawn` is about."""
    memory = loop.state.memory
    votes = [vote for known in (memory.fresh, memory.learnt, memory.heldout) for vote in known.values()]
    waiting = [Answer(group.prompt_token_ids, one.token_ids) for group, one in drawn.answers]
    loop.state.reference_logps.forget_all_but([*waiting, *(answer for vote in votes for answer in vote.answers)])


def offer(loop: Loop, drawn: Round, *, is_new: bool) -> None:
    """Put the pairs of `drawn` before raters; if it `is_new`, what was offered before is stale."""
    position = loop.state.position
    made = pool.offers(loop.state, loop.pool, drawn, position.serving)
    loop.is_worth_drawing = bool(made)
    if not made:
        _log.warning("all answers to a prompt are alike: there is nothing to compare until the policy changes")
        return
    ids = loop.folder.runs.add_offers(made, retires_before=position.last_offer + 1 if is_new else 0)
    loop.pool.open = set(ids) if is_new else loop.pool.open | set(ids)
    position.last_offer = max(ids)


def refill(loop: Loop, *, is_new: bool = False) -> None:
    """Draw another round of pairs from the served version; if it `is_new`, what was offered before is stale."""
    loop.beat("drawing")
    loop.num_refills += 1
    with trace():
        drawn = pool.draw(loop.state, "refill", loop.start, loop.num_refills)
    offer(loop, drawn, is_new=is_new or loop.num_refills == 1)


def rollback(loop: Loop, version: int, note: str) -> bool:
    """Go back to the weights of `version` with a fresh optimizer; False if they are not kept any more."""
    state, position = loop.state, loop.state.position
    if version != 0 and version not in loop.folder.kept_versions():
        kept = ", ".join(map(str, [0, *loop.folder.kept_versions()]))
        _log.warning("cannot go back to version %d: its weights are not kept; there are %s", version, kept)
        return False
    section, path = state.cfg.model, loop.folder.version_path(version)
    if version != 0:
        section = section.model_copy(update={"name": str(path), "lora": LoraSection()})
    source = dict(load_policy(section, device=state.device).model.named_parameters())
    with torch.no_grad():
        for name, tensor in trained(state.policy.module).items():
            tensor.copy_(source[name])
    old, state.optimizer = state.optimizer, fresh_optimizer(state.cfg, state.policy)
    old.close()
    state.optimizer.weight_version = old.weight_version + 1
    position.serving, loop.known_correct = version, {}
    row = position.version(version) or PolicyVersion(version, time.time(), path=str(path) if version else "")
    row = replace(row, serving=True, accepted=True, note=note)
    position.note_version(row, state.cfg.live.keep_versions)
    loop.folder.save(checkpoint_of(loop))
    loop.folder.runs.add_version(row)
    loop.folder.link_final(version)
    refill(loop, is_new=True)
    _log.info("went back to version %d", version)
    return True


def checkpoint_of(loop: Loop) -> Checkpoint:
    """A checkpoint of the loop as it is, with the sizes of its logs."""
    found = contents(loop.state)
    return replace(found, state={**found.state, "log_sizes": loop.folder.log.log_sizes()})


def figures_of(
    loop: Loop, verdict: Verdict, drawn: Round, fresh: Sequence[Comparison], reports: Sequence[StepReport]
) -> Metrics:
    """The metrics of an update besides those of its loss.

    Raises TrainingError if too many of its optimizer steps in a row were not finite.
    """
    state, position = loop.state, loop.state.position
    limit = state.cfg.optimizer.max_refused_steps
    if reports and reports[-1].num_refused_in_row >= limit:
        raise TrainingError(
            f"{reports[-1].num_refused_in_row} optimizer steps in a row were not finite, the last in "
            f"{reports[-1].bad_part}; version {position.serving} is served as before. Start again with a lower "
            "--optimizer.learning-rate"
        )
    lengths = [len(one.token_ids) for _, one in drawn.answers]
    found: Metrics = {
        **(update_metrics(reports) if reports else {}),
        "kl": verdict.kl,
        "objective/kl_coef": state.kl.value,
        "completions/mean_length": sum(lengths) / len(lengths),
        "votes/new": float(len(fresh)),
        "votes/heldout": float(len(state.memory.heldout)),
        "votes/total": float(position.num_votes),
        "version": float(position.serving),
        "accepted": float(verdict.passes),
        "memory/rss_gb": rss_gb(),
    }
    if verdict.accuracy is not None:
        found["heldout/accuracy"] = verdict.accuracy
    if verdict.passes and fresh:
        found["votes/to_version_s"] = median(position.latencies_s[-len(fresh) :])
    return found


def record(loop: Loop, metrics: Mapping[str, float]) -> None:
    """Write the metrics of an update to `metrics.jsonl` and `runs.db`."""
    loop.folder.log.append_metrics(loop.state.position.num_updates, metrics)
    loop.folder.runs.add_metrics(loop.state.position.num_updates, metrics)


def finish(loop: Loop) -> LiveResult:
    """What the trainer came to, written to `result.json` too."""
    position = loop.state.position
    row = position.version(position.serving)
    result = LiveResult(
        serving=position.serving,
        path=row.path if row else "",
        updates=position.num_updates,
        votes=position.num_votes,
        kl_per_sequence=row.kl if row else None,
        vote_to_version_median_s=median(position.latencies_s) if position.latencies_s else None,
    )
    loop.folder.log.write_json("result.json", asdict(result))
    loop.folder.runs.end_job(loop.job, "ended")
    loop.beat("ended")
    return result
