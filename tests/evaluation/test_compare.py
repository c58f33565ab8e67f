import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from rich.console import Console

from tunesmith.base.core.errors import InputError, ModelError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.learn.evaluation.compare import Side, compare, recompute
from tunesmith.learn.evaluation.tables import comparison_table
from tunesmith.observe.reports.html import write_comparison_report

VOCABULARY = 12
SAMPLING = SamplingParams(max_new_tokens=10)


class UnigramEngine:
    """A real sampler over a unigram model: token 0 ends a completion."""

    name = "stub"
    is_exact = False

    def __init__(self, logits):
        self.logps = np.asarray(logits, dtype=float) - math.log(np.exp(logits).sum())
        self.seeds = []

    def generate(self, prompts, n, sampling):
        self.seeds.append(sampling.seed)
        random = np.random.default_rng(sampling.seed)
        return [self._group(prompt, n, sampling, random) for prompt in prompts]

    def _group(self, prompt, n, sampling, random):
        completions = []
        for _ in range(n):
            noise = random.random(sampling.max_new_tokens)
            ids = np.searchsorted(np.exp(self.logps).cumsum(), noise).clip(max=VOCABULARY - 1).tolist()
            stop = ids.index(0) + 1 if 0 in ids else len(ids)
            ids = ids[:stop]
            text = " ".join(f"w{token}" for token in ids if token)
            finish = "stop" if ids[-1] == 0 else "length"
            logps = tuple(self.logps[ids].tolist())
            completions.append(Completion(tuple(ids), logps, logps, text, finish))
        return Group(prompt, (1, 2), tuple(completions), weight_version=0)

    def sums(self, groups, temperature):
        return [float(self.logps[list(c.token_ids)].sum()) for group in groups for c in group.completions]


@dataclass(frozen=True)
class Scores:
    total_PG: np.ndarray

    @property
    def valid_PG(self):
        return np.ones_like(self.total_PG, dtype=bool)


class CountsHighTokens:
    def score(self, groups):
        return Scores(np.array([[sum(t > 6 for t in c.token_ids) / 10 for c in g.completions] for g in groups]))


def sides():
    before, after = UnigramEngine(np.zeros(VOCABULARY)), UnigramEngine(np.linspace(-1, 1, VOCABULARY))
    return Side("base", before, before.sums), Side("tuned", after, after.sums)


PROMPTS = [Prompt(id=f"films:{i}", content=f"The film number {i} was") for i in range(15)]


@pytest.fixture(scope="module")
def comparison():
    return compare(*sides(), PROMPTS, CountsHighTokens(), SAMPLING, num_completions=8, seed=3)


def test_figures_follow_from_the_definitions(comparison):
    scores = np.array([[s.score_before, s.score_after] for s in comparison.samples]).reshape(15, 8, 2).mean(axis=1)
    assert comparison.mean_before == pytest.approx(scores[:, 0].mean())
    assert comparison.median_after == pytest.approx(np.median(scores[:, 1]))
    assert comparison.num_improved == int((scores[:, 1] > scores[:, 0]).sum())
    assert comparison.mean_difference == pytest.approx((scores[:, 1] - scores[:, 0]).mean())
    assert comparison.interval[0] < comparison.mean_difference < comparison.interval[1]
    assert 0 < comparison.p_value < 0.01 and comparison.p_value_exact
    assert comparison.distinct2_ratio == pytest.approx(comparison.distinct2_after / comparison.distinct2_before)
    assert [row.prompt for row in comparison.rows] == [prompt.content for prompt in PROMPTS]


def test_kl_is_the_mean_log_ratio_on_the_samples_after_and_near_the_true_kl(comparison):
    before, after = (side.engine for side in sides())
    ratio = after.logps - before.logps
    sums = [ratio[list(s.token_ids_after)].sum() for s in comparison.samples]
    assert comparison.kl_per_sequence == pytest.approx(np.mean(sums))
    per_token = float((np.exp(after.logps) * ratio).sum())
    assert comparison.kl_per_sequence == pytest.approx(per_token * comparison.mean_tokens_after, rel=0.25)


def test_both_sides_get_the_same_seed_whatever_the_sampling_says():
    before, after = sides()
    compare(before, after, PROMPTS[:2], CountsHighTokens(), replace(SAMPLING, seed=99), num_completions=2, seed=4)
    assert before.engine.seeds == after.engine.seeds == [4]


def test_a_model_against_itself_is_no_change():
    side, _ = sides()
    same = compare(side, side, PROMPTS, CountsHighTokens(), SAMPLING, num_completions=3)
    assert (same.num_improved, same.mean_difference, same.p_value, same.kl_per_sequence) == (0, 0.0, 1.0, 0.0)
    assert same.distinct2_ratio == 1.0


def test_every_figure_is_recomputed_from_the_samples_file(comparison, tmp_path):
    path = comparison.write_samples_jsonl(tmp_path / "deep" / "samples.jsonl")
    figures = recompute(path)
    assert figures == comparison.figures()
    assert {
        "num_improved",
        "mean_before",
        "p_value",
        "interval",
        "kl_per_sequence",
        "distinct2_ratio",
        "rows",
    } <= figures.keys()


def test_a_changed_samples_file_changes_the_figures(comparison, tmp_path):
    path = comparison.write_samples_jsonl(tmp_path / "samples.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["score_after"] += 1.0
    path.write_text("\n".join(map(json.dumps, rows)))
    assert recompute(path)["mean_after"] == pytest.approx(comparison.mean_after + 1 / 120)


def test_json_holds_the_samples_and_round_trips(comparison):
    data = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert len(data["samples"]) == 120 and data["sampling"]["seed"] == 3
    sample = data["samples"][0]
    assert {
        "prompt",
        "prompt_token_ids",
        "text_before",
        "text_after",
        "score_after",
        "logp_after_by_before",
    } <= sample.keys()


def test_odd_text_survives_the_file(tmp_path):
    side, other = sides()
    prompts = [Prompt("a", "שלום \u2028 😀 \ud800"), Prompt("b", ({"role": "user", "content": "Wie geht's?"},))]
    comparison = compare(side, other, prompts, CountsHighTokens(), SAMPLING, num_completions=2)
    path = comparison.write_samples_jsonl(tmp_path / "samples.jsonl")
    assert len(path.read_text().split("\n")) == 5
    assert recompute(path) == comparison.figures()


def test_prompts_with_the_same_id_stay_apart():
    twins = [Prompt("x", "one"), Prompt("x", "two")]
    assert compare(*sides(), twins, CountsHighTokens(), SAMPLING, num_completions=2).num_prompts == 2


def test_log_probs_may_come_as_a_table_of_prompts_by_completions(comparison):
    tables = [
        replace(side, logps=lambda groups, t, side=side: np.reshape(side.logps(groups, t), (15, 8))) for side in sides()
    ]
    same = compare(*tables, PROMPTS, CountsHighTokens(), SAMPLING, num_completions=8, seed=3)
    assert same.kl_per_sequence == comparison.kl_per_sequence


def test_sides_without_bigrams_have_no_distinct_ratio():
    before, after = sides()
    comparison = compare(
        before, after, PROMPTS[:2], CountsHighTokens(), SamplingParams(max_new_tokens=1), num_completions=2
    )
    assert comparison.distinct2_ratio is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompts": []}, InputError, "0 prompts"),
        ({"num_completions": 0}, InputError, "0 completions"),
        ({"after": replace(sides()[1], logps=lambda *_: [0.0, -math.inf])}, ModelError, "-inf to completion 1"),
    ],
)
def test_bad_input_is_named(change, error, message):
    before, after = sides()
    call = {
        "before": before,
        "after": after,
        "prompts": PROMPTS[:1],
        "scorer": CountsHighTokens(),
        "num_completions": 2,
    } | change
    with pytest.raises(error, match=message):
        compare(sampling=SAMPLING, **(call | change))


def test_the_text_table_shows_every_prompt_and_figure_and_no_control_characters(comparison):
    rows = (replace(comparison.rows[0], prompt="[red]\x1b[31mevil\u202e"), *comparison.rows[1:])
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(replace(comparison, rows=rows)))
    text = console.export_text(styles=False)
    assert "[red][31mevil" in text and not set("\x1b\u202e") & set(text)
    assert all(f"The film number {i} was" in text for i in range(1, 15))
    assert "improved" in text and "distinct-2" in text and "w11" in text


def test_the_report_reads_what_the_comparison_writes(comparison, tmp_path):
    page = write_comparison_report(tmp_path / "c.html", comparison.to_json(), "base against tuned").read_text()
    assert f"{comparison.num_improved} of 15" in page and "8 completions of each" in page
    assert comparison.samples[0].text_after in page and 'id="plot-prompts"' in page and 'id="plot-scores"' in page
