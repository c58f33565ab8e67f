import html
import json
import re

import pytest

from tunesmith.base.core.errors import RunError
from tunesmith.observe.reports.html import script_json, write_comparison_report, write_demo_report, write_run_report


def without_plotly(page):
    """The page without its largest script, and with the text that a reader sees unescaped."""
    return re.sub(r"<script>\s*/\*\*\n\* plotly.*?</script>", "", page, flags=re.S)


def read(path):
    return without_plotly(path.read_text(encoding="utf-8"))


def hostile_comparison(synthetic):
    drawn = synthetic.samples(openings=(synthetic.HOSTILE, synthetic.RTL), num_completions=2)
    for row in drawn:
        row["text_after"] = synthetic.HOSTILE
    return synthetic.comparison(samples=drawn, before=synthetic.HOSTILE)


def test_the_demo_page_says_what_happened(synthetic, tmp_path):
    page = html.unescape(read(write_demo_report(tmp_path / "demo.html", synthetic.demo())))
    assert "15 of 15 openings improved." in page
    assert "The rater is simulated" in page and "VADER lexicon" in page
    assert "81\u202f% of 132 votes" in page and "5.31 nats" in page and "p < 0.001" in page
    assert "97 ties left out" in page and "8 min 24 s" in page and "recompute" in page
    assert all(opening in page for opening in synthetic.OPENINGS)
    assert page.count("reached") == 5 and "missed" not in page.replace(".missed", "")


@pytest.mark.parametrize("algorithm", ["PPO", "GRPO"])
def test_the_demo_page_names_what_trained_the_policy(synthetic, tmp_path, algorithm):
    page = html.unescape(read(write_demo_report(tmp_path / "demo.html", synthetic.demo(algorithm=algorithm))))
    assert f"from votes, {algorithm} followed" in page and f"{algorithm}, step by step" in page
    assert re.search(rf"{algorithm} followed the reward model.s score in 60 steps", page)
    assert "policy-reward" in page


def test_the_demo_page_does_not_hide_a_bad_outcome(synthetic, tmp_path):
    demo = synthetic.demo()
    demo["result"] |= {
        "num_improved": 3,
        "mean_after": -0.2,
        "p_value": 0.4,
        "kl_per_sequence": 20.0,
        "distinct2_ratio": None,
    }
    page = html.unescape(read(write_demo_report(tmp_path / "demo.html", demo)))
    assert "3 of 15 openings improved." in page and "gain \u2212" in page and "better model" not in page
    assert page.count(", missed") == 3 and page.count(", unknown") == 1


def test_a_human_rater_is_not_called_simulated(synthetic, tmp_path):
    page = read(write_demo_report(tmp_path / "demo.html", synthetic.demo(rater="you, in the terminal")))
    assert "simulated" not in page and "you, in the terminal" in page


@pytest.mark.parametrize("demo", [{}, {"result": {"num_prompts": 0}, "votes": {"accuracy": None}, "comparison": {}}])
def test_a_demo_with_missing_facts_still_makes_a_page(demo, tmp_path):
    assert "What this does not show" in read(write_demo_report(tmp_path / "demo.html", demo))


def test_the_comparison_page_holds_every_figure(synthetic, tmp_path):
    compared = synthetic.comparison()
    page = html.unescape(read(write_comparison_report(tmp_path / "deep" / "c.html", compared, "A & B")))
    assert "A & B" in page and "0.861 and 0.702" in page and "two-sided, over prompts, exact" in page
    assert "0.460 to 0.630" in page and "max_new_tokens" in page


def test_the_run_page_reads_the_folder(synthetic, tmp_path):
    run = synthetic.write_run(tmp_path / "20260101-ppo", stored_samples=synthetic.run_samples())
    path = write_run_report(run)
    page = html.unescape(read(path))
    assert path == run / "report.html"
    assert "20260101-ppo" in page and "algorithm: ppo" in page and "cpu.cores" in page and "Step 60" in page
    assert [p.name for p in run.iterdir() if p.name.startswith(".")] == []


def test_a_run_without_samples_or_anything_else_still_makes_a_page(synthetic, tmp_path):
    page = read(write_run_report(synthetic.write_run(tmp_path / "run")))
    assert "This run stored no samples." in page
    (tmp_path / "empty").mkdir()
    page = read(write_run_report(tmp_path / "empty"))
    assert "No step has been recorded yet." in page


def test_a_line_cut_off_by_a_crash_and_nan_are_survived_and_mentioned(synthetic, tmp_path):
    run = synthetic.write_run(tmp_path / "run", metrics=[{"step": 1, "kl": float("nan")}, {"step": 2, "kl": 0.5}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "kl": 0.')
    page = read(write_run_report(run))
    assert "1 lines of the record could not be read" in page and "1 values were not finite" in page


def test_the_page_of_a_judged_reward_model_shows_its_calibration(synthetic, tmp_path):
    run = synthetic.write_run(tmp_path / "run")
    assert "calibration" not in read(write_run_report(run))
    bins = [
        {"low": 0.5, "high": 0.75, "num_pairs": 40, "confidence": 0.61, "accuracy": 0.55},
        {"low": 0.75, "high": 1.0, "num_pairs": 0, "confidence": None, "accuracy": None},
    ]
    heads = {"num_heads": 4, "num_agreed": 30, "accuracy_agreed": 0.6, "num_split": 10, "accuracy_split": 0.4}
    (run / "reward_quality.json").write_text(json.dumps({"num_pairs": 40, "ece": 0.06, "bins": bins, "heads": heads}))
    page = html.unescape(read(write_run_report(run)))
    assert "How sure it is, and how often right" in page and "55% at 61%" in page
    assert "On 30 of the pairs all 4 heads prefer the same side: right on 60%" in page
    (run / "reward_quality.json").write_text('{"bins": [{"confidence": null}]}')
    assert "How sure it is" not in read(write_run_report(run))


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(RunError, match="nowhere does not exist"):
        write_run_report(tmp_path / "nowhere")


def test_conversations_are_shown(synthetic, tmp_path):
    prompt = [{"role": "user", "content": "How was it?"}]
    run = synthetic.write_run(
        tmp_path / "run", stored_samples=[{"step": 1, "prompt": prompt, "completion": "Fine.", "reward": None}]
    )
    assert "user: How was it?" in read(write_run_report(run))


def test_markup_in_model_output_stays_text(synthetic, tmp_path):
    compared = hostile_comparison(synthetic)
    run = synthetic.write_run(tmp_path / synthetic.HOSTILE[:4].replace("/", ""), stored_samples=[])
    (run / "recipe.yaml").write_text(synthetic.HOSTILE)
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 1, synthetic.HOSTILE: 1.0, f"loss/{synthetic.HOSTILE}": 2.0})
    )
    (run / "samples.jsonl").write_text(
        json.dumps({"step": 1, "prompt": synthetic.HOSTILE, "completion": synthetic.HOSTILE})
    )
    pages = [
        write_comparison_report(tmp_path / "c.html", compared, synthetic.HOSTILE),
        write_demo_report(tmp_path / "d.html", synthetic.demo(comparison=compared, rater=synthetic.HOSTILE)),
        write_run_report(run),
    ]
    for path in pages:
        page = read(path)
        assert "<img" not in page and page.count("</script>") == 2
        assert "&lt;img" in page


def test_text_of_any_kind_is_written_as_utf8(synthetic, tmp_path):
    compared = synthetic.comparison(samples=synthetic.samples(openings=(synthetic.RTL, "a\ud800b"), num_completions=1))
    page = read(write_comparison_report(tmp_path / "c.html", compared, synthetic.RTL))
    assert synthetic.RTL in page and "a?b" in page


def test_the_page_names_no_address_and_has_no_inline_handler(synthetic, tmp_path):
    page = read(write_demo_report(tmp_path / "demo.html", synthetic.demo()))
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert not re.findall(r"<[^>]+\son\w+=", page) and "url(" not in page and "@import" not in page


def test_json_cannot_end_its_script_tag():
    encoded = script_json({"a": "</script><!-- & \u2028"})
    assert not set("<>&\u2028") & set(encoded) and json.loads(encoded) == {"a": "</script><!-- & \u2028"}


def benchmark_line(synthetic, **changes):
    row = {
        "task": synthetic.HOSTILE,
        "metric": "acc",
        "filter": "none",
        "num_fewshot": 5,
        "num_questions": 1200,
        "higher_is_better": True,
        "before": 0.5,
        "after": 0.4,
        "difference": -0.1,
        "low": -0.15,
        "high": -0.05,
        "p_value": 0.001,
    }
    perplexity = {**row, "task": "read", "metric": "word_perplexity", "higher_is_better": False, "low": None}
    loose = {**row, "task": "told", "filter": "loose", "low": 0.1, "high": 0.2}
    unsure = {**row, "task": "unsure", "high": 0.05}
    facts = {"lm_eval": "0.4.13", "before": "smollm2", "steps": 40, "limit": 100, "tasks": ["a"], "written": "today"}
    return {**facts, "rows": [row, perplexity, loose, unsure], **changes}


def test_the_run_page_has_the_standard_benchmarks_newest_first_and_each_question_once(synthetic, tmp_path):
    run = synthetic.write_run(tmp_path / "run")
    single = {"task": "single", "metric": "acc", "after": 0.125, "stderr_after": 0.03}
    lines = [
        benchmark_line(synthetic, written="yesterday"),
        {"tasks": ["b"], "rows": [single], "written": "noon"},
        benchmark_line(synthetic),
        {"tasks": ["c"], "rows": "damaged"},
    ]
    (run / "benchmarks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = read(write_run_report(run))
    assert synthetic.HOSTILE not in page and 'href="#benchmarks"' in page and "yesterday" not in page
    caption = "lm-eval 0.4.13, before: smollm2, after 40 steps, the first 100 questions of each task, today"
    assert page.index(f"<caption>{caption}") < page.index("<caption>lm-eval of an unknown version, noon")
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    cells = [[html.unescape(cell) for cell in row] for row in rows]
    by_task = {row[0]: row for row in cells if row}
    asked = ["word_perplexity, lower is better", "5", "1\u202f200"]
    assert by_task["read"][1:] == [*asked, "0.500", "0.400", "\u22120.100", "\u2013", "\u2013"]
    assert by_task["told"][1] == "acc (loose)" and by_task["told"][-2:] == ["+0.100 to +0.200", "better"]
    assert by_task["unsure"][-1] == "equal within the interval"
    assert by_task["single"] == ["single", "acc", "\u2013", "\u2013", "0.125", "0.030"]
    assert next(row for row in cells if row[-1:] == ["worse"])[0].startswith(synthetic.HOSTILE[:4])


def test_a_run_without_benchmarks_says_nothing_of_them(synthetic, tmp_path):
    assert "benchmarks" not in read(write_run_report(synthetic.write_run(tmp_path / "run")))
