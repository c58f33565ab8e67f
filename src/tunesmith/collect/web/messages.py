"""JSON of requests and replies. Unknown keys of a request are errors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tunesmith.base.schema.records import Text
from tunesmith.collect.store.records import Answered, ItemKind, Presentation, Progress, Role, Scope, Verdict
from tunesmith.collect.web.markdown import safe_html

if TYPE_CHECKING:
    from tunesmith.collect.statistics.rater_report import CrowdReport, RaterReport

MAX_PREFETCH = 20
MAX_REASON = 2_000
MAX_ANSWERS = 16
MAX_WRITTEN = 200_000
"""Characters of a written answer."""

_DAY_MS = 24 * 3600 * 1000

Token = Annotated[str, Field(min_length=1, max_length=200)]
Dwell = Annotated[int, Field(ge=0, le=_DAY_MS, description="Milliseconds for which the answers were visible.")]


class Request(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    """Base of replies."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class SessionRequest(Request):
    """A login by a personal token or a one-time link."""

    token: Token


class JoinRequest(Request):
    """Acceptance of an invitation, whose token is void afterwards."""

    token: Token
    name: Annotated[str, Field(max_length=80)] | None = None


class SessionReply(Reply):
    """The logged-in rater."""

    name: str
    role: Role


class JoinReply(SessionReply):
    """The new rater and their personal token, which is not stored."""

    token: str


class VoteRequest(Request):
    """A verdict, by the side on which the answers were shown."""

    verdict: Verdict
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    dwell_ms: Dwell | None = None


class RankingRequest(Request):
    """`ranks[i]` is the rank of the i-th answer shown: 1 is the best, equal ranks are ties."""

    ranks: Annotated[list[Annotated[int, Field(ge=1, le=MAX_ANSWERS)]], Field(min_length=2, max_length=MAX_ANSWERS)]
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    dwell_ms: Dwell | None = None


class DemonstrationRequest(Request):
    """A better answer, written by the rater."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_WRITTEN)]


class PassageReply(Reply):
    """A text, and safe HTML if it is not shown as it was typed. `role` is set on turns of a conversation."""

    text: str
    html: str | None = None
    role: str | None = None


class PresentationReply(Reply):
    """A prompt with its answers from left to right, without their origin (blind)."""

    token: str
    kind: ItemKind
    prompt: Sequence[PassageReply]
    answers: Sequence[PassageReply]
    lease_until: float
    num_revisions: int

    @classmethod
    def of(cls, shown: Presentation) -> "PresentationReply":
        """The presentation with its texts rendered."""
        is_markdown = shown.answer_style == "markdown"
        return cls(
            token=shown.token,
            kind=shown.kind,
            prompt=passages(shown.prompt, is_markdown=is_markdown),
            answers=[_passage(answer, is_markdown=is_markdown) for answer in shown.answers],
            lease_until=shown.lease_until,
            num_revisions=shown.num_revisions,
        )


class AnsweredReply(Reply):
    """The rater's answer to a presentation. `ranks`, of a ranking alone, are from left to right; `written` is the
    better answer that they wrote.
    """

    presentation: PresentationReply
    verdict: str
    ranks: Sequence[int]
    reason: str
    written: str
    answered_at: float

    @classmethod
    def of(cls, said: Answered) -> "AnsweredReply":
        """The judgement with its texts rendered."""
        return cls(
            presentation=PresentationReply.of(said.shown),
            verdict=said.verdict,
            ranks=said.ranks,
            reason=said.reason,
            written=said.written,
            answered_at=said.answered_at,
        )


class NextReply(Reply):
    """Presentations to judge, in order, and the progress."""

    presentations: Sequence[PresentationReply]
    progress: Progress


class GuidelinesReply(Reply):
    """The campaign's guidelines."""

    text: str
    html: str


class RaterRequest(Request):
    """An invitation, which expires after `invite_days`."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    role: Role = "rater"
    invite_days: Annotated[float, Field(gt=0, le=365)] = 7.0


class RaterReply(Reply):
    """A rater, for admins. `scopes` is None but for keys; `user_of` is the id of the key that a user belongs to, whose
    access is that of the key. `is_machine`: a judge.
    """

    id: int
    name: str
    role: Role
    created_at: float
    expires_at: float | None
    is_disabled: bool
    scopes: tuple[Scope, ...] | None = None
    user_of: int | None = None
    is_machine: bool = False


class OwnReply(Reply):
    """What the caller's votes say of them: in sentences, and as figures, None without votes."""

    words: Sequence[str]
    report: Mapping[str, Any] | None

    @classmethod
    def of(cls, report: "RaterReport | None") -> "OwnReply":
        """What the report says."""
        from tunesmith.collect.statistics.rater_words import own_words  # numpy takes 0.1 s to load

        return cls(words=own_words(report), report=None if report is None else report.figures())


class CrowdReply(Reply):
    """The raters of the newest votes, with figures and `notes` of each, the number of votes that prefer an answer, and
    how many votes without an error would say as much: None where too few can be compared.
    """

    num_votes: int
    effective: float | None
    raters: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, crowd: "CrowdReport") -> "CrowdReply":
        """What the report says."""
        from tunesmith.collect.statistics.rater_words import notes

        raters = [{**one.figures(), "notes": notes(one)} for one in crowd.raters.values()]
        return cls(num_votes=crowd.num_votes, effective=crowd.effective, raters=raters)


class InviteReply(Reply):
    """A new rater. `token` logs them in; `link`, opened in a browser, exchanges it for a new token, once."""

    rater: RaterReply
    token: str
    link: str


class CommandReply(Reply):
    """A command for the trainer; ids grow."""

    id: int


def passages(content: Text, *, is_markdown: bool) -> list[PassageReply]:
    """A prompt as passages: one for plain text, one per turn for a conversation."""
    if isinstance(content, str):
        return [_passage(content, is_markdown=is_markdown)]
    return [_passage(turn["content"], turn["role"], is_markdown=is_markdown) for turn in content]


def _passage(text: str, role: str | None = None, *, is_markdown: bool) -> PassageReply:
    return PassageReply(text=text, html=safe_html(text) if is_markdown else None, role=role)
