"""The commands in this process, on tiny random models."""

import io
import json
import os
from pathlib import Path

import pytest

from tunesmith import train
from tunesmith.apps.cli import doctor
from tunesmith.apps.cli.main import main
from tunesmith.apps.cli.output import as_plain, reporting
from tunesmith.base.core.log import visible
from tunesmith.base.runs.folder import RUN_ID

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished PPO run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    words = ["--model", "tiny:llama", "--reward", "length", "--steps", "2", "--rollout.max_new_tokens", "4"]
    words += ["--rollout.prompts_per_step", "2", "--run.dir", str(folder / "runs"), "--quiet"]
    assert main(["train", "ppo", *words]) == 0
    return next((folder / "runs").iterdir())


def answer(capsys: Capture) -> dict[str, object]:
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_a_run_stores_what_was_given_and_where_it_came_from(run_dir: Path) -> None:
    provenance = json.loads((run_dir / "provenance.json").read_text())
    assert provenance["run.steps"] == "command line --steps"
    assert provenance["reward.0.source"] == "command line --reward"
    assert provenance["ppo.gamma"] == "default"


def test_train_with_json_prints_one_object_though_the_reward_prints(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "r.py").write_text(
        "def fn(completions, **kwargs):\n    print('noise')\n    return [1.0] * len(completions)\n"
    )
    words = ["--model", "tiny:llama", "--reward", f"{tmp_path}/r.py:fn", "--steps", "1", "--rollout.max_new_tokens=4"]
    words += ["--rollout.prompts_per_step", "2", "--run.dir", str(tmp_path / "runs"), "--json"]
    assert main(["train", "ppo", *words]) == 0
    facts = answer(capsys)
    assert Path(str(facts["run_dir"])).is_dir()
    assert facts["summary"]["steps"] == 1  # type: ignore[index]


def test_a_dry_run_says_everything_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "ppo", "--model", "tiny:llama", "--reward", "length", "--dry-run"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for part in ("# command line --model", "# default", "parameters", "MB estimated", "items to train on, ", "dry run"):
        assert part in shown
    assert main([*words, "--json"]) == 0
    facts = answer(capsys)
    assert facts["provenance"]["model.name"] == "command line --model"  # type: ignore[index]
    assert facts["num_parameters"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_with_tools_shows_what_the_first_turn_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "grpo", "--model", "tiny:llama", "--rollout.max-new-tokens", "8", "--dry-run", "--tools"]
    assert main([*words, "calculator"]) == 2
    error = capsys.readouterr().err
    assert "no prompt leaves room behind it" in error and "the descriptions of the tools" in error
    Path("mine.py").write_text("class Game:\n    def reset(self, **row):\n        return ' Guess.'\n")
    words = [*words[:-1], "--environment", "./mine.py:Game", "--prompts", "prompts.jsonl"]
    Path("prompts.jsonl").write_text('{"prompt": "A number."}\n')
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "prompt, as the first turn reads it:" in shown and "A number. Guess." in shown
    assert (
        "available, fits: weights" in shown
        and "of full length" in shown
        and "assumed  the longest trajectories, 8 turns of 8 tokens" in shown
    )
    assert main([*words, "--json"]) == 0
    facts = answer(capsys)
    assert facts["least_seconds"] > 0  # type: ignore[operator]


def test_preferences_are_learnt_directly_shown_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Film {i} was", "chosen": " a joy.", "rejected": " dull."} for i in range(12)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "x", "chosen": 3}]))
    words = ["train", "dpo", "--model", "tiny:llama", "--pairs", "mine.jsonl", "--steps", "2", "--skip-bad"]
    words += ["--pairs.heldout-fraction", "0.3", "--dpo.reference", "live"]
    assert main([*words, "--dry-run", "--json"]) == 0
    shown = answer(capsys)
    assert shown["num_items"] + shown["num_heldout"] == 12  # type: ignore[operator]
    assert shown["sample"] == "prompt: Film 0 was\nchosen:  a joy.\nrejected:  dull."
    assert {"weights", "optimizer", "reference", "activations", "logits"} == set(shown["memory_gb"])  # type: ignore[arg-type]
    assert main([*words, "--json"]) == 0
    facts = answer(capsys)
    assert {"eval/rewards/accuracies", "eval/rewards/margins", "num_ties"} <= facts.keys()
    assert main(["resume", str(facts["run_dir"]), "--run.steps", "3", "--json"]) == 0
    assert answer(capsys)["steps"] == 3
    assert main(["train", "dpo", "--model", "tiny:llama", "--pairs", "mine.jsonl", "--dpo.loss", "robust"]) == 2
    assert "robust needs label_smoothing" in capsys.readouterr().err


def test_a_run_with_an_id_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv(RUN_ID, "")  # put back at the end
    words = ["train", "grpo", "--model", "tiny:llama", "--reward", "unique_chars", "--run.dir", str(tmp_path), "--json"]
    words += ["--rollout.prompts-per-step", "2", "--rollout.completions-per-prompt", "2", "--run-id", "job_7"]
    words += ["--rollout.max-new-tokens", "4"]
    assert main([*words, "--steps", "1"]) == 0
    first = answer(capsys)
    assert str(first["run_dir"]).endswith("-grpo-job_7")
    assert not os.environ[RUN_ID]  # the next run of this process has another
    assert main([*words, "--steps", "1"]) == 0
    assert answer(capsys) == first  # it has ended, so it is only read
    assert main([*words, "--steps", "2"]) == 0
    more = answer(capsys)
    assert (more["run_dir"], more["steps"]) == (first["run_dir"], 2)
    assert main([*words, "--steps", "2", "--rollout.max-new-tokens", "5"]) == 2
    assert "rollout.max_new_tokens: 4 -> 5" in capsys.readouterr().err
    assert main([*words, "--run-id", "a/b"]) == 2
    assert "letters, digits and _" in capsys.readouterr().err
    given = {"run.dir": str(tmp_path), "rollout": {"prompts_per_step": 2, "completions_per_prompt": 2}}
    given |= {"rollout.max_new_tokens": 4, "run_id": "job_7", "progress": False}
    result = train.grpo(model="tiny:llama", reward="unique_chars", steps=3, **given)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert [str(path) for path in tmp_path.iterdir()] == [first["run_dir"]]


def test_supervised_fine_tuning_trains_shows_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Film {i} was", "completion": " a joy."} for i in range(12)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", "sft", "--model", "tiny:llama", "--demonstrations", "mine.jsonl", "--steps", "2"]
    words += ["--demonstrations.heldout-fraction", "0.3"]
    assert main([*words, "--dry-run", "--json"]) == 0
    shown = answer(capsys)
    assert shown["num_items"] + shown["num_heldout"] == 12  # type: ignore[operator]
    assert shown["sample"] == "prompt: Film 0 was\ncompletion:  a joy."
    assert {"weights", "optimizer", "activations", "logits"} == set(shown["memory_gb"])  # type: ignore[arg-type]
    assert main([*words, "--json"]) == 0
    facts = answer(capsys)
    assert facts["eval/loss"] < facts["eval/loss_before"]  # type: ignore[operator]
    assert main(["resume", str(facts["run_dir"]), "--run.steps", "3", "--json"]) == 0
    assert answer(capsys)["steps"] == 3
    assert main(["runs", "show", str(facts["run_dir"])]) == 0
    assert "mine.jsonl" in capsys.readouterr().out
    assert main(["recipes", "keys", "sft"]) == 0
    assert "demonstrations.loss_on" in capsys.readouterr().out


def test_generate_prints_rows_that_hold_ids_and_log_probs(capsys: Capture) -> None:
    words = ["generate", "--model", "tiny:llama", "--prompt", "a", "--prompt", "b", "-n", "2", "--max-new-tokens", "3"]
    assert main([*words, "--json"]) == 0
    first = answer(capsys)
    rows = first["completions"]
    assert isinstance(rows, list)
    assert [row["prompt"] for row in rows] == ["a", "a", "b", "b"]
    assert all(len(row["token_ids"]) == len(row["logps"]) for row in rows)
    assert main([*words, "--json"]) == 0
    assert answer(capsys) == first


def test_generate_never_overwrites(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.jsonl"
    words = ["generate", "tiny:llama", "--prompt", "a", "--chat", "--max-new-tokens", "3", "--out", str(out)]
    assert main(words) == 0
    text = out.read_text()
    assert json.loads(text)["prompt"] == [{"role": "user", "content": "a"}]
    assert main(words) == 2
    assert "exists and is kept" in capsys.readouterr().err
    assert out.read_text() == text


def test_chat_reads_lines_from_a_pipe(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/unknown\n/reset\nagain\n/quit\nnever\n"))
    assert main(["chat", str(run_dir), "--against", "base", "--max-new-tokens", "3", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("tiny:llama: ") == 2
    assert captured.out.count(f"{run_dir}: ") == 2
    assert "/unknown is no command" in captured.err


def test_compare_prints_a_table_or_json(tmp_path: Path, capsys: Capture) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "The movie was"}\n{"prompt": "I think"}\n')
    words = ["compare", "--before", "tiny:llama", "--after", "tiny:gpt2", "--prompts", str(prompts)]
    words += ["--scorer", "length", "-n", "2", "--max-new-tokens", "3"]
    assert main(words) == 0
    assert "The movie was" in capsys.readouterr().out
    assert main([*words, "--json", "--html", str(tmp_path / "c.html")]) == 0
    assert answer(capsys)["num_prompts"] == 2
    assert (tmp_path / "c.html").stat().st_size > 1000


def test_export_copies_a_model_that_loads(run_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    from transformers import AutoModelForCausalLM

    dest = tmp_path / "new" / "model"
    assert main(["export", str(run_dir), str(dest), "--json"]) == 0
    assert answer(capsys)["dest"] == str(dest)
    assert AutoModelForCausalLM.from_pretrained(dest).num_parameters() > 0
    assert main(["export", str(run_dir), str(dest)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["export", str(run_dir), str(run_dir / "final" / "x")]) == 2


def test_export_copies_adapters_and_merges_them(tmp_path: Path, capsys: Capture) -> None:
    from transformers import AutoModelForCausalLM

    from tunesmith.base.config.sections import ModelSection
    from tunesmith.engine.models.export import ModelCard, save_final
    from tunesmith.engine.models.load import load_policy

    loaded = load_policy(ModelSection.model_validate({"name": "tiny:llama", "lora": {"rank": 2}}))
    run = tmp_path / "run"
    save_final(loaded.model, loaded.tokenizer, run / "final", ModelCard("tiny:llama", "GRPO"))
    assert main(["export", str(run), str(tmp_path / "adapters")]) == 0
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_bytes"] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = tmp_path / "plain"
    plain.mkdir()
    (tmp_path / "merged").rename(plain / "final")
    assert main(["export", str(plain), str(tmp_path / "again"), "--merge"]) == 2
    assert "holds no adapters" in capsys.readouterr().err


def test_export_refuses_what_is_no_whole_model(run_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(run_dir, broken)
    weights = broken / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert main(["export", str(broken), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    weights.unlink()
    assert main(["export", str(broken), str(tmp_path / "out")]) == 2
    assert "model.safetensors missing" in capsys.readouterr().err
    shutil.rmtree(broken / "final")
    assert main(["export", str(broken), str(tmp_path / "out")]) == 2
    assert "its training did not end" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_recipes_are_listed_shown_and_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "ls", "--json"]) == 0
    assert {"name", "algorithm", "description"} == set(answer(capsys)["recipes"][0])  # type: ignore[index]
    assert main(["recipes", "cp", "scratch_ppo"]) == 0
    assert capsys.readouterr().out == "scratch_ppo.yaml\n"
    assert main(["recipes", "show", "scratch_ppo"]) == 0
    assert capsys.readouterr().out == (tmp_path / "scratch_ppo.yaml").read_text()
    assert main(["recipes", "cp", "scratch_ppo"]) == 2
    assert main(["recipes", "cp", "scratch_ppo", "mine.yaml"]) == 0
    assert main(["validate", "mine.yaml", "scratch_ppo"]) == 0
    assert main(["recipes", "cp", "scratch_ppo", "none/mine.yaml"]) == 2


def test_validate_lists_all_problems_of_all_files(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: ppo\nrollout: {max_new_tokenz: 1}\noptimizer: -1\n")
    (tmp_path / "b.yaml").write_text("a: [\n")
    words = ["validate", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "ppo_sentimint", "ppo_sentiment"]
    assert main([*words, "--json"]) == 2
    facts = answer(capsys)
    assert facts["num_wrong"] == 3
    problems = [recipe["problems"] for recipe in facts["recipes"]]  # type: ignore[attr-defined]
    assert [len(found) for found in problems] == [2, 1, 1, 0]
    assert "did you mean ppo_sentiment?" in problems[2][0]


@pytest.mark.nightly
def test_doctor_reads_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--json"]) == 0
    findings = {finding["name"]: finding for finding in answer(capsys)["findings"]}  # type: ignore[attr-defined]
    assert {"system", "python", "torch", "cpu", "bf16", "memory", "disk", "compiler", "smollm2"} <= set(findings)
    assert all(finding["advice"] for finding in findings.values() if finding["status"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_is_untested(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(doctor, "_ask_probe", lambda *_: [])  # processes that import torch
    assert main(["doctor"]) == 0
    assert "only Linux x86-64 is tested" in capsys.readouterr().out


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b[31mb\u202ec\n") == "a\\x1b[31mb\\u202ec\n"


def test_json_holds_no_nan_and_keeps_other_prints_away(capsys: Capture) -> None:
    with reporting(as_json=True) as output:
        print("noise")
        output.say("for people")
        output.finish({"a": float("nan"), "b": Path("x"), "c": (1, True, None)})
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ('{"a": null, "b": "x", "c": [1, true, null]}\n', "noise\n")
    assert as_plain({1: float("inf")}) == {"1": None}
