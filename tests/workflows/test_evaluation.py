"""`compare` by name: a model against itself is a draw, and the log-probs are the models' own."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tunesmith.apps.cli.main import main
from tunesmith.apps.workflows.evaluation import evaluate_reward, run_comparison, run_recipe
from tunesmith.base.config.sections import EnvironmentSection, RewardSource
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.pairs import write_pairs
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.transformers_backend import TransformersEngine
from tunesmith.learn.environments.episodes import Conversations
from tunesmith.learn.environments.sources import opener
from tunesmith.learn.evaluation.compare import Comparison, Side, compare, recompute, summed_logps
from tunesmith.learn.rewards.scorer import Scorer

SIX = SamplingParams(max_new_tokens=6, seed=1)


def _prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "film {i} was"}}\n' for i in range(3)))
    return str(file)


def test_a_model_against_itself_is_a_draw(tmp_path: Path) -> None:
    prompts = _prompts(tmp_path)
    result = run_comparison("tiny:llama", "tiny:llama", prompts, "length", num_completions=2, sampling=SIX)
    assert result.num_improved == 0
    assert result.mean_before == result.mean_after
    assert result.kl_per_sequence == 0.0
    assert result.p_value == 1.0


def test_two_models_differ_and_every_figure_follows_from_the_samples_file(tmp_path: Path) -> None:
    prompts = _prompts(tmp_path)
    result = run_comparison("tiny:llama", "tiny:qwen2", prompts, "unique_chars", num_completions=2, sampling=SIX)
    assert result.kl_per_sequence != 0.0
    assert recompute(result.write_samples_jsonl(tmp_path / "samples.jsonl")) == result.figures()


GAME = """
class Game:
    def reset(self, seed=None):
        self.num = 0
        return "Say a word.", {}

    def step(self, action):
        self.num += 1
        if BREAKS and len(action) % 2:
            raise RuntimeError("broken")
        return "Another.", len(action) % 5 / 5, self.num == 3, False, {}
"""


def _game(tmp_path: Path, *, breaks: bool = False) -> EnvironmentSection:
    (tmp_path / "game.py").write_text(GAME.replace("BREAKS", str(breaks)))
    return EnvironmentSection(source=f"{tmp_path}/game.py:Game", max_turns=2, max_reply_tokens=16)


def _play(tmp_path: Path, after: str, *, breaks: bool = False) -> Comparison:
    environment = _game(tmp_path, breaks=breaks)
    prompts = _prompts(tmp_path)
    return run_comparison("tiny:llama", after, prompts, environment=environment, sampling=SIX, num_completions=3)


def test_a_model_that_plays_against_itself_has_the_same_trajectories(tmp_path: Path) -> None:
    result = _play(tmp_path, "tiny:llama")
    assert (result.mean_difference, result.kl_per_sequence, result.win_rate) == (0.0, 0.0, 0.5)
    assert result.interval_before == result.interval_after
    assert all(one.text_before == one.text_after for one in result.samples)
    assert "user: Another." in result.samples[0].text_before
    assert result.environment is not None
    assert result.environment["turns_before"] == 2.0
    assert result.environment["stop_reasons_after"] == {"max_turns": 1.0}


def test_two_players_differ_and_what_broke_is_left_out_on_both_sides(tmp_path: Path) -> None:
    whole, broken = _play(tmp_path, "tiny:qwen2"), _play(tmp_path, "tiny:qwen2", breaks=True)
    assert whole.num_left_out == 0 and len(whole.samples) == 9
    assert 0 < broken.num_left_out == 9 - len(broken.samples)
    kept = {(one.prompt_id, one.completion_index) for one in broken.samples}
    assert list(broken.samples) == [one for one in whole.samples if (one.prompt_id, one.completion_index) in kept]
    assert recompute(broken.write_samples_jsonl(tmp_path / "samples.jsonl")) == broken.figures()
    wins = [(one.score_after > one.score_before) + (one.score_after == one.score_before) / 2 for one in whole.samples]
    assert whole.win_rate == pytest.approx(sum(wins) / 9)


def test_summed_log_probs_of_trajectories_are_those_of_what_was_drawn(tmp_path: Path) -> None:
    loaded, section = tiny_model("llama", dtype=torch.float32), _game(tmp_path)
    talks = Conversations(opener(section), loaded.tokenizer, section, max_new_tokens=6, context=256)
    side = replace(Side.of("llama", loaded.model, loaded.tokenizer), conversations=talks)
    prompts = [Prompt(str(i), f"film {i} was") for i in range(5)]
    groups = side.draw(prompts, 2, SamplingParams(max_new_tokens=6, seed=0))
    talks.close()
    drawn = [sum(one.raw_logps) for group in groups for one in group.completions]
    assert torch.allclose(torch.tensor(side.logps(groups, 1.0)), torch.tensor(drawn), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_summed_log_probs_equal_what_the_engine_sampled_by(temperature: float) -> None:
    loaded = tiny_model("gpt2")
    prompts = [Prompt(str(i), "film " * (i + 1)) for i in range(6)]
    groups = TransformersEngine(loaded.model, loaded.tokenizer).generate(
        prompts, 2, SamplingParams(max_new_tokens=5, seed=0, temperature=temperature)
    )
    expected = [sum(completion.logps) for group in groups for completion in group.completions]
    torch.testing.assert_close(
        torch.tensor(summed_logps(language_model(loaded.model, Kernels()))(groups, temperature)),
        torch.tensor(expected),
        atol=1e-4,
        rtol=0,
    )


def test_an_exact_engine_is_believed_about_what_it_drew_itself() -> None:
    """Each side scores the other's completions alone, and every figure has the bits of four passes."""
    prompts, scorer = [Prompt(str(i), "film " * (i + 1)) for i in range(3)], Scorer([RewardSource(source="length")])
    sampling = SamplingParams(max_new_tokens=5, temperature=0.7, repetition_penalty=1.2)
    scored: list[tuple[str, bool]] = []

    def sides(*, believed: bool) -> list[Side]:
        return [side_of(name, believed=believed) for name in ("llama", "qwen2")]

    def side_of(name: str, *, believed: bool) -> Side:
        loaded = tiny_model(name)
        side = Side.of(name, loaded.model, loaded.tokenizer)

        def logps(groups: Sequence[Group], temperature: float) -> Sequence[float]:
            scored.append((name, believed))
            return side.logps(groups, temperature)

        return replace(side, logps=logps, engine=side.engine if believed else Unbelieved(side.engine))

    few, all_passes = (
        compare(*sides(believed=believed), prompts, scorer, sampling, num_completions=2) for believed in (True, False)
    )
    assert [name for name, believed in scored if believed] == ["qwen2", "llama"]
    assert len([1 for _, believed in scored if not believed]) == 4
    assert few.samples == all_passes.samples


@dataclass(frozen=True)
class Unbelieved:
    inner: Engine
    name = "stub"
    is_exact = False

    def generate(self, *arguments: Any, **options: Any) -> list[Group]:
        return self.inner.generate(*arguments, **options)


def test_a_missing_prompt_file_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"absent\.jsonl"):
        run_comparison("tiny:llama", "tiny:llama", "absent.jsonl", "length", sampling=SIX)


def votes(subject: str, count: int) -> list[Pair]:
    return [Pair(Prompt(f"p{i}", f"{subject} {i}"), " wow!!! so good!", f" meh, not {i}.") for i in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, object]]:
    """A run, the file of its pairs, and what `train reward --json` printed."""
    folder = tmp_path_factory.mktemp("reward")
    write_pairs(folder / "votes.jsonl", votes("The film", 48))
    printed = io.StringIO()
    flags = "--model tiny:llama --model.dtype float32 --run.num-threads 1 --optimizer.learning-rate 3e-3"
    flags += " --pairs.heldout-fraction 0.25 --reward-model.num-epochs 3 --evaluation.judge true"
    with contextlib.redirect_stdout(printed):
        words = ["train", "reward", "--pairs", str(folder / "votes.jsonl"), *flags.split()]
        assert main([*words, "--run.dir", str(folder / "runs"), "--json"]) == 0
    facts = json.loads(printed.getvalue().splitlines()[-1])
    return Path(facts["run_dir"]), folder / "votes.jsonl", facts


def test_training_prints_the_figures_of_the_judgement_and_keeps_all_of_them(trained) -> None:
    run, _, facts = trained
    kept = json.loads((run / "reward_quality.json").read_text())
    names = ("accuracy", "accuracy_low", "tfidf", "longer_wins")
    assert {name: facts[name] for name in names} == {name: kept[name] for name in names}
    assert facts["accuracy"] == facts["eval/accuracy"] == 1.0
    assert facts["num_pairs"] + kept["num_pairs"] == 48, "pairs to train on are counted with and without a judgement"
    assert facts["minutes"] > 0
    assert kept["num_tfidf_pairs"] == facts["num_pairs"]


def test_a_run_is_judged_on_the_pairs_that_it_held_out_with_the_figures_of_its_end(trained) -> None:
    run, file, _ = trained
    kept = json.loads((run / "reward_quality.json").read_text())
    for source in (None, str(file)):
        found = evaluate_reward(str(run), source).to_json()
        assert found["length_correlation"] == pytest.approx(kept["length_correlation"], abs=1e-6)
        others = set(kept) - {"bins", "length_correlation"}
        assert {name: found[name] for name in others} == pytest.approx({name: kept[name] for name in others})


def test_other_pairs_are_all_judged_and_the_tfidf_model_keeps_the_training_pairs(trained, tmp_path: Path) -> None:
    run, file, facts = trained
    write_pairs(tmp_path / "other.jsonl", votes("A book", 9))
    found = evaluate_reward(str(run), str(tmp_path / "other.jsonl"))
    assert (found.source, found.train_source) == (str(tmp_path / "other.jsonl"), str(file))
    assert (found.quality.num_pairs, found.quality.accuracy) == (9, 1.0)
    assert found.quality.num_tfidf_pairs >= facts["num_pairs"]


def test_a_model_that_is_no_run_is_judged_on_half_of_the_prompts(trained) -> None:
    run, file, _ = trained
    assert run_recipe(str(run / "final")) is None
    found = evaluate_reward(str(run / "final"), str(file)).quality
    assert found.num_pairs + found.num_tfidf_pairs == 48
    assert 10 < found.num_pairs < 38


def test_pairs_beyond_the_context_are_judged_where_they_are_cut(
    trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        replace(pair, prompt=Prompt(pair.prompt.id, "Long " * 400 + str(i))) for i, pair in enumerate(votes("A", 4))
    ]
    write_pairs(tmp_path / "long.jsonl", rows)
    words = ["eval", "reward", str(trained[0]), "--pairs", str(tmp_path / "long.jsonl")]
    assert main(words) == 2
    assert "`eval reward --truncate`" in capsys.readouterr().err
    assert main([*words, "--truncate", "both", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_pairs"] == 4


def test_the_command_prints_one_object_or_a_table(trained, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, facts = trained
    assert main(["eval", "reward", "--model", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == facts["accuracy"]
    assert main(["eval", "reward", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "accuracy on the" in shown
    assert "TF-IDF   fitted on" in shown


def test_a_model_of_unknown_pairs_needs_some_and_says_so(trained) -> None:
    with pytest.raises(InputError, match="name some with --pairs"):
        evaluate_reward(str(trained[0] / "final"))


def test_flags_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "reward", "--model", "x", "--num-bins", "0"]) == 2
    assert main(["eval", "reward"]) == main(["eval", "reward", "x", "--model", "x"]) == 2
    assert "--num-bins is 0" in capsys.readouterr().err


def test_a_reward_model_with_heads_is_judged_and_compares_with_pessimism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "votes.jsonl", votes("The film", 24))
    flags = "--model tiny:llama --model.dtype float32 --run.num-threads 1 --pairs.heldout-fraction 0.3"
    words = ["train", "reward", "--pairs", str(tmp_path / "votes.jsonl"), "--reward-model.heads.count", "3"]
    assert main([*words, *flags.split(), "--run.dir", str(tmp_path / "runs"), "--json"]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])["run_dir"]
    assert main(["eval", "reward", run]) == 0
    assert "on which all heads agree" in capsys.readouterr().out
    means: list[float] = []
    for pessimism in ("0", "2.5", "worst"):
        words = ["compare", "--before", "tiny:llama", "--after", "tiny:llama", "--prompts", _prompts(tmp_path)]
        words += ["--scorer", run]
        assert main([*words, "-n", "1", "--max-new-tokens", "4", "--pessimism", pessimism, "--json"]) == 0
        means.append(json.loads(capsys.readouterr().out.splitlines()[-1])["mean_before"])
    assert means[0] > means[2] > means[1]
    assert main([*words, "--pessimism", "some"]) == 2
    assert "--pessimism is some; give a number from 0 on, or worst" in capsys.readouterr().err
    plain = ["compare", "--before", "base", "--after", run, "--prompts", _prompts(tmp_path), "--pessimism", "1"]
    assert main(plain) == 2
    assert "name it with --scorer" in capsys.readouterr().err
