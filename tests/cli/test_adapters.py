"""Runs that trained adapters, through every command that takes a model: what was trained by each trainer is used."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tunesmith.apps.cli.main import main
from tunesmith.base.config.sections import ModelSection
from tunesmith.engine.models.export import save_merged
from tunesmith.engine.models.load import load_policy, load_reward_model
from tunesmith.engine.models.lora import has_adapters

Capture = pytest.CaptureFixture[str]
Runs = Callable[[str], Path]

POLICIES = ("sft", "dpo", "ppo", "grpo")
TRAINERS = (*POLICIES, "reward")
IDS_BS = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0))
_DRAWN = ["--reward", "unique_chars", "--rollout.max-new-tokens", "4", "--rollout.prompts-per-step", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A function from a trainer's name to the folder of a run of adapters, made once."""
    folder = tmp_path_factory.mktemp("runs")
    pairs, demonstrations = folder / "pairs.jsonl", folder / "demonstrations.jsonl"
    prompts = [f"Film {i} was" for i in range(12)]
    rows = [{"prompt": prompt, "chosen": " a joy.", "rejected": " dull."} for prompt in prompts]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": prompt, "completion": " a joy."} for prompt in prompts]
    demonstrations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "sft": ["--demonstrations", str(demonstrations)],
        "reward": ["--pairs", str(pairs), "--pairs.heldout-fraction", "0.3"],
        "dpo": ["--pairs", str(pairs)],
        "ppo": [*_DRAWN, "--ppo.critic", "separate"],
        "grpo": [*_DRAWN, "--rollout.completions-per-prompt", "4"],
    }
    made: dict[str, Path] = {}

    def run_of(trainer: str) -> Path:
        if trainer not in made:
            words = ["--model", "tiny:llama", "--model.dtype", "float32", "--model.lora.rank", "4", "--steps", "3"]
            words += ["--optimizer.learning-rate", "1e-2", "--run.dir", str(folder / trainer), "--quiet"]
            assert main(["train", trainer, *words, *data[trainer]]) == 0
            (made[trainer],) = (folder / trainer).iterdir()
        return made[trainer]

    return run_of


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "The movie was"}\n{"prompt": "I think"}\n')
    return str(file)


def answer(capsys: Capture, words: Sequence[str]) -> dict[str, object]:
    """What a command reports with `--json`."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("trainer", "backend"), [*((name, "native") for name in POLICIES), ("dpo", "transformers")])
def test_generate_draws_from_the_adapters_and_not_from_their_base(
    trainer: str, backend: str, runs: Runs, capsys: Capture
) -> None:
    words = ["--prompt", "The movie was", "--temperature", "0", "--max-new-tokens", "4", "--backend", backend]
    of_final, of_base = (
        answer(capsys, ["generate", model, *words])["completions"][0]["raw_logps"]  # type: ignore[index]
        for model in (str(runs(trainer) / "final"), "tiny:llama")
    )
    assert len(of_final) == 4 and of_final != of_base


@pytest.mark.parametrize("trainer", POLICIES)
def test_chat_talks_to_the_adapters_beside_their_base(
    trainer: str, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", str(runs(trainer)), "--against", "base", "--max-new-tokens", "3", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(f"{runs(trainer)}: ") == shown.count("tiny:llama: ") == 2


@pytest.mark.parametrize("trainer", POLICIES)
def test_compare_judges_the_adapters_against_their_base(
    trainer: str, runs: Runs, prompts_file: str, capsys: Capture
) -> None:
    words = ["compare", "--before", "tiny:llama", "--after", str(runs(trainer)), "--prompts", prompts_file]
    facts = answer(capsys, [*words, "--scorer", str(runs("reward")), "-n", "1", "--max-new-tokens", "3"])
    assert facts["num_prompts"] == 2
    assert facts["kl_per_sequence"] != 0  # the sides are different models


@pytest.mark.parametrize("trainer", TRAINERS)
def test_export_merges_the_adapters_into_a_model_that_does_the_same(
    trainer: str, runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    dest = tmp_path / "merged"
    facts = answer(capsys, ["export", str(runs(trainer)), str(dest), "--merge"])
    assert facts["num_bytes"] == sum(file.stat().st_size for file in dest.iterdir())
    assert not (dest / "adapter_config.json").exists()
    if trainer == "reward":
        lengths_B = torch.tensor([9, 5])
        ours, merged = (load_reward_model(str(one), dtype=torch.float32) for one in (runs(trainer), dest))
        expected = ours(IDS_BS, lengths_B)
        assert torch.allclose(merged(IDS_BS, lengths_B), expected, atol=1e-5)
        theirs = AutoModelForSequenceClassification.from_pretrained(dest).eval()
        assert torch.allclose(theirs(IDS_BS[:1]).logits[0], expected[:1], atol=1e-4)
        assert expected.abs().min() > 0
        return
    ours = load_policy(ModelSection(name=str(runs(trainer))), dtype=torch.float32).model
    theirs = AutoModelForCausalLM.from_pretrained(dest, dtype=torch.float32).eval()
    base = load_policy(ModelSection(name="tiny:llama"), dtype=torch.float32).model
    assert has_adapters(ours) and not has_adapters(theirs)
    assert torch.allclose(theirs(IDS_BS).logits, ours(IDS_BS).logits, atol=1e-4)
    assert not torch.allclose(base(IDS_BS).logits, ours(IDS_BS).logits, atol=1e-3)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_export_without_merge_copies_the_adapters_alone(
    trainer: str, runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    answer(capsys, ["export", str(runs(trainer)), str(tmp_path / "copy")])
    first, second = (load_file(at / "adapter_model.safetensors") for at in (runs(trainer) / "final", tmp_path / "copy"))
    assert first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)
    assert not (tmp_path / "copy" / "model.safetensors").exists()


def test_a_policy_follows_the_adapters_of_a_reward_model(runs: Runs, tmp_path: Path, capsys: Capture) -> None:
    words = ["train", "grpo", "--model", str(runs("sft")), "--reward", str(runs("reward")), "--steps", "1"]
    words += [*_DRAWN[2:], "--rollout.completions-per-prompt", "2", "--run.dir", str(tmp_path), "--quiet"]
    assert answer(capsys, words)["summary"]["steps"] == 1  # type: ignore[index]


def test_eval_reward_judges_the_adapters_of_a_reward_model(runs: Runs, capsys: Capture) -> None:
    facts = answer(capsys, ["eval", "reward", "--model", str(runs("reward"))])
    assert facts["num_pairs"] and 0 <= float(str(facts["accuracy"])) <= 1


@pytest.mark.parametrize("command", ["generate", "chat", "compare"])
def test_a_reward_model_s_adapters_write_no_text(
    command: str, runs: Runs, prompts_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    run = str(runs("reward"))
    words = {
        "generate": ["generate", run, "--prompt", "a"],
        "chat": ["chat", run],
        "compare": ["compare", "--before", "tiny:llama", "--after", run, "--prompts", prompts_file, "--scorer=length"],
    }
    assert main(words[command]) == 2
    assert "holds the adapters of a reward model, which writes no text" in capsys.readouterr().err


def test_adapters_on_a_folder_are_found_from_everywhere(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    save_merged(runs("sft") / "final", tmp_path / "base")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.chdir(tmp_path)
    words = ["train", "sft", "--model", "base", "--model.lora.rank", "2", "--demonstrations", "d.jsonl", "--steps", "1"]
    assert main([*words, "--demonstrations.heldout-fraction", "0", "--quiet"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert answer(capsys, ["generate", str(run), "--prompt", "a", "--max-new-tokens", "2"])["completions"]
    assert answer(capsys, ["export", str(run), "merged", "--merge"])["num_bytes"]
    assert main(["resume", str(run)]) == 2
    assert "has ended" in capsys.readouterr().err
