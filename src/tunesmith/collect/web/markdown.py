"""Text of models as safe HTML that shows all of it: Markdown and formulas are rendered where nothing gets lost by it,
and everything else is shown as it was typed.

Marks whose meaning is only a style vanish into it (`**`, backticks, the lines of a table); marks that may be meant as
they stand stay in sight: `#`, `>`, `-`, `1)`, `*`, `_`, backslashes, entities, tags, link definitions, line ends.
"""

import html as html_text
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache

import nh3
from markdown_it import MarkdownIt
from markdown_it.parser_block import ParserBlock
from markdown_it.parser_inline import ParserInline
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock, fence, heading, hr, table
from markdown_it.rules_inline import StateInline, link
from markdown_it.rules_inline.state_inline import Scanned
from markdown_it.token import Token
from markdown_it.utils import EnvType
from math_core import LatexError, LatexToMathML

MAX_CHARACTERS = 50_000
"""Longer texts are not rendered, because that would block other requests."""

_MAX_LEVELS = 60
"""Of blocks in blocks, about two for each list in a list."""

_VANISHING = frozenset("*~`|-:[]>")
"""Characters that Markdown turns into a style. If any other is missing from the result, it is not used."""

_BEFORE_BOLD = frozenset("([{\"'“‘«„—–-:>*_~")  # noqa: RUF001
_AFTER_BOLD = frozenset(")]}.,;:!?\"'”’»—–-…<*_~")  # noqa: RUF001
_DASHES = re.compile(r"[-:| \t]*-[-:| \t]*")
_OPENS = re.compile(r"\]\(\s*<?(?:https?://|mailto:)", re.IGNORECASE)


def safe_html(text: str) -> str | None:
    """`text` rendered and sanitized: no raw HTML, images, scripts or styles. None if it is to be shown as it was typed:
    it has nothing to render, is too long or too deep, or something of it would not be seen.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        rendered = _Rendering(_parser().parse(text))
    except _TooDeepError:
        return None
    missing = Counter(text) - Counter(rendered.seen)
    if rendered.is_plain or any(one not in _VANISHING and not one.isspace() for one in missing):
        return None
    return _clean(rendered.html)


def html_of(text: str) -> str:
    """`text` as `safe_html`, or as a paragraph; empty if it is."""
    return safe_html(text) or (f"<p>{html_text.escape(text)}</p>" if text else "")


@cache
def _parser() -> MarkdownIt:
    """CommonMark with tables, strikethrough and formulas, less all that hides or changes what was typed."""
    parser = MarkdownIt("commonmark", {"html": False, "linkify": False, "typographer": False, "maxNesting": 100})
    parser.block, parser.inline = _Block(), _Inline()
    parser.enable(["table", "strikethrough"]).disable(
        ["reference", "lheading", "html_block", "image", "html_inline", "entity", "escape", "autolink", "newline"]
    )
    ends: RuleOptionsType = {"alt": ["paragraph", "blockquote", "list"]}
    rules = parser.block.ruler
    rules.at("table", _table, {"alt": ["paragraph"]})
    rules.at("code", _code)
    rules.at("heading", _heading, ends)
    rules.at("hr", _rule, ends)
    rules.at("fence", _fence, ends)
    rules.at("paragraph", _paragraph)
    rules.before("fence", "formula", _formula_block, ends)
    parser.inline.ruler.at("link", _link)
    parser.inline.ruler.before("escape", "formula", _formula_inline)
    return parser


class _TooDeepError(Exception):
    """More than `_MAX_LEVELS` levels of blocks, of which Markdown parsers drop the rest."""


class _Block(ParserBlock):
    def tokenize(self, state: StateBlock, startLine: int, endLine: int) -> None:
        if state.level > _MAX_LEVELS:
            raise _TooDeepError
        super().tokenize(state, startLine, endLine)


class _Inline(ParserInline):
    def parse(self, src: str, md: MarkdownIt, env: EnvType, tokens: list[Token]) -> list[Token]:
        state = _State(src, md, env, tokens)
        self.tokenize(state)
        for rule in self.ruler2.getRules(""):
            rule(state)
        return state.tokens


class _State(StateInline):
    def scanDelims(self, start: int, canSplitWord: bool) -> Scanned:
        """The run of marks, which begin or end a style only at the border of a word, so that `2*3*4` stays."""
        found = super().scanDelims(start, True)
        before = self.src[start - 1 : start] or " "
        after = self.src[start + found.length : start + found.length + 1] or " "
        is_call = before == "(" and self.src[max(start - 2, 0) : start - 1].isalnum()
        can_open = found.can_open and (before in _BEFORE_BOLD or _is_border(before)) and not is_call
        can_close = found.can_close and (after in _AFTER_BOLD or _is_border(after))
        return Scanned(can_open, can_close, found.length)


def _is_border(one: str) -> bool:
    """True for white space, and for scripts without any between words."""
    return one.isspace() or unicodedata.east_asian_width(one) in "WF"


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _heading(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A heading, with the `#` behind it if there are any."""
    if not heading(state, start, end, silent):
        return False
    if not silent:
        state.tokens[-2].content = _line(state, start)[len(state.tokens[-3].markup) :]
    return True


def _rule(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    if not hr(state, start, end, silent):
        return False
    if not silent:
        state.tokens[-1].content = _line(state, start)
    return True


def _fence(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A block of code; what follows its backticks is a part of the text."""
    if not fence(state, start, end, silent):
        return False
    if not silent and not state.tokens[-1].content.strip():
        state.tokens[-1].info = _line(state, start)
    return True


def _code(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Lines that are indented by four columns, with their indentation."""
    if not state.is_code_block(start):
        return False
    last = line = start + 1
    while line < end and (state.isEmpty(line) or state.is_code_block(line)):
        line += 1
        last = last if state.isEmpty(line - 1) else line
    state.line = last
    token = state.push("code_block", "code", 0)
    token.content = state.getLines(start, last, state.blkIndent, False) + "\n"
    return True


def _paragraph(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A paragraph with all white space in it."""
    ends = state.md.block.ruler.getRules("paragraph")
    state.parentType, before = "paragraph", state.parentType
    line = start + 1
    while line < state.lineMax and not state.isEmpty(line):
        # Negative: a line that a quote takes without a mark. Far to the right: no block begins there.
        is_text = state.sCount[line] < 0 or state.sCount[line] - state.blkIndent > 3
        if not is_text and any(rule(state, line, state.lineMax, True) for rule in ends):
            break
        line += 1
    state.parentType = before
    state.line = line
    state.push("paragraph_open", "p", 1)
    token = state.push("inline", "", 0)
    token.content, token.children = state.getLines(start, line, state.blkIndent, False), []
    state.push("paragraph_close", "p", -1)
    return True


def _table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A table without cells that would be dropped, and without escaped lines."""
    if "|" not in _line(state, start) or start + 2 > end or not _DASHES.fullmatch(_line(state, start + 1)):
        return False
    if start < state.env.get("bad row", 0):
        return False
    line, num_columns = start, 0
    while line < end and not state.isEmpty(line):
        row = _line(state, line).strip().removeprefix("|").removesuffix("|")
        num_columns = num_columns or row.count("|") + 1
        if "\\|" in row or row.count("|") >= num_columns:
            state.env["bad row"] = line  # also for a table that begins between here and there
            return False
        line += 1
    return table(state, start, end, silent)


def _link(state: StateInline, silent: bool) -> bool:
    """A link to an address that can be opened, which is shown behind its text."""
    start, num_tokens = state.pos, len(state.tokens)
    if state.src[start] != "[" or state.src.find("](", start) < 0:
        return False
    label_end = state.md.helpers.parseLinkLabel(state, start, True)
    is_image = state.src[max(start - 1, 0) : start] == "!"
    if is_image or label_end <= start + 1 or not _OPENS.match(state.src, label_end) or not link(state, silent):
        return False
    if not silent:
        opened = next(one for one in state.tokens[num_tokens:] if one.type == "link_open")
        state.tokens[-1].content = state.src[label_end + 1 : state.pos]
        opened.attrs = {"href": opened.attrGet("href") or ""}
    return True


MAX_FORMULA = 2_000
"""Characters of a formula."""

_MAX_BRACES = 200
_ENVIRONMENT = re.compile(r"\\begin\{((?:align|equation|gather)\*?|aligned|cases|[bpv]?matrix)\}")
_BLOCKS = {"$$": "$$", "\\[": "\\]"}
# Commands that draw nothing, draw over other things, or define commands; comments.
_NOT_DRAWN = re.compile(
    r"[\"`]|(?<!\\)%|\\(?:[egx]?def|let|(?:re|provide)?newcommand|[hv]?phantom|smash|(?:text)?color(?:box)?|[hm]?skip|kern|mkern"
    r"|hspace|raisebox|math[rlc]lap|[rlc]lap|href|url|label|(?:eq)?ref|tag|rule|hfill|genfrac|DeclareMathOperator)(?![a-zA-Z])"
)
# What of a formula is no text of it: commands, names of environments, the columns of an array, sizes.
_COMMANDS = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}(?:\{[lcr|: ]*\})?|\\[a-zA-Z]+|\\\\\[[-0-9.a-z]*\]")
_IN_BRACES = re.compile(r"\\(?:text\w*|mathrm|operatorname\*?|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_PROSE = re.compile(r"(?:^|[\s(])[a-z]{2,}\s|\s[a-z]{2,}(?=[\s,.;:!?)]|$)")
_SIGNS = re.compile(r"[\\^_{}=+*/<>|-]")
_TAGS = re.compile(r"<[^>]*>")


def _formula_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A formula on lines of its own, which may begin like items of a list."""
    first = _line(state, start)
    environment = _ENVIRONMENT.match(first)
    ending = f"\\end{{{environment[1]}}}" if environment else _BLOCKS.get(first[:2])
    if ending is None or state.is_code_block(start):
        return False
    for line in range(start, end):
        if state.isEmpty(line) or (line > start and state.sCount[line] < state.blkIndent):
            return False
        if _line(state, line).rstrip().endswith(ending) and (line > start or len(first.strip()) > 3):
            break
    else:
        return False
    source = state.getLines(start, line + 1, state.blkIndent, False)
    inner = source.strip() if environment else source.strip()[2:-2]
    if not environment and ending in inner:
        return False
    drawn = _drawn(inner, is_block=True)
    if drawn is None:
        return False
    if not silent:
        state.line = line + 1
        token = state.push("formula", "p", 0)
        token.content, token.info = drawn, source
    return True


def _formula_inline(state: StateInline, silent: bool) -> bool:
    """A formula among words. Money, shell variables and escaped brackets are none."""
    src, start = state.src, state.pos
    opening = next((one for one in ("\\(", "\\[", "$$", "$") if src.startswith(one, start)), "")
    if not opening:
        return False
    closing = {"\\(": "\\)", "\\[": "\\]"}.get(opening, opening)
    begin = start + len(opening)
    stop = src.find(closing, begin, begin + MAX_FORMULA)
    if stop <= begin:
        return False
    inner, after = src[begin:stop], src[stop + len(closing) : stop + len(closing) + 1]
    if "\n\n" in inner or not _is_meant(opening, src[max(start - 1, 0) : start], inner, after):
        return False
    drawn = _drawn(inner, is_block=opening in _BLOCKS)
    if drawn is None:
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.info = drawn, src[start : stop + len(closing)]
    state.pos = stop + len(closing)
    return True


def _is_meant(opening: str, before: str, inner: str, after: str) -> bool:
    """True if `inner` between two marks is meant as a formula, by what stands around it."""
    if before in ("\\", "$", "/", "|", ")") or after in ("\\", "$", "*", "+", "?", "{", "|"):
        return False
    if opening != "$$" and (before.isalnum() or (opening != "\\(" and after.isalnum())):
        return False
    if opening == "$" and (inner[0].isspace() or inner[-1].isspace() or inner[-1] == "\\"):
        return False
    if opening == "\\[" and not _SIGNS.search(inner.replace("-", "")) and not inner[0].isspace():
        return False
    words = _IN_BRACES.sub(" ", inner)
    if opening == "$" and not _SIGNS.search(inner) and " " in inner and re.search("[a-zA-Z]{2}", words):
        return False
    return not _PROSE.search(words)


def _drawn(source: str, *, is_block: bool) -> str | None:
    """A formula as MathML; None if it is none, or not all of it would be seen."""
    if not source.strip() or len(source) > MAX_FORMULA or _NOT_DRAWN.search(source) or _is_deep(source):
        return None
    unnumbered = re.sub(r"(\\(?:begin|end)\{(?:align|equation|gather))\}", r"\1*}", source)
    try:
        drawn = _converter().convert_with_local_state(unnumbered, displaystyle=is_block)
    except LatexError:
        return None
    seen = html_text.unescape(_TAGS.sub(" ", drawn))
    missing = _letters(_COMMANDS.sub(" ", source)) - _letters(seen)
    is_struck = "<menclose" in drawn and drawn.count("<menclose") != drawn.count('<menclose notation="box"')
    return None if missing or is_struck or not seen.strip() else drawn


def _is_deep(source: str) -> bool:
    return max(source.count("{"), source.count("\\left"), source.count("\\begin")) > _MAX_BRACES


def _letters(text: str) -> Counter[str]:
    """Letters and digits of `text`, those in other alphabets of mathematics as plain ones."""
    return Counter(one for one in unicodedata.normalize("NFKC", text) if one.isalnum())


@cache
def _converter() -> LatexToMathML:
    return LatexToMathML(fancy_error=False)


class _Rendering:
    """HTML of the tokens of a text. `seen` are all characters that it shows, formulas as they were typed; `is_plain`:
    they are paragraphs without any style.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.is_plain = True
        self._html: list[str] = []
        self._seen: list[str] = []
        self._marks: list[str] = []  # of lists and quotes that have begun, before their first text
        self._hidden: list[bool] = []
        for token in tokens:
            self._block(token)

    @property
    def html(self) -> str:
        return "".join(self._html)

    @property
    def seen(self) -> str:
        return "".join(self._seen)

    def _block(self, token: Token) -> None:
        kind = token.type
        if kind == "inline":
            self._flush()
            children = token.children or []
            for child, is_code in zip(children, _in_code(children), strict=True):
                self._inline(child, has_marks=is_code)
        elif kind in ("paragraph_open", "paragraph_close"):
            self._html.append("" if token.hidden else f"<{'/' * (token.nesting < 0)}p>")
        else:
            self.is_plain = False
            self._other_block(token)

    def _other_block(self, token: Token) -> None:
        match token.type:
            case "list_item_open":
                self._html.append("<li>")
                self._marks.append(token.info + token.markup)
            case "blockquote_open":
                self._html.append("<blockquote>")
                self._marks.append(token.markup)
            case "heading_open":
                self._html.append(f'<p class="{token.tag}">')
                self._marks.append(token.markup)
            case "heading_close":
                self._html.append("</p>")
            case "hr":
                self._html.append('<p class="rule">')
                self._flush()
                self._mark(token.content)
                self._html.append("</p>")
            case "fence" | "code_block":
                self._code(token)
            case "formula":
                self._html.append('<p class="formula">')
                self._flush()
                self._formula(token)
                self._html.append("</p>")
            case _:
                # Of a list, a quote or a table: their tags have no attributes.
                if token.nesting < 0:
                    self._flush()
                self._html.append(f"<{'/' * (token.nesting < 0)}{token.tag}>")

    def _code(self, token: Token) -> None:
        self._html.append("<pre>")
        self._flush()
        if token.info.strip():
            self._mark(token.info.strip())
            self._html.append("\n")
        self._html.append("<code>")
        self._text(token.content.removesuffix("\n"))
        self._html.append("</code></pre>")

    def _inline(self, token: Token, *, has_marks: bool) -> None:
        kind = token.type
        if kind == "text":
            self._text(token.content)
            return
        self.is_plain = False
        # A single mark, and underscores, may be meant as they stand: `*.py`, `__init__`.
        stays = has_marks or kind[:2] == "em" or token.markup == "__"
        if kind == "formula":
            self._formula(token)
        elif kind == "code_inline":
            self._html.append("<code>")
            self._text(token.content)
            self._html.append("</code>")
        elif kind == "link_open":
            self._html.append(f'<a href="{html_text.escape(str(token.attrGet("href")))}">')
        elif kind == "link_close":
            self._html.append("</a>")
            self._mark(token.content)
        elif token.nesting > 0:
            self._mark(token.markup if stays else "")
            self._html.append(f"<{token.tag}>")
        else:
            self._html.append(f"</{token.tag}>")
            self._mark(token.markup if stays else "")

    def _text(self, text: str) -> None:
        self._html.append(html_text.escape(text))
        self._seen.append(text)

    def _formula(self, token: Token) -> None:
        self._html.append(token.content)
        self._seen.append(token.info)

    def _mark(self, mark: str) -> None:
        if mark:
            self._html.append('<span class="mark">')
            self._text(mark)
            self._html.append("</span>")

    def _flush(self) -> None:
        """Write the marks of what has begun."""
        for mark in self._marks:
            self._mark(mark)
            self._html.append("" if mark[0] == "#" else " ")
        self._marks.clear()


def _is_balanced(text: str) -> bool:
    open_brackets: list[str] = []
    for one in text:
        if one in "([{":
            open_brackets.append(")]}"["([{".index(one)])
        elif one in ")]}" and (not open_brackets or open_brackets.pop() != one):
            return False
    return not open_brackets


def _in_code(tokens: Sequence[Token]) -> list[bool]:
    """For each token whether it is a mark around brackets without their other half, as in `f(**a) + f(**b)`."""
    found, open_marks = [False] * len(tokens), list[int]()
    for index, token in enumerate(tokens):
        if token.nesting > 0:
            open_marks.append(index)
        elif token.nesting < 0:
            first = open_marks.pop()
            if not _is_balanced("".join(one.content for one in tokens[first:index])):
                found[first] = found[index] = True
    return found


_HTML_TAGS = "p strong em s code pre blockquote ul ol li table thead tbody tr th td a span".split()  # noqa: SIM905
_MATH_TAGS = (  # noqa: SIM905
    "math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts "
    "mprescripts mtable mtr mtd mstyle mpadded menclose"
).split()
_SIZES = {"displaystyle", "scriptlevel"}
_ATTRIBUTES = {
    "*": set[str](),
    "a": {"href"},
    "math": {"display"},
    "mi": {"mathvariant"},
    "mo": set("form fence separator stretchy symmetric largeop movablelimits lspace rspace minsize maxsize".split()),  # noqa: SIM905
    "mfrac": {"linethickness", *_SIZES},
    "mover": {"accent"},
    "munder": {"accentunder"},
    "munderover": {"accent", "accentunder"},
    "mspace": {"width"},
    "menclose": {"notation"},
    "mrow": _SIZES,
    "mstyle": _SIZES,
    "mtable": {"style", *_SIZES},
    "mtd": {"style"},
}
_STYLES = {"text-align", "justify-items", "padding-left", "padding-right", "border-left", "border-right", "border-top"}


def _clean(html: str) -> str:
    return nh3.clean(
        html,
        tags={*_HTML_TAGS, *_MATH_TAGS},
        attributes=_ATTRIBUTES,
        allowed_classes={"p": {f"h{level}" for level in range(1, 7)} | {"rule", "formula"}, "span": {"mark"}},
        filter_style_properties={*_STYLES, "border-bottom"},
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
        link_rel="noopener noreferrer nofollow",
    )
