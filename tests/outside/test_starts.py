"""What must be refused before a run begins, and by `--dry-run` too, with a message that names the cause."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tunesmith import train
from tunesmith.apps.cli.main import main
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    ModelError,
    RewardError,
    RunError,
    TunesmithError,
)
from tunesmith.engine.models.load import load_policy, load_tokenizer
from tunesmith.learn.trainers.run import preview

pytestmark = pytest.mark.usefixtures("own_logging")

TIES = [{"prompt": prompt, "chosen": "b", "rejected": "c", "tie": True} for prompt in ("a", "d")]
LABELS = [
    {"prompt": "a", "completion": "b", "label": True},
    {"prompt": "d", "completion": "c", "label": False},
]


def options(folder: Path) -> dict[str, Any]:
    """Arguments of a short training that writes to `folder`."""
    return {"model": "tiny:llama", "steps": 1, "progress": False, "run": {"dir": str(folder / "runs")}}


def test_rows_that_are_all_ties(tmp_path: Path) -> None:
    """The message blamed the held-out share. Reported: issue 45.26."""
    with pytest.raises(DataError, match=r"are ties, which dpo\.ties: drop leaves out.* set dpo\.ties: half"):
        train.dpo(pairs=TIES, **options(tmp_path))
    with pytest.raises(DataError, match="are ties, from which a reward model learns that everything is equal"):
        train.reward(pairs=TIES, **options(tmp_path))
    with pytest.raises(DataError, match="are ties, which have no label for kto"):
        train.dpo(pairs=TIES, dpo="kto", **options(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_kto_says_that_its_second_prompt_is_held_out(tmp_path: Path) -> None:
    """Two prompts were given, and the message asked for two. Reported: issue 45.26."""
    with pytest.raises(DataError, match=r"held out: give more prompts, or set pairs\.heldout_fraction: 0"):
        train.dpo(pairs=LABELS, dpo="kto", **options(tmp_path))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "best_of_n", "distill"])
def test_a_completion_as_long_as_the_context(algorithm: str, tmp_path: Path) -> None:
    """Every prompt was called too long. Reported: issue 45.26."""
    others = {"teacher": "tiny:llama"} if algorithm == "distill" else {"reward": "length"}
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens is 256, but the model's context holds 256 tokens"):
        getattr(train, algorithm)(prompts=["a"], rollout={"max_new_tokens": 256}, **others, **options(tmp_path))


def dry_run(folder: Path, **overrides: object) -> None:
    """What `--dry-run` of PPO with these keys does."""
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    (folder / "needs.py").write_text("def answer(completions, answer):\n    return [1.0] * len(answer)\n")
    given = {"model": "tiny:llama", "prompts": str(folder / "prompts.jsonl"), "rollout.max_new_tokens": 4}
    preview(load_recipe("ppo", overrides={**given, "run.dir": str(folder / "runs"), **overrides}).recipe)


def test_a_dry_run_finds_what_the_run_would(tmp_path: Path) -> None:
    """A column, a package and a folder that are missing were found after the start alone. Reported: issue 45.26."""
    (tmp_path / "file").touch()
    cases: list[tuple[dict[str, object], type[TunesmithError], str]] = [
        (
            {"reward": f"{tmp_path}/needs.py:answer"},
            RewardError,
            "`answer` needs `answer`, but the prompts have no such",
        ),
        ({"run.dir": str(tmp_path / "file" / "runs")}, RunError, "file cannot be written"),
    ]
    for overrides, kind, message in cases:
        with pytest.raises(kind, match=message):
            dry_run(tmp_path, **overrides)
    before = sorted(tmp_path.rglob("*"))
    dry_run(tmp_path, reward="length")
    assert sorted(tmp_path.rglob("*")) == before  # the check of the folder leaves nothing behind


@pytest.mark.parametrize(
    ("package", "keys"), [("wandb", {"run.report_to": ["wandb"]}), ("vllm", {"rollout.backend": "vllm"})]
)
def test_a_dry_run_names_a_package_that_is_missing(
    package: str, keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker, or vLLM in this process, that is not installed. Reported: issue 45.26."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=package):
        dry_run(tmp_path, reward="length", **keys)


def test_a_dry_run_says_that_the_rollout_server_does_not_answer(tmp_path: Path) -> None:
    """It was clean, and the run then waited for minutes. Reported: issue 45.26."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    given = {"model": "tiny:llama", "prompts": str(tmp_path / "prompts.jsonl"), "reward": "length"}
    server = {"rollout.backend": "vllm", "rollout.server_url": "http://127.0.0.1:9", "rollout.max_new_tokens": 4}
    found = preview(load_recipe("grpo", overrides={**given, **server, "run.dir": str(tmp_path / "runs")}).recipe)
    assert found.server.startswith("the server http://127.0.0.1:9 does not answer: GET /v1/models: ")
    assert found.server.endswith("a run waits for it for 300 s (rollout.server_timeout_s)")


def test_evaluations_without_held_out_data_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`eval_every` did nothing, in silence. Reported: issue 45.8."""
    dry_run(tmp_path, reward="length", **{"run.eval_every": 2})
    assert "run.eval_every is 2, which has no effect: no prompts are held out" in caplog.text


def tunesmith(*words: str) -> subprocess.CompletedProcess[bytes]:
    """The command `tunesmith words`, in this process: a new one takes many seconds to load what it needs."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.buffer.getvalue(), err.buffer.getvalue())  # type: ignore[attr-defined]


def test_a_seed_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    """Seeds from a clock in nanoseconds or a hash. Reported: issue 45.26."""
    for seed in (2**63, 2**64):
        with pytest.raises(ConfigError, match=r"run\.seed: .*less than or equal to 9223372036854775807"):
            train.ppo(prompts=["a"], reward="length", **{"run.seed": seed}, **options(tmp_path))
        done = tunesmith("generate", "tiny:llama", "--prompt", "a", "--seed", str(seed))
        assert done.returncode == 2
        assert b"it must be a whole number in [0, 9223372036854775807]" in done.stderr


def test_stdout_that_cannot_encode_a_character(tmp_path: Path) -> None:
    """A pipe or terminal whose encoding is ASCII. Reported: issue 45.26."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "caf\u00e9 \u2713"}\n', encoding="utf-8")
    words = ("generate", "tiny:llama", "--prompts", str(tmp_path / "rows.jsonl"), "--max-new-tokens", "2")
    command = [sys.executable, "-m", "tunesmith", *words]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=ascii_only, capture_output=True, check=False)
    assert done.returncode == 0
    assert b"caf\\xe9 \\u2713" in done.stdout


ASK = [{"role": "user", "content": "2 + 2?"}]
LOUD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
DEAF = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}<|im_end|>"
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|im_start|>' if m.content.startswith('call') else '<|im_end|>' }}{% endfor %}"
)


def answer(text: str) -> list[dict[str, str]]:
    """A completion as messages."""
    return [{"role": "assistant", "content": text}]


def model_with(folder: Path, template: str) -> str:
    """A tiny model in `folder` whose chat template is `template`."""
    loaded = load_policy("tiny:llama")
    loaded.tokenizer.chat_template = template + OPENS
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_template_that_changes_answers_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    """What is trained is not what is sampled; where no text of an answer is trained or scored, nothing is refused.
    Reported: issue 45.30.
    """
    given = {**options(tmp_path), "model": model_with(tmp_path / "model", LOUD)}
    pairs = [{"prompt": ASK, "chosen": answer("four"), "rejected": answer("five")}]
    message = r"the answer 'Yes, it is\.' is trained as 'YES, IT IS\.'"
    with pytest.raises(DataError, match=message):
        train.sft(demonstrations=[{"prompt": ASK, "completion": answer("four")}], **given)
    with pytest.raises(DataError, match=message):
        train.dpo(pairs=pairs, **given)
    with pytest.raises(DataError, match=message):
        train.reward(pairs=pairs, **given)
    assert not (tmp_path / "runs").exists()
    result = train.grpo(prompts=[ASK], reward="length", **given, **{"rollout.max_new_tokens": 4})
    assert len(result.metrics) == 1


def test_a_row_that_ends_where_generation_does_not_stop(tmp_path: Path) -> None:
    """A template closes turns that call a tool by a token of their own (Llama 3.1's `<|eom_id|>`, gpt-oss's
    `<|call|>`; here one of the three that there are), which generation_config.json does not name.
    Reported: issue 45.30.
    """
    given = {**options(tmp_path), "model": model_with(tmp_path / "model", CALLS)}
    rows = [{"prompt": ASK, "completion": answer(text)} for text in ("four", "call add(2, 2)", "call add(3, 3)")]
    message = r"row demonstrations\[1\] ends with <\|im_start\|> \(1\), at which generation does not stop"
    with pytest.raises(DataError, match=message):
        train.sft(demonstrations=rows, **given)
    cut = {"demonstrations.max_tokens": 14, "demonstrations.truncate": "right", "demonstrations.loss_on": "all"}
    result = train.sft(demonstrations=rows[:1], **given, **cut)  # its end is cut off behind such a token
    assert len(result.metrics) == 1


def test_a_reward_model_that_does_not_see_the_answer(tmp_path: Path) -> None:
    """Its chat template writes the user's turns alone. Reported: issue 45.30."""
    pairs = [{"prompt": "a", "chosen": "four", "rejected": "five"}]
    judge = train.reward(pairs=pairs, **options(tmp_path / "judge")).run_dir / "final"
    tokenizer = load_tokenizer(judge, "judge")
    tokenizer.chat_template = DEAF
    tokenizer.save_pretrained(judge)
    with pytest.raises(DataError, match=r"reward model `.*`: it (reads prompt .* without the answer|cannot read)"):
        train.grpo(prompts=[ASK], reward=str(judge), **options(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_the_tokens(tmp_path: Path) -> None:
    """People ask which ids a prompt becomes, where the loss is, and where generation stops. Reported: issue 45.30."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Four."}]}\n'
    )
    words = ("train", "sft", "--model", "tiny:llama", "--demonstrations", str(rows), "--dry-run")
    done = tunesmith(*words, "--demonstrations.heldout-fraction", "0")
    shown = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "loss on      6 of 31 ids, from 25 on: 'Four.<|im_end|>'" in shown
    assert "generation stops at <|im_end|> (2)" in shown
    assert "'<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\nFour.<|im_end|>'" in shown


def test_doctor_looks_at_the_tokens_of_a_model(tmp_path: Path) -> None:
    """The same without data, of a policy and of a reward model. Reported: issue 45.30."""
    done = tunesmith("doctor", "tiny:llama", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["problems"]) == (0, True, [])
    assert ["template", "writes answers as they are"] in found["facts"]
    loud = tunesmith("doctor", model_with(tmp_path / "model", LOUD))
    assert loud.returncode == 0
    assert b"white space around an answer is dropped" in loud.stdout
    pairs = [{"prompt": "a", "chosen": "four", "rejected": "five"}]
    judge = train.reward(pairs=pairs, **options(tmp_path / "judge")).run_dir
    read = tunesmith("doctor", str(judge), "--json")
    assert any(text.startswith("the text, encoded again, ") for _, text in json.loads(read.stdout)["facts"])
    assert tunesmith("doctor", str(tmp_path / "none")).returncode == 2


def test_a_mistyped_run_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People mistype the name of a run, and were told of the hub's cache. Reported: a tester."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "20261128-grpo-1a2b").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"there is no model folder 'runs/20261128-grpo-1a2c'.*did you mean .*1a2b"):
        load_policy(ModelSection(name="runs/20261128-grpo-1a2c"))


def test_a_run_that_goes_on_elsewhere_says_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume in another folder blamed the file of a relative path. Reported: a tester of this project."""
    rows = ('{"prompt": "a", "completion": "b"}\n', '{"prompt": "c", "completion": "d"}\n')
    (tmp_path / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run_dir = train.sft(demonstrations="rows.jsonl", **options(tmp_path)).run_dir.absolute()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with caplog.at_level("INFO", "tunesmith"), pytest.raises(DataError, match=r"rows\.jsonl does not exist"):
        train.resume(run_dir, steps=9)
    assert f"the run was started in {tmp_path}; relative paths" in caplog.text
