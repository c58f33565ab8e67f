"""The optimisation report: what its script measures on a tiny model, and what it writes."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.opt_picture import Pair, picture, table
from benchmarks.opt_profile import PARTS, Call, Profile, RecordedKernels, _found, parts_named
from benchmarks.opt_report import main, with_tables
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm.api import add_rms_norm


@pytest.fixture(scope="module")
def report(require, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a smoke run wrote."""
    require("c++", "g++", "clang++")
    out = tmp_path_factory.mktemp("report")
    threads = torch.get_num_threads()
    assert main(["--quick", "--out", str(out)]) == 0
    assert torch.get_num_threads() == threads
    return out


def test_both_steps_take_fewer_calls_with_our_kernels(report: Path) -> None:
    steps = json.loads((report / "opt_report.json").read_text())["steps"]
    assert list(steps) == ["decode", "update"]
    for step in steps.values():
        before, after = step["before"], step["after"]
        assert 0 < after["calls"] < before["calls"] / 2
        for side in (before, after):
            assert side["calls"] == sum(part["calls"] for part in side["parts"].values())
            inside_ms = sum(part["ms"] for part in side["parts"].values())
            assert side["profile_ms"] == pytest.approx(inside_ms + side["between_calls_ms"])
            assert side["seconds"] != 0


def test_work_is_found_in_its_part_and_what_is_backward_too(report: Path) -> None:
    steps = json.loads((report / "opt_report.json").read_text())["steps"]
    layers = 2
    decode, update = steps["decode"]["after"]["parts"], steps["update"]["after"]["parts"]
    assert decode["attention"]["calls"] >= layers and decode["sampler"]["calls"] > 0
    assert decode["loss"]["calls"] == decode["optimizer"]["calls"] == 0
    assert update["sampler"]["calls"] == 0
    for part in ("linear maps", "output layer", "attention", "norms", "activation", "loss", "optimizer"):
        assert update[part]["calls"] > 0, part
    # 7 linear maps in a layer: a product forward, and two backward.
    assert update["linear maps"]["calls"] >= 3 * 7 * layers
    assert steps["update"]["before"]["parts"]["other"]["calls"] < 0.2 * steps["update"]["before"]["calls"]


def test_the_report_shows_the_figures_that_were_measured(report: Path) -> None:
    text = (report / "opt_report.md").read_text()
    steps = json.loads((report / "opt_report.json").read_text())["steps"]
    for step in steps.values():
        assert f"{step['before']['calls']:,} operator calls before, {step['after']['calls']:,} after" in text
    assert "images/timeline.svg" in text


def test_the_picture_is_small_and_has_a_bar_for_each_step(report: Path) -> None:
    path = report / "images" / "timeline.svg"
    assert path.stat().st_size < 200_000
    root = ElementTree.parse(path).getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts.count("before (torch)") == texts.count("after (auto)") == 2


def test_a_picture_of_very_many_calls_stays_small() -> None:
    parts = [name for name, _ in PARTS]
    calls = tuple(Call(parts[i % len(parts)], 2.0 * i, 1.0) for i in range(100_000))
    pair = Pair("Many", Profile(calls, 200_000.0), Profile(calls[:7], 20.0), 0.2, 2e-5)
    text = picture([pair])
    assert len(text) < 200_000
    assert "<path" in text  # and shows what took most of each place
    ElementTree.fromstring(text)
    assert "| 100,000 | 7 |" in table(pair)


def test_bars_stand_where_the_calls_were() -> None:
    calls = (Call("norms", 0.0, 25.0), Call("norms", 25.0, 25.0), Call("loss", 75.0, 25.0))
    text = picture([Pair("One", Profile(calls, 100.0), Profile((), 50.0), 1.0, 1.0)])
    lefts = [float(found) for found in re.findall(r"d='M([\d.]+) ", text)]
    widths = [float(found) for found in re.findall(r"d='M[\d.]+ \d+h([\d.]+)", text)]
    assert widths == [370.0, 185.0] and lefts[1] - lefts[0] == pytest.approx(555.0)  # of 740; neighbours are one bar


def test_a_missing_mark_is_an_error() -> None:
    marked = "a <!-- begin: x -->old<!-- end: x --> b"
    assert with_tables(marked, {"x": "new"}) == "a <!-- begin: x -->\n\nnew\n\n<!-- end: x --> b"
    with pytest.raises(ValueError, match="begin: y"):
        with_tables(marked, {"y": "new"})


def test_names_are_given_back_when_the_profile_ends() -> None:
    places = [place for _, found in PARTS for place in found]
    before = [_found(place)[2] for place in places]
    with parts_named():
        assert all(_found(place)[2] is not function for place, function in zip(places, before, strict=True))
    assert all(_found(place)[2] is function for place, function in zip(places, before, strict=True))


def test_functions_in_cpp_show_in_a_profile_and_give_the_same(require) -> None:
    require("c++", "g++", "clang++")
    x_RH, weight_H = torch.randn(3, 40), torch.randn(40)
    expected = add_rms_norm(x_RH, None, weight_H, 1e-5, kernels=Kernels("native")).normed_RH
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        found = add_rms_norm(x_RH, None, weight_H, 1e-5, kernels=RecordedKernels("native")).normed_RH
    assert torch.equal(found, expected)
    assert any(event.name.startswith("native:") for event in recorded.events())
