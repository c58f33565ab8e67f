import re
import unicodedata
from collections import Counter
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.collect.web.markdown import MAX_CHARACTERS, html_of, safe_html

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "</script><svg onload=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](vbscript:x)",
    "![x](http://evil.example/pixel.png)",
    '<a href="x" style="position:fixed">a</a>',
    "<style>*{display:none}</style>",
    "[a]: javascript:alert(1)\n\n[a]",
    '[a](http://x.example "onmouseover=alert(1)")',
    "<javascript:alert(1)>",
    '```"><img src=x onerror=alert(1)>\nx\n```',
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\x1b[31mred\x1b[0m \u202ereversed",
]
TAGS = "p|strong|em|s|code|pre|blockquote|ul|ol|li|table|thead|tbody|tr|th|td|a|m[a-z]+"
ALLOWED = re.compile(
    rf"</?(?:{TAGS}|span)>|<p class=\"(?:h[1-6]|rule|formula)\">|<span class=\"mark\">|"
    r"<m(?:[a-z]+)(?: [a-z]+=\"[a-z0-9.:; -]*\")*>|"
    r"<a (?:href=\"(?:https?|mailto):[^\"<>]*\" )?rel=\"noopener noreferrer nofollow\">"
)


PARTS = [
    *("\n", "\n\n", "- ", "1) ", "> ", "# ", "|a|b|\n|-|-|\n", "`", "```\n", "**", "*", "__", "~~", "x", '"', "    "),
    *("$", "$x$", "\\(", "\\)", "$$\n", "\\frac{a}{b}", "[a](http://x.example)", "[^1]", "[x]: y", "2*3*4", "---\n"),
    *("===\n", "\\", "&lt;"),
]
VANISHING = set("*~`|-:[]>")


def assert_all_is_seen(text: str, html: str) -> None:
    """What is missing from the text of the page are marks of a style, and the signs of formulas."""
    shown = unescape(re.sub(r"<[^>]*>", "", html))
    if "<math" in html:
        text = re.sub(r"\\[!;,:]", "", text)  # spaces of a formula
    missing = Counter(unicodedata.normalize("NFKC", text)) - Counter(unicodedata.normalize("NFKC", shown))
    missing = {one for one in missing if one not in VANISHING and not one.isspace()}
    if "<math" in html:
        missing -= set("$\\(){}^_&frac'")  # an apostrophe is a prime
    assert not missing, (text, html)


def assert_inert(html: str) -> None:
    """Nothing but the allowed tags, each with the allowed attributes."""
    rest = ALLOWED.sub("", html)
    assert "<" not in rest, rest


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_become_inert(text):
    assert_inert(html_of(text))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*HOSTILE, *PARTS])).map("".join))
def test_any_mixture_is_inert_and_loses_nothing(text):
    html = html_of(text)
    assert_inert(html)
    assert_all_is_seen(text, html)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1 \n\t*_~`#>-+.|[](){}<&;\\$=^:!\u200b\u202e漢é\r"), max_size=60))
def test_any_text_loses_nothing(text):
    assert_all_is_seen(text, html_of(text))


def test_common_markdown_is_shown():
    html = safe_html(
        "# Title\n\nA **bold** [link](https://x.example)\n\n1. one\n2. two\n\n|a|b|\n|-|-|\n|1|2|\n\n~~no~~"
    )
    for part in (
        '<span class="mark">#</span> Title</p>',
        "<strong>bold</strong>",
        'href="https://x.example"',
        "<ol>",
        "<td>2</td>",
    ):
        assert part in html
    assert "<h1" not in html and "<s>no</s>" in html


def test_long_and_deep_texts_are_shown_as_they_were_typed():
    assert safe_html("x" * (MAX_CHARACTERS + 1)) is None
    assert safe_html("> " * 20_000) is None
    assert safe_html("- " * 20_000 + "x") is None
    for text in (
        "*" * 40_000,
        "[" * 40_000,
        "[a](http://" * 4_000,
        "`" * 40_000,
        "|a" * 10_000 + "\n" + "|-" * 10_000,
        "|-|\n" * 10_000 + "||||",
        "$a " * 15_000,
        "\\(" * 20_000,
        "$" + "\\sqrt{" * 300 + "x" + "}" * 300 + "$",
        "$$\n" * 15_000,
        "**a " * 12_000,
        "\\begin{align}\n" * 3_000,
    ):
        html_of(text)


def test_what_looks_as_it_was_typed_is_not_rendered():
    for text in ("plain", "two\n\nparagraphs\nof lines", "[Answer]: 42", "2*3*4", "", "  "):
        assert safe_html(text) is None
    assert html_of("a < b") == "<p>a &lt; b</p>" and html_of("") == ""


@pytest.mark.parametrize(
    ("text", "is_drawn"),
    [
        (r"\(2x\)", True),
        (r"$E = mc^2$", True),
        (r"$x$-axis", True),
        (r"the \(n\)th", True),
        (r"$\text{if } x > 0 \text{ and } y$", True),
        (r"$\begin{cases} 1 & x \\ 2 & y \end{cases}$", True),
        ("$5 and $6", False),
        ("$5$6", False),
        ("US$5$", False),
        (r"\$5\$", False),
        (r"\\(2x\\)", False),
        ("`$x$`", False),
        (r"$\frac{1$", False),
        (r"$x % y$", False),
        (r"$\newcommand{\a}{b}\a$", False),
        ("$x\n\ny$", False),
    ],
)
def test_formulas_are_drawn_and_money_is_not(text, is_drawn):
    assert ("<math" in html_of(text)) is is_drawn
    if not is_drawn:
        assert unescape(re.sub(r"<[^>]*>", "", html_of(text))) == text.strip("`")
