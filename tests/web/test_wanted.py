"""Recipes from a page: what they may name, that what is checked is what runs, and copies of runs."""

import json

import pytest

from app_parts import make_run
from tunesmith.apps.cli.train import parse_train
from tunesmith.apps.cli.train import resolve as resolve_words
from tunesmith.base.config.comparison import COMPARISON
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.schema import RECIPES
from tunesmith.base.core.errors import ConfigError, RunError
from tunesmith.base.runs.folder import RunFolder
from tunesmith.collect.web.allowed import DATA, FIXED, REWARDS, Allowed, names_model
from tunesmith.collect.web.wanted import ALGORITHMS, Wanted, check, resolve, wanted_like

HARMLESS = {
    "description",
    "model.lora.target_modules",
    "run.dir",  # always the folder of the runs
    "run.name",  # a part of a folder's name, of which only letters and digits stay
    "prompts.text_column",
    "prompts.split_column",
    "reward.*.label",
    "reward.*.arguments",
    "distill.context.column",
    "distill.context.template",
    "live.reasons.template",
    "live.reasons.edit_template",
    "pairs.sources.*.name",  # letters, digits, and a few marks
    "pairs.heldout_sources.*.name",
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The folder `runs` with a run, links that lead out of it, and the files of the server; secrets are beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    (tmp_path / "evil.py").write_text("open('owned', 'w')\ndef f(completions, **_): return [1.0] * len(completions)\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts.jsonl").write_text('{"prompt": "p"}\n')
    run = make_run(tmp_path / "runs" / "run")
    (run / "evil.py").write_text("")
    (run / "samples.jsonl").write_text("")
    (run / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "runs" / ".studio").mkdir()
    (tmp_path / "runs" / ".studio" / "x.jsonl").write_text("")
    return tmp_path / "runs"


def allowed(root, *words):
    return Allowed(root, root / ".studio", words)


def problems(root, key, value, *words, algorithm="grpo"):
    """The keys that are refused for this one setting."""
    try:
        resolve(Wanted(algorithm, settings=((key, value),)), allowed(root, *words))
    except ConfigError as error:
        return [problem.partition(":")[0] for problem in error.problems]
    return []


OUTSIDE = (
    "secret.jsonl",
    "./secret.jsonl",
    "runs/../secret.jsonl",
    "runs/run/link.jsonl",
    "runs/.studio/x.jsonl",
    "runs/run/*.jsonl",
    "runs:*",
    "data/prompts.jsonl",
    "data",
    "data:train.jsonl",
    "/etc/passwd",
    "~",
    "org/name",
    "https://evil.example/x.jsonl",
    "runs/run/samples.jsonl\0",
    "x" * 5000,
)
FUNCTIONS = ("./evil.py:f", "runs/run/evil.py:f", "runs/run/evil.py", "runs/run:f", "json:loads", "os:system", "evil:f")


@pytest.mark.parametrize("value", OUTSIDE)
def test_files_and_names_outside_of_the_runs_are_refused_wherever_a_recipe_names_one(root, value):
    assert problems(root, "model.name", value) == ["model.name"]
    assert problems(root, "prompts.source", value) == ["prompts.source"]
    assert problems(root, "prompts.heldout_source", value) == ["prompts.heldout_source"]
    assert problems(root, "reward.0.source", value) == ["reward.0.source"]
    assert problems(root, "pairs.source", value, algorithm="dpo") == ["pairs.source"]
    assert problems(root, "demonstrations.source", value, algorithm="sft") == ["demonstrations.source"]
    assert problems(root, "distill.teachers.0.model", value, algorithm="distill") == ["distill.teachers.0.model"]


@pytest.mark.parametrize("value", FUNCTIONS)
def test_no_function_is_called_that_the_admin_did_not_name(root, value):
    assert problems(root, "reward.0.source", value) == ["reward.0.source"]
    assert problems(root, "reward.0.source", value, "data", str(root.parent)) == ["reward.0.source"]
    assert problems(root, "reward.0.source", value, value) == []
    assert not (root.parent / "owned").exists()


def test_a_list_of_rewards_is_checked_one_by_one(root):
    wanted = Wanted("grpo", settings=(("reward.0.source", "length"), ("reward.1.source", "os:system")))
    with pytest.raises(ConfigError, match=r"^reward\.1\.source: 'os:system' is not allowed"):
        resolve(wanted, allowed(root))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.name", "smollm2"),
        ("model.name", "tiny:llama"),
        ("model.name", "runs/run"),
        ("prompts.source", "arithmetic"),
        ("prompts.source", "runs/run/samples.jsonl"),
        ("reward.0.source", "unique_chars"),
        ("reward.0.source", "runs/run"),
        ("prompts.source", ""),
    ],
)
def test_what_is_built_in_and_the_runs_are_allowed(root, key, value):
    assert problems(root, key, value) == []


def test_what_the_admin_names_is_allowed_with_all_in_it(root, monkeypatch):
    assert problems(root, "prompts.source", "data/prompts.jsonl", "data") == []
    assert problems(root, "prompts.source", "data/prompts.jsonl", "data/prompts.jsonl") == []
    assert problems(root, "prompts.source", "org/name:train", "org/name:train") == []
    assert problems(root, "prompts.source", "org/name:test", "org/name:train") == ["prompts.source"]
    assert problems(root, "model.name", "org/name", "org/name") == []
    assert problems(root, "prompts.source", "data:train", "data") == []  # a split of a folder
    (root.parent / "data:other").mkdir()
    assert problems(root, "prompts.source", "data:other", "data") == ["prompts.source"]
    assert problems(root, "prompts.source", "data:prompts.jsonl", "data") == ["prompts.source"]
    monkeypatch.setenv("TUNESMITH_DATA", str(root.parent / "data"))
    assert problems(root, "prompts.source", "data:prompts.jsonl", "data") == []
    assert problems(root, "prompts.source", "data:../secret.jsonl", "data") == ["prompts.source"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.trust_remote_code", "true"),
        ("rollout.server_url", "http://127.0.0.1:22"),
        ("rollout.server_folder", "/tmp"),
        ("rollout.vllm_options.download_dir", "/tmp"),
        ("scale.address", "auto"),
        ("run.dir", "/tmp"),
    ],
)
def test_keys_that_run_code_write_files_or_call_other_machines_are_refused(root, key, value):
    settings = (("rollout.backend", "vllm"),) if "server" in key or "vllm" in key else (("scale.workers", "1"),)
    with pytest.raises(ConfigError) as caught:
        resolve(Wanted("grpo", settings=(*settings, (key, value))), allowed(root, "/tmp", "auto"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [key.replace(".download_dir", "")]


def test_no_text_of_a_recipe_is_forgotten():
    """A new key that holds free text must be checked, or be listed here as harmless."""
    for algorithm in ALGORITHMS:
        for key in leaves(RECIPES[algorithm]):
            pattern = key.path.replace(".0.", ".*.")
            is_free = any(word in key.type.replace("messages | text", "") for word in ("text", "mapping"))
            if is_free:
                assert names_model(pattern) or pattern in {*DATA, *REWARDS, *FIXED, *HARMLESS}, pattern


def test_flags_of_the_command_line_are_no_keys(root):
    for key in (
        "config",
        "recipe",
        "model",
        "reward",
        "steps",
        "json",
        "dry_run",
        "dry-run",
        "help",
        "algorithm",
        "-v",
    ):
        assert [found.replace("-", "_") for found in problems(root, key, "x")] == [key.replace("-", "_")], key


def test_errors_are_those_of_the_command_line(root):
    with pytest.raises(ConfigError) as caught:
        resolve(
            Wanted("grpo", settings=(("run.steps", "ten"), ("grpo.clip_lo", "0.1"), ("level", "best"))), allowed(root)
        )
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {"run.steps", "grpo.clip_lo", "level"}
    assert "did you mean grpo.clip_low?" in str(caught.value)
    with pytest.raises(ConfigError, match="is no shipped recipe"):
        resolve(Wanted("grpo", recipe="../../etc/passwd"), allowed(root))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "--config=/etc/passwd"),
        ("run.name", "-v"),
        ("run.name", "a b\n--steps 3"),
        ("run.name", "$(touch owned); 'x' \"y\" `z`"),
        ("run.name", "<img src=x onerror=alert(1)>"),
        ("reward.0.source", "[length, os:system]"),
        ("reward.0.arguments", '{"target": 3}'),
        ("optimizer.betas", "[0.8, 0.9]"),
        ("optimizer.learning_rate", "1e-6"),
        ("rollout.top_k", "=3"),
        ("level", "optimal"),
        ("prompts.split_column", "null"),
    ],
)
def test_the_command_that_runs_means_what_was_checked(root, key, value):
    wanted = Wanted("grpo", "grpo_arithmetic", (("level", "basic"), (key, value)))

    def outcome(resolved):
        try:
            recipe = resolved().recipe
            return recipe.model_dump()
        except ConfigError as error:
            return error.problems

    words = wanted.words(root)
    assert words[:2] == ["train", "grpo"]
    by_words = outcome(lambda: resolve_words("grpo", *parse_train("grpo", words[2:])))
    by_page = outcome(lambda: resolve(wanted, allowed(root, value)))
    assert by_words == by_page or "not allowed" in str(by_page)


def test_a_comparison_is_checked_as_a_run_is(root):
    def problem(**settings):
        with pytest.raises(ConfigError) as caught:
            check(Wanted(COMPARISON, settings=tuple(settings.items())), allowed(root))
        return str(caught.value)

    wanted = Wanted(COMPARISON, settings=(("model", "tiny:llama"), ("seeds", "2"), ("quick", "true")))
    check(wanted, allowed(root))
    assert wanted.words(root) == ["compare-algorithms", "--model=tiny:llama", "--seeds=2", "--quick", f"--out={root}"]
    assert "seeds" in problem(seeds="0") and "steps" in problem(steps="ten") and "out" in problem(out="/etc")
    assert "'/etc' is not allowed here, nor built in" in problem(model="/etc")
    with pytest.raises(RunError, match="no folder of"):
        check(Wanted(COMPARISON, resume="run"), allowed(root))
    made = RunFolder.create(root, "x", {"algorithm": COMPARISON, "comparison": {"model": "tiny:llama"}}).path.name
    again = Wanted(COMPARISON, resume=made)
    check(again, allowed(root))
    assert again.words(root) == ["compare-algorithms", f"--resume={root / made}"]
    with pytest.raises(ConfigError, match="leave the number of steps out"):
        check(Wanted(COMPARISON, settings=(("run.steps", "20"),), resume=made), allowed(root))


@pytest.mark.parametrize("level", ["optimal", "baseline", None])
def test_a_copy_of_a_run_has_its_recipe(root, level):
    settings = (
        *((("level", level),) if level else ()),
        ("model.name", "tiny:llama"),
        ("reward.0.source", "length"),
        ("reward.0.arguments", '{"target": 3}'),
        ("reward.1.source", "unique_chars"),
        ("reward.1.weight", "0.5"),
        ("optimizer.betas", "[0.8, 0.99]"),
        ("optimizer.learning_rate", "1e-6"),
        ("run.name", "it's mine: 1"),
        ("grpo.dual_clip", "3"),
    )
    resolved = resolve(Wanted("grpo", "grpo_arithmetic", settings), allowed(root))
    run = RunFolder.create(root, "x", resolved.recipe.model_dump(mode="json"), resolved.provenance)
    copy = wanted_like(run.path)
    assert dict(copy.settings).get("level") == level
    assert resolve(copy, allowed(root)).recipe == resolved.recipe
    assert len(copy.settings) < 40


def test_a_folder_of_anything_can_be_copied_as_text(root):
    for recipe in ("", "[]", "algorithm: [1]\nrun: 3\n", json.dumps({"algorithm": "<b>", "<img>": {"x": [{"y": 1}]}})):
        (root / "run" / "recipe.yaml").write_text(recipe)
        (root / "run" / "provenance.json").write_text('{"algorithm": 3}')
        assert all(isinstance(value, str) for pair in wanted_like(root / "run").settings for value in pair)
