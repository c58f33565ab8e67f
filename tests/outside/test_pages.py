"""What people do with the pages on which they vote and talk."""

import re
import unicodedata

import pytest

from arena_parts import make_loop
from page_parts import faults_of, number, press, wait_until_sent
from server_parts import Client, Server, pairs
from tunesmith.collect.store.records import Candidate, NewItem
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.access import API

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


def offline(page) -> None:
    """Requests that change something fail, as on a network that drops out."""
    page.route(f"**{API}/presentations/**", lambda route: route.abort("connectionrefused"))


def dispatch(page, key: str, code: str, **more) -> None:
    """A key of another keyboard: what it types, and its place."""
    page.wait_for_selector("main[data-state=ready]")
    page.evaluate(
        """([key, code, more]) => document.activeElement.dispatchEvent(
            new KeyboardEvent("keydown", { key, code, bubbles: true, cancelable: true, ...more }))""",
        [key, code, more],
    )


def test_a_vote_made_offline_outlives_its_tab(serve, visit, stored):
    """The train enters a tunnel, the rater votes on, and closes the tab: the votes were gone, though `Recorded` was
    shown. Reported: issue 45.17, HumanSignal/label-studio#6675
    """
    visit.expected = ("ERR_CONNECTION_REFUSED",)
    server = serve(pairs(4))
    context = visit.context(server)
    page = visit.page(context, server)
    first = number(page)
    offline(page)
    press(page, "1")
    page.locator("#unsent").wait_for()
    assert "Recorded" not in page.locator("#status").inner_text()
    assert "Saved here" in page.locator("#status").inner_text()
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.type), dialog.accept()))
    page.close(run_before_unload=True)
    page.wait_for_event("close") if not page.is_closed() else None
    assert dialogs == ["beforeunload"]
    again = visit.page(context, server)
    assert number(again) != first
    wait_until_sent(again, 1)
    again.get_by_text("Recorded: A is much better.").wait_for()
    again.close()
    visit.end(server)
    assert [row.prompt for row in stored(server)] == [f"Prompt {first}"]


def test_a_queue_belongs_to_its_rater(serve, visit, stored):
    """Two raters share a computer: what one of them could not send must not be sent, and refused, as the other's.
    Reported: issue 45.17
    """
    visit.expected = ("ERR_CONNECTION_REFUSED", "401")
    server = serve(pairs(2), overlap=2)
    context = visit.context(server)
    page = visit.page(context, server)
    offline(page)
    press(page, "1")
    page.locator("#unsent").wait_for()
    page.close()
    mine = context.cookies()
    other = server.rater("bob", Client(server.url, mine[0]["value"]))
    context.clear_cookies()
    page = visit.page(context, server, f"{server.url}/login")
    page.get_by_label("Token").fill(other.token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/vote")
    page.wait_for_selector("main[data-state=ready]")
    page.wait_for_load_state("networkidle")
    assert page.locator("#progress-text").inner_text().startswith("0 votes")
    page.close()
    context.add_cookies(mine)
    wait_until_sent(visit.page(context, server), 1)
    visit.end(server)
    assert [row.rater for row in stored(server)] != ["bob"] and len(stored(server)) == 1


def test_the_reason_for_a_ranking_is_stored(serve, visit):
    """Who ranks four answers says why: the words were thrown away. Reported: issue 45.17"""
    answers_ = tuple(Candidate(text) for text in ("one", "two", "three"))
    server = serve([NewItem("Prompt 1", answers_, kind="ranking")], kind="ranking")
    page = visit.open(server)
    press(page, "r")
    page.keyboard.type("clear")
    page.keyboard.press("Enter")
    press(page, "1", "2", "3", "Enter")
    wait_until_sent(page, 1)
    visit.end(server)
    with VoteStore.open(server.folder / "votes.db") as store:
        assert [one.reason for one in store.reader.export_rankings()] == ["clear"]


def test_what_is_typed_is_not_lost(serve, visit, stored):
    """Half an answer is written, and Escape, a reload, an undo or a vote comes between: it was gone.
    Reported: issue 45.17, argilla-io/argilla#3098
    """
    server = serve(pairs(3))
    page = visit.open(server)
    first = number(page)
    press(page, "w")
    page.keyboard.type("A better one")
    page.keyboard.press("Escape")
    page.get_by_text("Kept as a draft").wait_for()
    assert page.locator("#writing").is_hidden()
    press(page, "r")
    page.keyboard.type("because")
    page.reload()
    press(page)
    assert number(page) == first and page.locator("#reason").input_value() == "because"
    press(page, "w")
    assert page.locator("#written").input_value() == "A better one"
    page.keyboard.press("Escape")
    press(page, "2")
    page.get_by_text("Your written answer is not sent").wait_for()
    assert number(page) == first
    press(page, "2")
    wait_until_sent(page, 1)
    press(page, "u")
    page.get_by_text("Undone: vote again.").wait_for()
    assert page.locator("#reason").input_value() == "because"
    press(page, "w")
    page.keyboard.press("Control+Enter")
    page.get_by_text("Your answer is stored.").wait_for()
    press(page, "2")
    wait_until_sent(page, 1)
    visit.end(server)
    assert [row.reason for row in stored(server)] == ["because"]
    with VoteStore.open(server.folder / "votes.db") as store:
        assert [one.text for one in store.reader.export_demonstrations()] == ["A better one"]


def test_the_answers_stay_in_sight_while_one_writes(serve, visit):
    """Who writes a better answer reads the two while they do: the field lay over them. Reported: issue 45.22"""
    long = "A long answer, line after line. " * 60
    page = visit.open(serve([NewItem("Prompt 1", (Candidate(long + "x"), Candidate(long + "y")))]))
    for width, height in ((1280, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        press(page, "w")
        page.keyboard.type("So")
        field = page.locator("#written").bounding_box()
        for box in (page.locator(".answer").nth(side).bounding_box() for side in (0, 1)):
            apart = box["y"] + box["height"] <= field["y"] or box["x"] + box["width"] <= field["x"]
            assert apart and box["y"] >= 0 and box["y"] + 60 < height
        assert field["y"] + 40 < page.locator(".verdicts").bounding_box()["y"]
        assert faults_of(page) == []
        page.keyboard.press("Escape")


KEYBOARDS = {
    "Russian": [("ы", "KeyS"), ("г", "KeyU"), ("1", "Digit1")],  # noqa: RUF001
    "AZERTY": [("s", "KeyS"), ("u", "KeyU"), ("&", "Digit1")],
    "Arabic": [("س", "KeyS"), ("ع", "KeyU"), ("١", "Digit1")],  # noqa: RUF001
    "Greek, Caps Lock": [("Σ", "KeyS"), ("Θ", "KeyU"), ("1", "Digit1")],
    "number block": [("s", "KeyS"), ("u", "KeyU"), ("1", "Numpad1")],
    "virtual, without places": [("s", ""), ("u", ""), ("1", "")],
}


@pytest.mark.parametrize("keyboard", KEYBOARDS)
def test_keys_work_on_every_keyboard(serve, visit, stored, keyboard):
    """Raters type Russian, French or Arabic: no key did anything.
    Reported: issue 45.21, anomalyco/opencode#6364, mastodon/mastodon#15348
    """
    server = serve(pairs(3))
    page = visit.open(server)
    first = number(page)
    skip, undo, vote = KEYBOARDS[keyboard]
    dispatch(page, *skip)
    page.wait_for_function("one => !document.getElementById('prompt').innerText.includes(one)", arg=f"Prompt {first}")
    dispatch(page, *undo)
    page.get_by_text("Undone: vote again.").wait_for()
    dispatch(page, *vote)
    wait_until_sent(page, 1)
    visit.end(server)
    assert [(row.prompt, row.margin) for row in stored(server)] == [(f"Prompt {first}", 2)]


def test_keys_that_type_other_signs_do_nothing(serve, visit):
    """On a German keyboard `=` is Shift and the key of the 0, on an American one `!` that of the 1; AltGr and Ctrl make
    other signs of letters. Reported: issue 45.21, getsentry/sentry#114714
    """
    page = visit.open(serve(pairs(2)))
    first = number(page)
    dispatch(page, "=", "Digit0", shiftKey=True)
    dispatch(page, "!", "Digit1", shiftKey=True)
    dispatch(page, "ſ", "KeyS", modifierAltGraph=True)  # noqa: RUF001
    dispatch(page, "s", "KeyS", ctrlKey=True)
    dispatch(page, "End", "Numpad1")
    page.wait_for_timeout(400)
    assert number(page) == first and page.locator("#status").inner_text() == ""


def test_enter_of_an_input_method_sends_nothing(serve, visit):
    """Japanese and Chinese are composed, and Enter takes a suggestion: it left the field of the reason.
    Reported: issue 45.21, element-hq/element-web#23254
    """
    page = visit.open(serve(pairs(2)))
    press(page, "r")
    for more in ({"isComposing": True}, {"keyCode": 229}):
        for key in ("Enter", "Escape"):
            dispatch(page, key, key, **more)
            assert page.evaluate("document.activeElement.id") == "reason"
    press(page, "Enter", "w")
    page.keyboard.type("日本")
    for more in ({"isComposing": True}, {"keyCode": 229}):
        dispatch(page, "Enter", "Enter", ctrlKey=True, **more)
        dispatch(page, "Escape", "Escape", **more)
    assert page.locator("#written").is_visible() and page.locator("#written").input_value() == "日本"


def test_a_rater_pages_through_their_votes_and_changes_them(serve, visit, stored):
    """The rater sees at the 40th pair what they misjudged at the third: a vote could not be changed after a reload or
    five minutes. Reported: issue 45.22, hltcoe/turkle#188
    """
    ranking = NewItem("Prompt 99", tuple(Candidate(text) for text in ("one", "two", "three")), kind="ranking")
    server = serve([*pairs(12), ranking])
    page = visit.open(server)
    for count in range(1, 14):
        press(page)
        if page.locator("#ranking-keys").is_visible():
            press(page, "1", "2", "3", "Enter")
        else:
            press(page, "2")
        wait_until_sent(page, count)
    page.get_by_role("link", name="My votes").click()
    page.locator("section.vote").nth(9).wait_for()
    assert page.locator("section.vote").count() == 10
    assert faults_of(page) == []
    page.get_by_role("button", name="Older").click()
    page.locator("section.vote").nth(3).wait_for(state="detached")
    oldest = page.locator("section.vote").last
    prompt = oldest.locator(".messages").inner_text()
    answers_ = oldest.locator(".answer .passage").all_inner_texts()
    assert oldest.get_by_role("button", name="A is better").get_attribute("aria-pressed") == "true"
    oldest.get_by_role("button", name="B is much better").click()
    page.get_by_text("Recorded: B is much better.").wait_for()
    oldest.get_by_label("Reason").fill("second thoughts")
    page.keyboard.press("Enter")
    page.get_by_text("Recorded: the reason.").wait_for()
    page.get_by_role("button", name="Newer").click()
    page.locator("section.vote").nth(9).wait_for()
    newest = page.locator("section.vote").filter(has=page.get_by_role("button", name="A is better")).first
    withdrawn = newest.locator(".messages").inner_text()
    newest.get_by_role("button", name="Withdraw").click()
    page.get_by_text("Withdrawn: it comes back").wait_for()
    (select,) = page.locator("section.vote select").all()[:1]
    select.select_option("3")
    page.get_by_text("Recorded: the ranking.").wait_for()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390 and faults_of(page) == []
    page.get_by_role("link", name="Vote", exact=True).first.click()
    press(page)
    assert page.locator("#prompt").inner_text() == withdrawn
    visit.end(server)
    rows = {row.prompt: row for row in stored(server)}
    assert len(rows) == 11 and withdrawn not in rows
    assert (rows[prompt].chosen, rows[prompt].margin, rows[prompt].reason) == (answers_[1], 2, "second thoughts")


def test_undo_works_after_a_reload(serve, visit, stored):
    """The page is loaded again, and U said that there is nothing to undo. Reported: issue 45.22"""
    server = serve(pairs(2))
    page = visit.open(server)
    first = number(page)
    press(page, "1")
    wait_until_sent(page, 1)
    page.reload()
    press(page, "u")
    page.get_by_text("Undone: vote again.").wait_for()
    assert number(page) == first
    with page.expect_response(lambda response: response.request.method != "GET" and response.ok):
        press(page, "5")  # the page may still count the vote that was undone
    visit.end(server)
    assert [(row.prompt, row.margin) for row in stored(server)] == [(f"Prompt {first}", 2)]


def test_the_pair_is_in_sight_on_a_phone(serve, visit):
    """A phone showed the guidelines at each load, the answers below the fold, and no progress. Reported: issue 45.24"""
    answers_ = (Candidate("One line.\n" * 30), Candidate("Another line.\n" * 30))
    guidelines = "# Be fair\n\n" + "Read both answers to their end.\n\n" * 12
    server = serve([NewItem("What is it? " * 20, answers_), *pairs(3)], guidelines=guidelines)
    context = visit.context(server, width=390)
    page = visit.page(context, server)
    page.set_viewport_size({"width": 390, "height": 844})
    for _ in range(2):
        page.reload()
        press(page)
        keys = page.locator(".verdicts").bounding_box()["y"]
        for side in (0, 1):
            box = page.locator(".answer .passage").nth(side).bounding_box()
            assert box["height"] > 60 and box["y"] + 60 < keys
        assert page.locator("#guidelines .passage").is_hidden()
        assert page.locator("progress").bounding_box()["width"] > 60
        assert "4 left" in page.locator("#progress-text").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390 and faults_of(page) == []
    assert page.locator("#guidelines-new").is_visible()
    page.locator("#guidelines summary").click()
    assert page.locator("#guidelines .passage").is_visible() and page.locator("#guidelines-new").is_hidden()


@pytest.fixture
def arena(serve, visit, tmp_path):
    """The arena of a live loop, in a window that is logged in."""
    server = serve.run(Server(make_loop(tmp_path / "arena"), prepare="arena_parts"))
    return visit.page(visit.context(server), server, f"{server.url}/arena")


def say(page, text: str) -> None:
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")


def test_a_conversation_goes_on_when_the_context_is_full(arena):
    """After some turns the conversation is longer than the models can read: the page said `lower max_new_tokens`, and
    nothing helped. Reported: issue 45.24, mckaywrigley/chatbot-ui#1396
    """
    for turn, text in enumerate(("one", "two")):
        say(arena, text)
        arena.locator(".turn").nth(turn).get_by_text(f"hears {text}").first.wait_for()
        arena.wait_for_selector("main[data-state=voting]")
    say(arena, "full")
    arena.get_by_text("longer than a model's context; leave out its oldest turns").wait_for()
    assert "max_new_tokens" not in arena.locator("main").inner_text()
    assert faults_of(arena) == []
    arena.get_by_role("button", name="Change the message").click()
    arena.get_by_text("Stopped: your message is back").wait_for()
    assert arena.locator("#message").input_value() == "full" and arena.locator(".turn").count() == 2
    arena.locator("#message").press("Enter")
    arena.get_by_role("button", name="Leave out the oldest turns").click()
    arena.locator(".turn").nth(2).get_by_text("hears full").first.wait_for()
    arena.get_by_role("heading", name="Turn 1, which the models do not read any more").wait_for()
    assert faults_of(arena) == []


def test_answers_can_be_stopped_and_copied(arena, tmp_path):
    """A model writes on and on, and what it wrote is to go into a report. Reported: issue 45.24"""
    say(arena, f"wait for {tmp_path / 'gate'}")
    arena.get_by_text("Both are answering.").wait_for()
    arena.get_by_role("button", name="Stop").click()
    arena.get_by_text("Stopped: your message is back").wait_for()
    assert arena.locator("#message").input_value().startswith("wait for")
    (tmp_path / "gate").touch()
    arena.locator("#message").fill("")
    say(arena, "one")
    arena.wait_for_selector("main[data-state=voting]")
    arena.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for side in (0, 1):
        arena.get_by_role("button", name=f"Copy answer {'AB'[side]}").click()
        arena.get_by_text("Copied.").wait_for()
        shown = arena.locator(".answer .passage").nth(side).inner_text()
        assert arena.evaluate("navigator.clipboard.readText()") == shown


def test_answers_that_cannot_be_stored_are_not_called_the_same(arena):
    """A model writes a NUL character: the page said that the answers are the same. Reported: issue 45.24"""
    say(arena, "nul")
    arena.get_by_text("NUL character").first.wait_for()
    assert "the same" not in arena.locator("#status").inner_text()
    say(arena, "same")
    arena.get_by_text("The two answers are the same").wait_for()


def test_enter_of_an_input_method_does_not_send_a_message(arena):
    """Japanese is composed in the arena, and Enter takes a suggestion: half a message was sent.
    Reported: issue 45.21, element-hq/element-web#23254
    """
    arena.locator("#message").fill("日本")
    for more in ({"isComposing": True}, {"keyCode": 229}):
        for key in ("Enter", "Escape"):
            arena.locator("#message").dispatch_event("keydown", {"key": key, "code": key, **more})
    arena.wait_for_timeout(300)
    assert arena.locator(".turn").count() == 0 and arena.locator("#message").input_value() == "日本"
    assert arena.evaluate("document.activeElement.id") == "message"
    arena.reload()
    assert arena.locator("#message").input_value() == "日本"
