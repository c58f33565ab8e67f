"""Records that the store takes and returns. Times are seconds since the epoch (UTC); ids grow, none is used twice."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, get_args

from tunesmith.base.schema.records import Text

Verdict = Literal["left_much", "left", "tie", "right", "right_much", "both_bad", "skip"]
"""A rater's judgement of two answers, by the side on which they were shown."""

StoredVerdict = Verdict | Literal["withdrawn"]
"""A verdict, or `withdrawn`: the earlier vote was undone."""

PreferenceName = Literal["much_better", "better", "tie", "both_bad"]
"""A verdict without its side."""

Side = Literal["left", "right"]
"""The side on which an answer was shown."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
PREFERENCE_NAMES: tuple[PreferenceName, ...] = get_args(PreferenceName)

ItemKind = Literal["pair", "ranking"]
AnswerStyle = Literal["raw", "markdown"]
Role = Literal["rater", "admin"]
CommandKind = Literal["rollback", "forget"]
Scope = Literal["generate", "feedback", "admin"]
"""A permission of a key of the API: to ask models, to rate answers, or everything, such as making keys."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

MODEL_SOURCE = "model "
"""Prefix of the source of an answer by a model that is no version of the live loop."""

EDITED = "edited by a person"
"""Source of an answer that a demonstration brought."""

MARGIN_MUCH = 2.0
"""Margin of a vote that calls one answer much better."""

MARGIN_BETTER = 1.0
"""Margin of a vote that calls one answer better."""


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    """Settings of a campaign.

    `overlap` raters vote on each item. A presentation is leased to its rater for `lease_s`; a vote can be changed for
    `undo_s`, with 0 at any time. `gold_share` is the share of presentations with a known answer. `max_votes_per_rater`
    0: no limit.
    """

    name: str = "default"
    guidelines: str = ""
    kind: ItemKind = "pair"
    overlap: int = 1
    lease_s: float = 600.0
    undo_s: float = 0.0
    max_votes_per_rater: int = 0
    gold_share: float = 0.0
    answer_style: AnswerStyle = "markdown"


@dataclass(frozen=True, slots=True)
class Campaign:
    """A stored campaign. `closed_at` is None while it asks for votes."""

    id: int
    settings: CampaignSettings
    created_at: float
    closed_at: float | None = None


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Permissions of a key of the API, and its limits; None for none. A day is one of UTC."""

    scopes: tuple[Scope, ...]
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class Rater:
    """A person or program that votes. `expires_at` and `disabled_at` are None where access does not end. `scopes`, None
    for people, who use the pages, and the limits are those of `KeySettings`. Votes of a machine are no person's.
    """

    id: int
    name: str
    role: Role
    invited_by: int | None
    created_at: float
    expires_at: float | None = None
    disabled_at: float | None = None
    scopes: tuple[Scope, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    is_machine: bool = False

    @property
    def is_admin(self) -> bool:
        """True for those who may invite raters and roll versions back."""
        return self.role == "admin"

    @property
    def is_disabled(self) -> bool:
        """True if an admin has ended their access."""
        return self.disabled_at is not None

    def has_access(self, now: float) -> bool:
        """True if their access is neither disabled nor expired."""
        return not self.is_disabled and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class NewRater:
    """A rater and their access token, of which the store keeps only the SHA-256."""

    rater: Rater
    token: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer to a prompt, with token ids and log-probs if a model generated it here.

    `source_id` names its origin (a version, a file), which is hidden from raters.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logps: tuple[float, ...] | None = None
    weight_version: int | None = None
    source_id: str = ""


@dataclass(frozen=True, slots=True)
class NewItem:
    """A prompt with two or more answers to judge.

    `gold` is the index of the answer known to be the best, which makes the item a hidden check of the raters.
    `offer_id` is the id of the trainer's offer that it was made from, `selection` why that was made.
    """

    prompt: Text
    candidates: tuple[Candidate, ...]
    kind: ItemKind = "pair"
    gold: int | None = None
    heldout: bool = False
    offer_id: int | None = None
    selection: str = ""


@dataclass(frozen=True, slots=True)
class Presentation:
    """An item as one rater sees it: answers from left to right, in the order that the store drew and recorded.

    It does not reveal where the answers come from. `token` identifies it in later calls; until it is answered, its
    rater gets the same presentation in the same order. `num_revisions` > 0: a vote on it was undone.
    """

    token: str
    campaign_id: int
    kind: ItemKind
    prompt: Text
    answers: tuple[str, ...]
    answer_style: AnswerStyle
    shown_at: float
    lease_until: float
    num_revisions: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """A rater's answer to what they were shown: a verdict with its reason, and a better answer if they wrote one.

    The verdict of a ranking is `ranked`, and `ranks[i]` the rank of the i-th answer shown.
    """

    shown: Presentation
    verdict: str
    ranks: tuple[int, ...]
    reason: str
    written: str
    answered_at: float


@dataclass(frozen=True, slots=True)
class VoteReceipt:
    """Proof that a vote is on disk. `verdict` is `ranked` for a ranking and `written` for a written answer.
    `is_repeat`: it was stored before (a retry, a double click). It can be changed until `undo_until`, with None at any
    time.
    """

    id: int
    token: str
    revision: int
    verdict: str
    created_at: float
    undo_until: float | None
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a rater and a campaign. `num_left` items are open to this rater, held ones included, gold excluded;
    `max_votes` 0 means no limit.
    """

    num_votes: int
    num_left: int
    num_items: int
    num_items_done: int
    max_votes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The effective answer to one presentation, and what it belongs to.

    A `revision` above 1 replaces every earlier one of the same `presentation_id`.
    """

    id: int
    presentation_id: int
    item_id: int
    campaign_id: int
    rater_id: int
    rater: str
    prompt: Text
    heldout: bool
    created_at: float
    revision: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVote(Stored):
    """The effective vote of one presentation.

    `chosen` and `rejected` follow the verdict; for `tie`, `both_bad`, `skip` and `withdrawn` they are the left and the
    right answer, and `margin` is 0. `withdrawn` only cancels the earlier vote. `chosen_side` is None for an imported
    vote of which nobody recorded the sides. `selection` is why the pair was asked: `random`, or the method that chose
    it with the value that it saw; empty if nothing was chosen.
    """

    verdict: StoredVerdict
    margin: float
    chosen: Candidate
    rejected: Candidate
    is_gold: bool
    offer_id: int | None
    dwell_ms: int | None = None
    reason: str = ""
    chosen_side: Side | None = None
    selection: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRanking(Stored):
    """The effective ranking of one presentation: `ranks[i]` is the rank of `candidates[i]`, 1 the best.

    `ranks` is empty if it was withdrawn or skipped.
    """

    candidates: tuple[Candidate, ...]
    ranks: tuple[int, ...]
    is_gold: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDemonstration(Stored):
    """The effective answer that a rater wrote to a prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer of the endpoint, with the version that gave it if its model is one of a live loop.

    `logps` are of `token_ids` under the model at the temperature that was sampled with, `drawn_logps` under the
    distribution that was sampled. `message` has calls of tools, if there were tools. `source_id` names the model.
    """

    text: str
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    drawn_logps: tuple[float, ...]
    finish_reason: str
    weight_version: int | None = None
    source_id: str = ""
    message: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """A request of the endpoint and its answers. `name` is the id that the client got, `rater_id` the key that asked.

    `prompt` is what the model read. `user` and `episode` are what the key's owner calls the person who asked, and the
    conversation. `options` are the sampling parameters, `tools` if there were any, and of a response that another one
    can go on from the `conversation`, messages as they were sent. `id` counts what is stored.
    """

    name: str
    rater_id: int
    model: str
    prompt: Text
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    options: Mapping[str, Any]
    user: str = ""
    episode: str = ""
    created_at: float = 0.0
    id: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """An application's judgement of an answer (`inference`, a name, and `choice`) or of a conversation (`episode`).

    The `value` of the metric `comment` and of `demonstration`, a better answer, is a text; that of `preference` says
    which choices are better (`Preference`), and that of every other metric is a number, or a boolean for a thumb.
    None withdraws what was said before.
    """

    metric: str
    value: bool | float | str | Mapping[str, Any] | None
    inference: str = ""
    choice: int = 0
    episode: str = ""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFeedback(Feedback):
    """Feedback in the store: `name` is the id that the client got; a higher `revision` replaces a lower one.

    It was said by the key `key_id`, for its `user`; `rater_id` is whose vote it is.
    """

    id: int
    name: str
    key_id: int
    user: str
    rater_id: int
    revision: int
    created_at: float
    is_repeat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer:
    """A rater's last word on an answer, as `Feedback` has it; `source_id` names the model or version. On a whole
    conversation, what an answer has is None.
    """

    id: int
    prompt: Text | None
    answer: str | None
    metric: str
    value: bool | float | str
    rater: str
    source_id: str | None
    inference: str | None
    choice: int | None
    episode: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Command:
    """A request to the trainer; `argument` of a `rollback` is the version that an admin wants to go back to.

    `forget`: the data of `rater_id` was deleted. `argument` is a `Deleted` in JSON.
    """

    id: int
    kind: CommandKind
    argument: str
    rater_id: int
    created_at: float


@dataclass(frozen=True, slots=True)
class Deleted:
    """Data that was deleted: the smallest ids of a vote, of feedback and of a request that trainers may have learnt
    from, None if there was none, and the earliest time of a vote or feedback.
    """

    vote_id: int | None = None
    feedback_id: int | None = None
    request_id: int | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody whose data is exported or deleted. `rater_id` is whose votes and feedback are theirs, 0 if they gave
    none. The answers of the API that are theirs are those that the key `key_id` asked for `user`, "" for itself.
    """

    rater_id: int
    key_id: int
    user: str = ""

    @property
    def as_detail(self) -> dict[str, int]:
        """Who it is, for the audit log, without a name."""
        return {"id": self.rater_id} if self.rater_id else {"key_id": self.key_id}


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log: who did what, `about` whom. `rater_id` is None for the server itself, and for a
    command on its machine. `who` and `about` are the names that raters and keys have now.
    """

    id: int
    created_at: float
    rater_id: int | None
    who: str
    kind: str
    about: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NewOffer:
    """Answers of one policy version to one prompt, offered to raters. `selection`: the method that chose the pair, and
    what it expected; `random` for a pair without any choice.
    """

    version: int
    prompt: Text
    candidates: tuple[Candidate, ...]
    heldout: bool = False
    selection: str = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(NewOffer):
    """An offer in `runs.db`. Offers with an id below `retires_before` are stale and need no votes."""

    id: int
    created_at: float
    retires_before: int = 0


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version of the policy and its evaluation. `accepted` is False if a check rejected it; at most one `serving`.

    No vote, feedback and request with a larger id than `last_vote_id`, `last_feedback_id` and `last_request_id` was
    learnt from, None if that is not known. `learnt_deleted`: data that was deleted since was among what it, or a
    version before it, learnt from.
    """

    version: int
    created_at: float
    parent: int | None = None
    path: str = ""
    heldout_accuracy: float | None = None
    win_rate: float | None = None
    win_rate_low: float | None = None
    win_rate_high: float | None = None
    num_votes: int = 0
    kl: float | None = None
    accepted: bool = True
    serving: bool = False
    note: str = ""
    last_vote_id: int | None = None
    last_feedback_id: int | None = None
    last_request_id: int | None = None
    learnt_deleted: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of one step. `value` is None where it was not finite."""

    id: int
    step: int
    time: float
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one metric in order. `num_points` exist, `points` may be fewer (minimum and maximum of each bucket).
    `last_id` is the cursor for the next call; `is_sampled`: points were left out.
    """

    name: str
    points: tuple[Metric, ...]
    last_id: int
    num_points: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The trainer's last heartbeat."""

    pid: int
    host: str
    time: float
    state: str


@dataclass(frozen=True, slots=True)
class ExportRow:
    """A vote in TRL's columns. A conversational prompt has conversational answers, else all are text.

    With `tie`, also set for the `verdict` `both_bad`, the order of the two has no meaning: `chosen` is the left one.
    `chosen_side` is where `chosen` was shown, None if nobody recorded it, `selection` why the pair was asked.
    """

    prompt: Text
    chosen: Text
    rejected: Text
    margin: float
    tie: bool
    verdict: PreferenceName
    rater: str
    heldout: bool
    created_at: float
    dwell_ms: int | None
    reason: str
    vote_id: int
    prompt_id: str
    chosen_version: int | None
    rejected_version: int | None
    chosen_side: Side | None = None
    selection: str = ""


@dataclass(frozen=True, slots=True)
class GivenVote:
    """A vote of a person or `machine` that was made elsewhere. `item` is a pair; `better` is the index (0 or 1) of its
    better answer, without meaning for a tie or two bad ones, `left` that of the one shown on the left, None if unknown.
    """

    item: NewItem
    verdict: PreferenceName
    better: int
    rater: str
    created_at: float | None = None
    dwell_ms: int | None = None
    reason: str = ""
    left: int | None = None
    machine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFeedback:
    """Feedback from another tool on an answer that was given there. `metric` and `value` are as in `Feedback`.

    `application` gave the answer and is who asked, `answer_id` is its own id of it, and `rater` who said what. `id`
    tells this feedback from others of the application: an import of the same id adds nothing.
    """

    id: str
    application: str
    answer_id: str
    prompt: Text
    answer: str
    metric: str
    value: bool | float | str
    rater: str
    model: str = ""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    created_at: float | None = None


Given = NewItem | GivenVote | GivenFeedback
"""A row of an import: an item to judge, a vote, which brings its item, or feedback, which brings its answer."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Numbers of items or votes that an import added, and that existed already; of items that existed and are gold or
    held out from now on; of votes left out because the same rater has said otherwise of the same pair; and of feedback
    added, and that existed already.
    """

    num_new: int = 0
    num_there: int = 0
    num_changed: int = 0
    num_other: int = 0
    num_feedback: int = 0
    num_feedback_there: int = 0

    def __add__(self, other: "Imported") -> "Imported":
        mine, theirs = astuple(self), astuple(other)
        return Imported(*(one + another for one, another in zip(mine, theirs, strict=True)))
