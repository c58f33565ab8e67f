import pytest

from tunesmith.observe.reports.html import write_comparison_report, write_demo_report, write_run_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def demo_page(synthetic, tmp_path_factory):
    return write_demo_report(tmp_path_factory.mktemp("demo") / "demo.html", synthetic.demo())


def test_all_open_charts_are_drawn_without_errors_or_network(look, demo_page):
    page = look(demo_page)
    plots = page.locator(".plot:visible")
    assert plots.count() >= 10
    assert page.locator(".plot:visible:has(svg.main-svg)").count() == plots.count()
    assert page.locator(".plot:not([aria-label])").count() == 0


def test_folded_charts_are_drawn_when_the_fold_opens(look, demo_page):
    page = look(demo_page)
    fold = page.locator("#training details.fold").first
    assert fold.locator("svg.main-svg").count() == 0
    fold.locator("summary").first.click()
    fold.locator("svg.main-svg").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_of_a_narrow_screen(look, demo_page, scheme):
    page = look(demo_page, width=390, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_charts_follow_the_colour_scheme_and_the_button(look, demo_page):
    page = look(demo_page, scheme="dark")
    colour = "getComputedStyle(document.querySelector('#plot-prompts .ytitle, #plot-prompts .xtitle')).fill"
    dark = page.evaluate(colour)
    page.get_by_role("button", name="Light mode").click()
    assert page.evaluate(colour) != dark
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 246)"


def test_hostile_text_is_shown_and_does_nothing(look, synthetic, tmp_path):
    drawn = synthetic.samples(openings=(synthetic.HOSTILE, "$x$ <b>bold</b>", synthetic.RTL), num_completions=2)
    for row in drawn:
        row["text_after"] = synthetic.HOSTILE
    compared = synthetic.comparison(samples=drawn)
    for path in (
        write_comparison_report(tmp_path / "c.html", compared, synthetic.HOSTILE),
        write_demo_report(tmp_path / "d.html", synthetic.demo(comparison=compared, rater=synthetic.HOSTILE)),
    ):
        page = look(path)
        page.wait_for_selector("svg.main-svg")
        assert not page.title().startswith("owned") and page.locator("img").count() == 0
        assert page.get_by_text("<img src=x").count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tokens_of_a_trajectory_are_shown_by_turns_when_asked_for(look, synthetic, tmp_path, scheme):
    samples = [{**synthetic.trajectory(), "step": 1}, {"step": 1, "prompt": "an older run", "completion": "none"}]
    page = look(write_run_report(synthetic.write_run(tmp_path / "run", stored_samples=samples)), 390, scheme)
    view = page.locator("#samples details.tokens")
    assert view.count() == 1 and not view.locator(".pieces").first.is_visible()
    view.locator("summary").click()
    assert view.locator(".part").all_inner_texts() == [
        "turn 1, reward 0.50, advantage \u22120.25",
        "reply, not learnt",
        "turn 2, in a new sequence (2)",
        "3 tokens more, not recorded",
    ]
    drawn, replied = view.locator(".pieces").nth(0), view.locator(".pieces.replied")
    assert drawn.locator(".piece").all_inner_texts() == [synthetic.HOSTILE, " yes"]
    assert replied.locator("span").all_inner_texts() == ["\u21b5\n", "ok"] and replied.locator(".piece").count() == 0
    assert [drawn.locator(".piece").nth(i).get_attribute("title") for i in (0, 1)] == [
        "log-prob \u22125.00, 1\u202f%; advantage \u22120.25",
        "log-prob \u22120.01, 99\u202f%; advantage \u22120.25",
    ]
    colours = "[...document.querySelectorAll('.pieces .piece')].map(one => getComputedStyle(one).backgroundColor)"
    assert len({*page.evaluate(colours)}) == 3
    assert view.locator(".pieces").nth(2).locator(".piece").first.get_attribute("title").endswith("advantage +1.00")
    assert page.locator("img").count() == 0 and not page.title().startswith("owned")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_long_run_and_one_without_metrics_open(look, synthetic, tmp_path):
    long = look(write_run_report(synthetic.write_run(tmp_path / "long", metrics=synthetic.ppo_metrics(2_000))))
    assert long.locator(".plot:visible:has(svg.main-svg)").count() == 6
    empty = look(write_run_report(synthetic.write_run(tmp_path / "empty", metrics=[])))
    assert empty.locator("svg.main-svg").count() == 0 and empty.get_by_text("No step has been recorded").is_visible()
