"""What the store takes and gives. Times are seconds since the epoch (UTC), ids grow and never come back."""

from dataclasses import dataclass
from typing import Literal

from tunesmith.schema.records import Text

Verdict = Literal["left_much", "left", "tie", "right", "right_much", "both_bad", "skip"]
"""What a rater says of two answers, by the side on which they stood."""

StoredVerdict = Literal["left_much", "left", "tie", "right", "right_much", "both_bad", "skip", "withdrawn"]
"""A verdict, or `withdrawn`: the vote before it was undone."""

PreferenceName = Literal["much_better", "better", "tie", "both_bad"]
"""A verdict without its side."""

VERDICTS: tuple[Verdict, ...] = ("left_much", "left", "tie", "right", "right_much", "both_bad", "skip")

ItemKind = Literal["pair", "ranking"]
AnswerStyle = Literal["raw", "markdown"]
Role = Literal["rater", "admin"]
CommandKind = Literal["rollback"]

MARGIN_MUCH = 2.0
"""Margin of a vote that calls one answer much better."""

MARGIN_BETTER = 1.0
"""Margin of a vote that calls one answer better."""


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    """How a campaign asks for votes.

    `overlap` raters vote on each item. A presentation is kept for its rater for `lease_s`; a vote can be undone for
    `undo_s`. `gold_share` of what a rater sees are items with a known answer. `max_votes_per_rater` 0: no limit.
    """

    name: str = "default"
    guidelines: str = ""
    kind: ItemKind = "pair"
    overlap: int = 1
    lease_s: float = 600.0
    undo_s: float = 300.0
    max_votes_per_rater: int = 0
    gold_share: float = 0.0
    answer_style: AnswerStyle = "markdown"


@dataclass(frozen=True, slots=True)
class Campaign:
    """A campaign in the store. `closed_at` is None while it asks for votes."""

    id: int
    settings: CampaignSettings
    created_at: float
    closed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Rater:
    """A person (or program) who votes. `expires_at` and `disabled_at` are None where access does not end."""

    id: int
    name: str
    role: Role
    invited_by: int | None
    created_at: float
    expires_at: float | None = None
    disabled_at: float | None = None


@dataclass(frozen=True, slots=True)
class NewRater:
    """A rater and the token that lets them in. The token is shown this once; the store keeps its SHA-256."""

    rater: Rater
    token: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer to a prompt, with its tokens and the log-prob of each where a model of ours wrote it.

    `source_id` names who wrote it (a version, a file), which raters never see.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logps: tuple[float, ...] | None = None
    weight_version: int | None = None
    source_id: str = ""


@dataclass(frozen=True, slots=True)
class NewItem:
    """A prompt with two or more answers to be judged.

    `gold` is the place (0-based) of the answer that is known to be the best, which makes the item a silent check of
    the raters. `offer_id` is the id of the trainer's offer it came from.
    """

    prompt: Text
    candidates: tuple[Candidate, ...]
    kind: ItemKind = "pair"
    gold: int | None = None
    heldout: bool = False
    offer_id: int | None = None


@dataclass(frozen=True, slots=True)
class Presentation:
    """What one rater is shown: answers from left to right, in the order that the store drew and recorded.

    It says nothing about where the answers come from. `token` names it in every later call; a rater who asks again gets
    the same presentation, in the same order, until it is answered. `num_revisions` > 0: a vote on it was undone.
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
class VoteReceipt:
    """Proof that a vote is on disk. `verdict` is `ranked` for a ranking and `written` for a written answer.

    `is_repeat`: it was there before (a retry, a double click). It can be undone or changed until `undo_until`.
    """

    id: int
    token: str
    revision: int
    verdict: str
    created_at: float
    undo_until: float
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rater and the campaign are. `num_left` items wait for this rater (held ones count, gold does not)."""

    num_votes: int
    num_left: int
    num_items: int
    num_items_done: int
    max_votes: int


@dataclass(frozen=True, slots=True)
class StoredVote:
    """The effective vote of one presentation.

    `chosen` and `rejected` follow the verdict; of `tie`, `both_bad`, `skip` and `withdrawn` they are the left and the
    right answer, and `margin` is 0. A `revision` above 1 takes the place of every earlier vote of its
    `presentation_id`: forget that one (and, if the verdict is `withdrawn`, learn nothing instead).
    """

    id: int
    presentation_id: int
    item_id: int
    campaign_id: int
    rater_id: int
    rater: str
    verdict: StoredVerdict
    margin: float
    prompt: Text
    chosen: Candidate
    rejected: Candidate
    heldout: bool
    is_gold: bool
    offer_id: int | None
    created_at: float
    dwell_ms: int | None = None
    reason: str = ""
    revision: int = 1


@dataclass(frozen=True, slots=True)
class StoredRanking:
    """The effective ranking of one presentation: `ranks[i]` is the place of `candidates[i]`, 1 the best.

    `ranks` is empty if it was withdrawn or skipped; a higher `revision` takes the place of every lower one.
    """

    id: int
    presentation_id: int
    item_id: int
    campaign_id: int
    rater_id: int
    rater: str
    prompt: Text
    candidates: tuple[Candidate, ...]
    ranks: tuple[int, ...]
    heldout: bool
    is_gold: bool
    created_at: float
    revision: int = 1


@dataclass(frozen=True, slots=True)
class StoredDemonstration:
    """The effective answer that a rater wrote to a prompt."""

    id: int
    presentation_id: int
    item_id: int
    campaign_id: int
    rater_id: int
    rater: str
    prompt: Text
    text: str
    heldout: bool
    created_at: float
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Command:
    """Something that an admin asks of the trainer; `argument` of a `rollback` is the version to go back to."""

    id: int
    kind: CommandKind
    argument: str
    rater_id: int
    created_at: float


@dataclass(frozen=True, slots=True)
class NewOffer:
    """Answers of one policy version to one prompt, offered to raters."""

    version: int
    prompt: Text
    candidates: tuple[Candidate, ...]
    heldout: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer in `runs.db`. Offers with an id below `retires_before` are stale: nobody needs to be asked any more."""

    id: int
    version: int
    prompt: Text
    candidates: tuple[Candidate, ...]
    heldout: bool
    created_at: float
    retires_before: int = 0


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A version of the policy and how it did. `accepted` is False if a check turned it down; at most one `serving`."""

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


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of one step. `value` is None where it was not finite."""

    id: int
    step: int
    time: float
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one metric in order. `num_points` were found, `points` may be fewer (buckets give lowest and highest).

    `last_id` is the cursor for the next call; `is_sampled` says that points were left out.
    """

    name: str
    points: tuple[Metric, ...]
    last_id: int
    num_points: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The trainer's last sign of life."""

    pid: int
    host: str
    time: float
    state: str


@dataclass(frozen=True, slots=True)
class ExportRow:
    """A vote in TRL's columns. A conversational prompt has conversational answers, else all are text.

    With `tie`, which a `verdict` of `both_bad` sets too, the order of the two has no meaning: `chosen` stood on the
    left.
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


@dataclass(frozen=True, slots=True)
class GivenVote:
    """A vote that was made elsewhere. `item` is a pair; `better` is the place (0 or 1) of its better answer, which of
    a tie or two bad ones has no meaning.
    """

    item: NewItem
    verdict: PreferenceName
    better: int
    rater: str
    created_at: float | None = None
    dwell_ms: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did: rows that were added, and rows that were there already."""

    num_new: int
    num_there: int
