"""The pages of profiles in a real browser: everything is drawn, nothing complains, nothing is loaded."""

from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a profile, and that of two."""
    folder = tmp_path_factory.mktemp("pages")
    words = ["profile", "ppo", "--model", "tiny:llama", "--reward", "unique_chars", "--run.dir", str(folder / "runs")]
    words += ["--rollout.max-new-tokens", "48", "--rollout.prompts-per-step", "16", "--quiet"]
    assert main([*words, "--steps", "2"]) == 0
    assert main([*words, "--steps", "1", "--rollout.num-slots", "2"]) == 0
    first, second = sorted((folder / "runs").iterdir())
    assert main(["profile", "--compare", str(first), str(second), "--html", str(folder / "compared.html")]) == 0
    return {"profile": first / "profile" / "profile.html", "compared": folder / "compared.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_timeline_has_stages_threads_slots_and_memory(look, pages, scheme):
    page = look(pages["profile"], scheme=scheme)
    timeline = page.locator("#plot-timeline")
    assert timeline.locator("g.bars path").count() > 5
    shown = timeline.text_content()
    for name in ("stages", "MainThread", "engine slots in use", "resident memory"):
        assert name in shown
    assert "rollout" in timeline.locator("g.bars").first.text_content()


def test_the_flame_graph_shows_the_trainer_and_zooms(look, pages):
    page = look(pages["profile"])
    graph = page.locator("#plot-flame")
    assert "PolicyStep.step" in graph.text_content()
    boxes = graph.locator("g.slice")
    before = boxes.count()
    graph.locator("g.slice", has_text="generate").first.click()
    page.wait_for_function(f"document.querySelectorAll('#plot-flame g.slice').length != {before}")


def test_every_picture_has_its_numbers_as_a_table(look, pages):
    page = look(pages["profile"])
    assert page.locator(".plot").count() == 2
    page.locator("figure details summary").first.click()
    assert page.locator("figure table").first.get_by_text("rollout", exact=True).first.is_visible()
    operators = page.get_by_role("region", name="operators.json: operators")
    assert operators.get_by_text("aten::").count() > 5


def test_two_profiles_are_drawn_beside_each_other(look, pages):
    page = look(pages["compared"])
    assert page.locator("#plot-stages g.trace.bars").count() == 2
    assert page.get_by_role("region", name="Time in a step").get_by_text("rollout", exact=True).count() == 1


@pytest.mark.parametrize("name", ["profile", "compared"])
def test_nothing_sticks_out_of_a_narrow_screen(look, pages, name):
    page = look(pages[name], width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
