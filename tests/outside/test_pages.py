"""What people do with the pages on which they vote and talk."""

import re
import unicodedata

import pytest

from page_parts import faults_of, press
from tunesmith.store.records import Candidate, NewItem

pytestmark = pytest.mark.browser

# Texts as models write them, and what is to be seen of each, white space aside; None: all of it, as it was typed.
AS_TYPED = None
TEXTS = {
    "a link definition": ("[Answer]: 42", AS_TYPED),
    "a definition with a title": ("[a]: <http://x.example> 'title'\n[a]", AS_TYPED),
    "a product": ("2*3*4 and a*b*c", AS_TYPED),
    "powers": ("2**3**4 = x ** y ** z", AS_TYPED),
    "keyword arguments": ("f(*args, **kwargs) and g(**a, b**)", AS_TYPED),
    "pointers": ("int *p, *q; char **argv, **envp;", AS_TYPED),
    "globs": ("ls *.py **/*.md .*foo.* *a*b*", AS_TYPED),
    "a pattern": (r"\d+\.\d+ \* \[a-z\] \\ \# \_", AS_TYPED),
    "a pattern of sed": (r"sed 's/\(foo\)\(bar\)/\2\1/'", AS_TYPED),
    "a path of Windows": (r"C:\new\[folder]\*.txt", AS_TYPED),
    "dunder names": ("__init__ and _private_ and snake_case_name", AS_TYPED),
    "a comment": ("# comment\nx = 1", AS_TYPED),
    "a heading with marks behind it": ("## C# ##", AS_TYPED),
    "an underlined title": ("Title\n=====\n\nOther\n-----", AS_TYPED),
    "a poem": ("The sea is wide,\nthe sea is deep.\n\n   It sleeps,\n      and sleeps.", AS_TYPED),
    "hard breaks": ("one  \ntwo\\\nthree\\", AS_TYPED),
    "deep lists": ("\n".join("  " * level + f"- level {level + 1}" for level in range(14)), AS_TYPED),
    "very deep lists": ("\n".join("  " * level + f"- level {level + 1}" for level in range(90)), AS_TYPED),
    "deep quotes": ("> " * 90 + "x", AS_TYPED),
    "numbers of a list": ("3) three\n7) seven\n\n1. one\n1. one", AS_TYPED),
    "signs at the beginning of lines": ("- 5\n+ 6\n> 7\n* 8", AS_TYPED),
    "tasks": ("- [ ] todo\n- [x] done", AS_TYPED),
    "rules": ("a\n\n---\n\n* * *\n\n___", AS_TYPED),
    "tags": ("<b>bold</b> <img src=x onerror=alert(1)> <!-- a comment --> <https://x.example>", AS_TYPED),
    "blocks of tags": ("<div>\n\n<script>alert(1)</script>\n</div>\n<style>*{display:none}</style>", AS_TYPED),
    "thoughts": ("<think>\nSo, *hm*.\n</think>\n\n7", AS_TYPED),
    "entities": ("&lt;b&gt; &amp; &copy; &#35; &nbsp;", AS_TYPED),
    "images": ("![pixel](http://x.example/p.png) ![][a]", AS_TYPED),
    "unsafe links": ("[a](javascript:alert(1)) [b](data:text/html,x) [c](/etc/passwd) f[i](j)", AS_TYPED),
    "footnotes": ("So[^1].\n\n[^1]: A note.", AS_TYPED),
    "an empty block of code": ("```\n```", "```"),
    "a block that does not end": ("```python\nx = [1]\n", "python x = [1]"),
    "a block with a file name": ("~~~js title=a.js\nlet x;\n~~~", "js title=a.js let x;"),
    "code by indentation": ("So:\n\n    def f():\n        return 1", AS_TYPED),
    "backticks": ("``a ` b`` and ` alone", "a ` b and ` alone"),
    "only marks": ("**", AS_TYPED),
    "marks without an end": ("**bold and `code and ~~gone and [link](", AS_TYPED),
    "a table": ("| a | b |\n|---|--:|\n| 1 | 2 |", "a b 1 2"),
    "a table with too many cells": ("|a|b|\n|-|-|\n|1|2|3|", AS_TYPED),
    "a table with escaped lines": ("|a|b|\n|-|-|\n|1|x \\| y|", AS_TYPED),
    "lines": ("a | b | c\n|x|", AS_TYPED),
    "prices": ("It costs $5 and $6, or $7-$8, US$9 (10$).", AS_TYPED),
    "prices with words": ("Between $5 and 6$, $20,000/year and $30M.", AS_TYPED),
    "variables of a shell": ('echo $HOME/bin:$PATH "$A"-"$B" $1 $2', AS_TYPED),
    "a formula in brackets": (r"So \(2x\) it is.", "So 2x it is."),
    "a formula in dollars": (r"With $x = 42$, $n$ and $\frac{a}{b}$.", "With x=42, n and ab."),
    "a formula on its own": ("\\[\nx^2\n+ y_1\n- 3\n\\]", "x2+y1−3"),  # noqa: RUF001
    "a formula of two dollars": (r"So $$E = mc^2$$ holds.", "So E=mc2 holds."),
    "equations": (r"\begin{align} a &= b \\ c &= d \end{align}", "a=bc=d"),
    "a box": (r"$\boxed{42}$", "42"),
    "a formula that is none": (r"\(\frac{1\) and $\unknown x$ and \[ a & b \]", AS_TYPED),
    "a formula that hides": (r"$\phantom{secret}x$ $a % b$ $\color{white}{y}$", AS_TYPED),
    "definitions in a formula": (r"$\def\a{lost}x$ and \boxed{7} alone", AS_TYPED),
    "right to left": ("שלום 1 + 2 = 3\nHello\nمرحبا (a)", AS_TYPED),  # noqa: RUF001
    "an override of the direction": ("abc\u202edef\u202c ghi", AS_TYPED),
    "characters without width": ("zero\u200bwidth\ufeff so\u00adft\u2060", AS_TYPED),
    "control characters": ("\x1b[31mred\x1b[0m \x07 \x0b|\x0c \x7f \x85", AS_TYPED),
    "joined emoji": ("👩‍👩‍👧 می‌خواهم नमस्ते", AS_TYPED),
    "a line of 5,000 characters": ("x" * 5_000, AS_TYPED),
    "a text of 60,000 characters": ("*a* " * 15_000, AS_TYPED),
    "Windows line ends": ("one\r\ntwo\r\n\r\n- three\r\n", AS_TYPED),
    "other line ends": ("one\u2028two\u2029three", AS_TYPED),
    "dialogue": ('"Well," she said - *slowly* - "no."', AS_TYPED),
    "bold": ("The **answer** is **42**, (**really**) and ~~41~~.", "The answer is 42, (really) and 41."),
    "bold in Chinese": ("这是**重点**内容", "这是重点内容"),
    "code": ("Run `pip install x` and ``a``.", "Run pip install x and a."),
    "a link": ("See [the page](https://x.example/a_b).", "See the page(https://x.example/a_b)."),
    "steps": ("1. **First**: do `a`\n   - then *b*\n2. Second", "1. First: do a - then *b* 2. Second"),
    "only spaces": ("   \n  ", AS_TYPED),
}


def without_space(text: str) -> str:
    # A browser shows the letters of a formula as those of mathematics.
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text).replace("\u2028", "").replace("\u2029", ""))


def test_all_that_a_model_wrote_is_seen(serve, visit):
    """Raters judge what they see: an answer `[Answer]: 42` was an empty box, `2*3*4` was `234`, a poem one line.
    Reported: issue 45.11, oobabooga/textgen#5608, nomic-ai/gpt4all#2728
    """
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, (text, _) in enumerate(TEXTS.values())]
    page = visit.open(serve([NewItem(tuple(turns), (Candidate("a"), Candidate("b")))]))
    press(page)
    shown = page.locator(".message .passage").all_inner_texts()
    wanted = [text if seen is AS_TYPED else seen for text, seen in TEXTS.values()]
    found = {
        name: one
        for name, one, text in zip(TEXTS, shown, wanted, strict=True)
        if without_space(one) != without_space(text)
    }
    assert found == {}
    assert page.locator(".passage :is(img, script, style, iframe, b, [href^='javascript'])").count() == 0
    poem = shown[list(TEXTS).index("a poem")]
    assert poem == TEXTS["a poem"][0]
    assert faults_of(page) == []
    press(page, "m")
    assert page.locator(".message .passage").all_text_contents() == [text for text, _ in TEXTS.values()]


def test_formulas_are_drawn_and_their_source_is_one_key_away(serve, visit):
    r"""Two solutions are compared that say `\(2x\)` and `$y$`; who wants to see what was written presses M.
    Reported: issue 45.11, multica-ai/multica#6838
    """
    item = NewItem("Solve it.", (Candidate(r"So \(2x\)."), Candidate(r"So $y$ costs $5 and $6.")))
    page = visit.open(serve([item]))
    press(page)
    assert page.locator(".answer math").count() == 2
    assert page.locator(".answer math mi").first.evaluate("one => one.getBoundingClientRect().width > 0")
    assert page.get_by_role("button", name="Show source").count() == 2
    press(page, "m")
    assert {r"So \(2x\).", r"So $y$ costs $5 and $6."} == set(page.locator(".answer .passage").all_inner_texts())
    assert faults_of(page) == []
    page.get_by_role("button", name="Show formatted").first.click()
    assert page.locator(".answer math").count() == 2
