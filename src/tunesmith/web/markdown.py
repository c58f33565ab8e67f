"""Markdown of models and raters as HTML that can do nothing: no raw HTML, no images, no scripts, no styles."""

from collections.abc import Sequence

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token

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


def _lower_headings(tokens: Sequence[Token]) -> None:
    """Headings of an answer become paragraphs that look like them: the headings of the page are its own."""
    for token in tokens:
        if token.type == "heading_open":
            token.attrSet("class", token.tag)
        if token.type in ("heading_open", "heading_close"):
            token.tag = "p"
