"""Versions of the policy: the checks that an update must pass, the weights of a version, its record, and rollback."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tunesmith.base.config.algorithms.live import LiveRecipe, LiveSection
from tunesmith.base.config.sections import LoraSection
from tunesmith.base.core import faults
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.trace import span
from tunesmith.base.runs.checkpoint import Checkpoint, snapshot
from tunesmith.collect.statistics.intervals import mcnemar, proportion_interval
from tunesmith.collect.store.records import Deleted, PolicyVersion
from tunesmith.collect.store.runs import TRIED
from tunesmith.engine.models.export import ModelCard
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.lora import trained_parameters
from tunesmith.learn.live.folder import LiveFolder
from tunesmith.learn.live.vote_dpo import VoteDPO
from tunesmith.learn.live.votes import VotedPair
from tunesmith.learn.trainers import restart

_log = get_logger(__name__)

_MAX_LATENCIES = 100_000


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Accuracy on held-out votes (None without any) and nats per completion of an update; `reason` if it failed."""

    accuracy: float | None
    kl: float
    reason: str = ""

    @property
    def passes(self) -> bool:
        """True if the update may be served."""
        return not self.reason


def check(
    section: LiveSection, before: Sequence[bool], after: Sequence[bool], kl: float, not_finite: str = ""
) -> CheckResult:
    """The result of an update's checks.

    `before` and `after` say which held-out votes the served version and the updated policy agree with, `kl` is in nats
    per completion, `not_finite` names what of an optimizer step was not finite.
    """
    accuracy = sum(after) / len(after) if after else None
    if not_finite:
        return CheckResult(accuracy, kl, f"{not_finite} is not finite")
    if not math.isfinite(kl):
        return CheckResult(accuracy, kl, "the log-probs of its own completions are not finite")
    if section.kl.budget is not None and kl > section.kl.budget:
        return CheckResult(accuracy, kl, f"{kl:.2f} nats from the base model, the budget is {section.kl.budget:g}")
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    if len(after) >= section.check.min_votes and lost > won and mcnemar(lost, won) / 2 < section.check.p_value:
        reason = f"right on {sum(after)} of {len(after)} held-out votes, before on {sum(before)}"
        return CheckResult(accuracy, kl, reason)
    return CheckResult(accuracy, kl)


@dataclass(slots=True)
class Position:
    """Counters and cursors of the loop, which a checkpoint stores beside weights.

    `num_updates` includes dropped updates; `num_votes` are those that the served version was trained on. Cursors are
    ids of the newest vote, command, feedback and request that were read, `fresh`, `fresh_feedback` and
    `fresh_regenerated` ids of votes, feedback and pairs not yet trained on; `last_vote`, `last_feedback` and
    `last_request` are the largest ids that were. `unserved` are creation times of votes whose update was dropped or is
    tried; `latencies_s` are the times from vote to served version. `tried` is the version on trial, 0 without one,
    since `tried_since`.
    """

    num_updates: int = 0
    num_steps: int = 0
    serving: int = 0
    newest: int = 0
    num_votes: int = 0
    vote_cursor: int = 0
    command_cursor: int = 0
    last_offer: int = 0
    fresh: list[int] = field(default_factory=list[int])
    feedback_cursor: int = 0
    fresh_feedback: list[int] = field(default_factory=list[int])
    request_cursor: int = 0
    fresh_regenerated: list[int] = field(default_factory=list[int])
    last_vote: int = 0
    last_feedback: int = 0
    last_request: int = 0
    tried: int = 0
    tried_since: float = 0.0
    unserved: list[float] = field(default_factory=list[float])
    latencies_s: list[float] = field(default_factory=list[float])
    versions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def note_learnt(self) -> None:
        """Note as learnt what was read and does not wait for an update: ids grow, and the smallest are learnt first."""
        self.last_vote = min(self.fresh, default=self.vote_cursor + 1) - 1
        self.last_feedback = min(self.fresh_feedback, default=self.feedback_cursor + 1) - 1
        self.last_request = min(self.fresh_regenerated, default=self.request_cursor + 1) - 1

    @property
    def version(self) -> int:
        """The version whose weights the policy has: the tried one, else the served one."""
        return self.tried or self.serving


@dataclass(slots=True)
class Versions:
    """Writes versions and checkpoints of `learner` to `folder`, and goes back to them. `identity` are hashes of the
    inputs that a resumed loop must find unchanged.
    """

    cfg: LiveRecipe
    learner: VoteDPO
    folder: LiveFolder
    identity: Mapping[str, str]
    position: Position = field(default_factory=Position)

    def checkpoint(self) -> Checkpoint:
        """A checkpoint of the current state. Its tensors are not copied."""
        tensors, values = restart.contents(self.learner)
        own = {"position": asdict(self.position), "identity": dict(self.identity)}
        sizes = {"log_sizes": self.folder.files.log_sizes()}
        tensors["reference"] = self.learner.cache_tensors()
        return Checkpoint(self.position.num_updates, tensors, {**values, **own, **sizes})

    def snapshot(self) -> Checkpoint:
        """A copy of the current state."""
        with span("snapshot"):
            return snapshot(self.checkpoint())

    def load(self, found: Checkpoint) -> None:
        """Load the learner's part of a checkpoint. Raises CheckpointError if it is of another model."""
        restart.restore(self.learner, found)
        self.learner.load_cache(found.tensors["reference"])

    def take_back(self, before: Checkpoint) -> None:
        """Load a snapshot, but not its count of refused steps: too many in a row end the loop."""
        num_refused_in_row = self.learner.optimizer.num_refused_in_row
        self.load(before)
        self.learner.optimizer.num_refused_in_row = num_refused_in_row

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one, and bring logs, `runs.db` and `final` to its state.

        Raises:
            RunError: if model, prompts or device are not those of the checkpoint, or no checkpoint is whole.
        """
        found, log_sizes = self.folder.newest_checkpoint(), {}
        if found is None:
            self.remember(PolicyVersion(0, time.time(), kl=0.0, serving=True))
        else:
            saved: Any = found.state
            restart.check_identity(saved["identity"], self.identity, self.folder.path)
            self.position = Position(**saved["position"])
            if "last_vote" not in saved["position"]:  # of an earlier release
                self.position.note_learnt()
            self.load(found)
            log_sizes = saved.get("log_sizes", {})
        self.folder.files.cut_logs(log_sizes)
        for row in self.position.versions:
            self.folder.runs.add_version(PolicyVersion(**row))
        self.folder.link_final(self.position.serving)
        self.folder.announce_trial(self.position.tried, self.cfg.live.canary.share)

    def remember(self, version: PolicyVersion) -> None:
        """Store the record of a version in the position; the oldest are dropped, but not the served one or the base."""
        rows = [row for row in self.position.versions if row["version"] != version.version]
        rows = [{**row, "serving": bool(row["serving"]) and not version.serving} for row in rows] + [asdict(version)]
        newest = {row["version"] for row in rows[-self.cfg.live.keep_versions :]}
        kept = (row for row in rows if row["version"] in newest or row["serving"] or row["version"] == 0)
        self.position.versions = list(kept)

    def find(self, number: int) -> PolicyVersion | None:
        """The record of a version, or None."""
        return next((PolicyVersion(**row) for row in self.position.versions if row["version"] == number), None)

    def add(self, result: CheckResult, created_at: Sequence[float]) -> PolicyVersion:
        """The record of an update trained on votes and thumbs of these times; its weights are written if it passed."""
        position = self.position
        position.newest += 1
        path, num_votes = "", position.num_votes + len(created_at)
        if result.passes:
            path = str(self.export(position.newest, result, num_votes))
            faults.reach("live/version")
        now, is_tried = time.time(), result.passes and self.cfg.live.canary.share > 0
        parent = self.find(position.serving)
        version = PolicyVersion(
            version=position.newest,
            created_at=now,
            parent=position.serving,
            path=path,
            heldout_accuracy=result.accuracy,
            num_votes=num_votes,
            kl=result.kl,
            accepted=result.passes,
            serving=result.passes and not is_tried,
            note=result.reason,
            last_vote_id=position.last_vote,
            last_feedback_id=position.last_feedback,
            last_request_id=position.last_request,
            learnt_deleted=parent is not None and parent.learnt_deleted,
        )
        position.unserved = [*position.unserved, *created_at]
        if is_tried:
            position.tried, position.tried_since = version.version, now
        elif result.passes:
            self.count_served(version, now)
        self.remember(version)
        return version

    def count_served(self, version: PolicyVersion, now: float) -> None:
        """Note that a new version is served, and how long its votes have waited for it."""
        position = self.position
        latencies_s = [*position.latencies_s, *(now - moment for moment in position.unserved)]
        position.latencies_s, position.unserved = latencies_s[-_MAX_LATENCIES:], []
        position.serving, position.num_votes = version.version, version.num_votes

    def export(self, number: int, result: CheckResult, num_votes: int) -> Path:
        """Write the policy as version `number`, whole or not at all; returns its folder."""
        figures = {"votes": num_votes, "kl_per_sequence": result.kl, "heldout_accuracy": result.accuracy}
        card = ModelCard(
            base_model=self.cfg.model.name,
            algorithm=f"live votes ({self.cfg.live.update})",
            title=f"{self.folder.path.name}, version {number}",
            metrics=figures,
            recipe=self.cfg.model_dump(mode="json"),
        )
        return self.learner.export(self.folder.version_path(number), card)

    def publish(self, version: PolicyVersion) -> None:
        """Write a checkpoint, then the version to `runs.db`; point `final` to the served one, and tell the server which
        one is tried.
        """
        self.folder.save(self.checkpoint())
        faults.reach("live/saved")
        self.folder.runs.add_version(version)
        if version.serving:
            self.folder.link_final(version.version)
            self.folder.prune(self.cfg.live.keep_versions, version.version)
        self.folder.announce_trial(self.position.tried, self.cfg.live.canary.share)

    def note_trial(self, note: str) -> None:
        """Write what is known of the tried version to its record."""
        version = self.find(self.position.tried)
        if version is not None and version.note != note:
            version = replace(version, note=note)
            self.remember(version)
            self.folder.runs.add_version(version)

    def end_trial(self, note: str, *, is_served: bool) -> None:
        """Serve the tried version, or go back to the weights of the served one with a new optimizer."""
        position = self.position
        version = self.find(position.tried)
        assert version is not None, "the newest versions are remembered"
        version = replace(version, serving=is_served, accepted=is_served, note=note)
        position.tried = 0
        if is_served:
            self.count_served(version, time.time())
        else:
            self.load_weights(position.serving)
        self.remember(version)
        self.publish(version)

    def roll_back(self, number: int) -> bool:
        """Go back to the weights of version `number` with a new optimizer; False if they are not kept."""
        kept, position, path = self.folder.kept_versions(), self.position, self.folder.version_path(number)
        if number != 0 and number not in kept:
            known = ", ".join(map(str, [0, *kept]))
            _log.warning("cannot go back to version %d: its weights are not kept; there are %s", number, known)
            return False
        if position.tried not in (0, number):
            self.note_trial(f"{TRIED}some conversations, not decided: the trainer went back to version {number}")
        self.load_weights(number)
        known = self.find(number) or self.folder.runs.version(number)
        found = known or PolicyVersion(number, time.time(), path=str(path) if number else "")
        is_tried = number != 0 and position.tried == number
        from_where = f"went back to version {number} from version {position.version}"
        note = "an admin ended its trial" if is_tried else from_where
        version = replace(found, serving=True, accepted=True, note=note)
        position.serving, position.num_votes, position.tried = number, version.num_votes, 0
        self.remember(version)
        self.folder.save(self.checkpoint())
        self.folder.runs.add_version(version)
        self.folder.link_final(number)
        self.folder.announce_trial(0, 0.0)
        return True

    def mark_learnt(self, deleted: Deleted) -> None:
        """Note in the records of versions, and beside their weights, that they learnt from data that was deleted."""
        marked = self.folder.runs.mark_learnt(deleted)
        for row in self.position.versions:
            row["learnt_deleted"] = bool(row.get("learnt_deleted")) or row["version"] in marked
        for number in set(marked) & set(self.folder.kept_versions()):
            self.folder.note_deleted(number)

    def load_weights(self, number: int) -> None:
        """Give the policy the weights of version `number`, which are kept, and a new optimizer."""
        section = self.cfg.model
        if number != 0:
            name = str(self.folder.version_path(number))
            section = section.model_copy(update={"name": name, "lora": LoraSection()})
        module = self.learner.policy.module
        source = dict(load_policy(section, device=module.device).model.named_parameters())
        with torch.no_grad():
            for name, parameter in trained_parameters(module).items():
                parameter.copy_(source[name])
        self.learner.reset_optimizer(self.cfg.optimizer)

    def update_win_rates(self, sources: Iterable[str], heldout: Sequence[VotedPair]) -> None:
        """Write the win rate against the base model of each version among `sources` (`v12`), from all held-out votes:
        the share that prefers its answer, ties half, with a 95 % interval.
        """
        names = set(sources) - {"v0"}
        for row in self.position.versions:
            name = f"v{row['version']}"
            votes = [vote for vote in heldout if set(vote.sources) == {"v0", name}] if name in names else []
            if not votes:
                continue
            wins = [0.5 if vote.tie else float(vote.sources[0] == name) for vote in votes]
            low, high = proportion_interval(wins, [str(vote.prompt.content) for vote in votes])
            row |= {"win_rate": sum(wins) / len(wins), "win_rate_low": low, "win_rate_high": high}
            self.folder.runs.add_version(PolicyVersion(**row))
