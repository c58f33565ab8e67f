"""The JSON that goes over the wire. Unknown keys of a request are errors."""

from collections.abc import Sequence
from typing import Annotated

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token as MarkdownToken
from pydantic import BaseModel, ConfigDict, Field

from tunesmith.schema.records import Text
from tunesmith.store.records import ItemKind, Presentation, Progress, Rater, Role, Verdict, VoteReceipt

MAX_CHARACTERS = 50_000
"""Longer texts are shown as they are: rendering them would hold up the others."""

_TAGS = frozenset(
    "p br strong em del s code pre blockquote ul ol li hr table thead tbody tr th td a".split()  # noqa: SIM905
)
_LEVELS = {f"h{level}" for level in range(1, 7)}


def safe_html(text: str) -> str | None:
    """`text` rendered as Markdown and cleaned; None where it is too long to be rendered."""
    if len(text) > MAX_CHARACTERS:
        return None
    parser = _parser()
    tokens = parser.parse(text)
    _lower_headings(tokens)
    return nh3.clean(
        parser.renderer.render(tokens, parser.options, {}),
        tags=_TAGS,
        attributes={"*": set[str](), "a": {"href"}, "ol": {"start"}},
        allowed_classes={"p": _LEVELS},
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
        link_rel="noopener noreferrer nofollow",
    )


def _parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough; what would load something or is raw HTML stays text."""
    parser = MarkdownIt("commonmark", {"html": False, "linkify": False, "typographer": False})
    return parser.enable(["table", "strikethrough"]).disable(["image", "html_block", "html_inline"])


def _lower_headings(tokens: Sequence[MarkdownToken]) -> None:
    """Headings of an answer become paragraphs that look like them: the headings of the page are its own."""
    for token in tokens:
        if token.type == "heading_open":
            token.attrSet("class", token.tag)
        if token.type in ("heading_open", "heading_close"):
            token.tag = "p"


MAX_PREFETCH = 20
MAX_REASON = 2_000
MAX_ANSWERS = 16
MAX_WRITTEN = 200_000
"""Characters of a written answer."""

_DAY_MS = 24 * 3600 * 1000

Token = Annotated[str, Field(min_length=1, max_length=200)]
Dwell = Annotated[int, Field(ge=0, le=_DAY_MS, description="Milliseconds for which the answers were seen.")]


class Request(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    """What the server answers."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class SessionRequest(Request):
    """Log in: by a personal token, or by a link that works once."""

    token: Token


class JoinRequest(Request):
    """Take an invitation: its token is void afterwards."""

    token: Token
    name: Annotated[str, Field(max_length=80)] | None = None


class SessionReply(Reply):
    """Who is logged in."""

    name: str
    role: Role


class JoinReply(SessionReply):
    """Who joined, and the personal token that logs them in elsewhere. It is shown this once."""

    token: str


class VoteRequest(Request):
    """A verdict, by the side on which the answers stood."""

    verdict: Verdict
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    dwell_ms: Dwell | None = None


class RankingRequest(Request):
    """`ranks[i]` is the place of the i-th answer shown: 1 is the best, equal places are ties."""

    ranks: Annotated[list[Annotated[int, Field(ge=1, le=MAX_ANSWERS)]], Field(min_length=2, max_length=MAX_ANSWERS)]
    dwell_ms: Dwell | None = None


class DemonstrationRequest(Request):
    """A better answer, in the rater's own words."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_WRITTEN)]


class ReceiptReply(Reply):
    """Proof that something is on disk. It can be changed or undone until `undo_until` (seconds since the epoch)."""

    token: str
    revision: int
    verdict: str
    created_at: float
    undo_until: float
    is_repeat: bool

    @classmethod
    def of(cls, receipt: VoteReceipt) -> "ReceiptReply":
        """The receipt without the database's id."""
        return cls.model_validate(receipt)


class PassageReply(Reply):
    """A text as it is, and as safe HTML where the campaign shows Markdown. `role` is set on turns of a conversation."""

    text: str
    html: str | None = None
    role: str | None = None


class PresentationReply(Reply):
    """A prompt with its answers from left to right. Nothing in it says where an answer comes from."""

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
            answers=[
                PassageReply(text=answer, html=safe_html(answer) if is_markdown else None) for answer in shown.answers
            ],
            lease_until=shown.lease_until,
            num_revisions=shown.num_revisions,
        )


class ProgressReply(Reply):
    """How far the rater and the campaign are; `max_votes` 0 means no limit."""

    num_votes: int
    num_left: int
    num_items: int
    num_items_done: int
    max_votes: int

    @classmethod
    def of(cls, progress: Progress) -> "ProgressReply":
        """The store's record."""
        return cls.model_validate(progress)


class NextReply(Reply):
    """What to judge next, the first one first, and the progress."""

    presentations: Sequence[PresentationReply]
    progress: ProgressReply


class GuidelinesReply(Reply):
    """What raters should look for."""

    text: str
    html: str


class RaterRequest(Request):
    """Invite somebody. The invitation ends after `invite_days` if nobody took it."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    role: Role = "rater"
    invite_days: Annotated[float, Field(gt=0, le=365)] = 7.0


class RaterReply(Reply):
    """A rater, as admins see them."""

    id: int
    name: str
    role: Role
    created_at: float
    expires_at: float | None
    is_disabled: bool

    @classmethod
    def of(cls, rater: Rater) -> "RaterReply":
        """The store's record."""
        return cls(
            id=rater.id,
            name=rater.name,
            role=rater.role,
            created_at=rater.created_at,
            expires_at=rater.expires_at,
            is_disabled=rater.disabled_at is not None,
        )


class InviteReply(Reply):
    """A new rater. `token` logs them in as it is; `link`, opened by a person, exchanges it for a new one, once."""

    rater: RaterReply
    token: str
    link: str


class CommandReply(Reply):
    """A command that the trainer will read; `id` counts up."""

    id: int


def passages(content: Text, *, is_markdown: bool) -> list[PassageReply]:
    """A prompt as passages: one of a plain text, or one for each turn of a conversation."""
    if isinstance(content, str):
        return [PassageReply(text=content, html=safe_html(content) if is_markdown else None)]
    return [
        PassageReply(text=turn["content"], html=safe_html(turn["content"]) if is_markdown else None, role=turn["role"])
        for turn in content
    ]
