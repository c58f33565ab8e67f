import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.web.messages import MAX_CHARACTERS, safe_html

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
TAGS = "p|br|strong|em|del|s|code|pre|blockquote|ul|ol|li|hr|table|thead|tbody|tr|th|td|a"
ALLOWED = re.compile(
    rf"</?(?:{TAGS})>|<p class=\"h[1-6]\">|<ol start=\"\d+\">|"
    r"<a (?:href=\"(?:https?|mailto):[^\"<>]*\" )?rel=\"noopener noreferrer nofollow\">"
)


def assert_inert(html: str) -> None:
    """Nothing but the allowed tags, each with the allowed attributes."""
    rest = ALLOWED.sub("", html)
    assert "<" not in rest, rest


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_become_inert(text):
    assert_inert(safe_html(text))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*HOSTILE, "\n", "\n\n", "- ", "> ", "# ", "|a|b|\n|-|-|\n", "`", "**", "x", '"'])).map(
        "".join
    )
)
def test_any_mixture_is_inert(text):
    assert_inert(safe_html(text))


def test_common_markdown_is_shown():
    html = safe_html(
        "# Title\n\nA **bold** [link](https://x.example)\n\n1. one\n2. two\n\n|a|b|\n|-|-|\n|1|2|\n\n~~no~~"
    )
    for part in ('<p class="h1">Title</p>', "<strong>bold</strong>", 'href="https://x.example"', "<ol>", "<td>2</td>"):
        assert part in html
    assert "<h1" not in html and "<s>no</s>" in html


def test_long_texts_are_not_rendered():
    assert safe_html("x" * (MAX_CHARACTERS + 1)) is None
    for text in (
        "*" * 40_000,
        "[" * 40_000,
        "> " * 20_000,
        "`" * 40_000,
        "- " * 20_000,
        "|a" * 10_000 + "\n" + "|-" * 10_000,
    ):
        assert safe_html(text) is not None
