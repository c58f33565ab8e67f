"""Runs whose completions are drawn by a server: its death, its return, and what is kept when it stays away."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from completions_server import Clock, CompletionsServer
from recipes import PROMPTS, best_of_n_recipe, distill_recipe, grpo_recipe, ppo_recipe, training

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.core.errors import ServerError
from tunesmith.base.runs.checkpoint import list_steps
from tunesmith.engine.models.tiny import tiny_model


def low_letters(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Easy to learn."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def server() -> Iterator[CompletionsServer]:
    running = CompletionsServer(tiny_model("llama"))
    yield running
    running.stop()


def on(server: CompletionsServer, **more: Any) -> dict[str, Any]:
    return {"backend": "vllm", "server_url": server.url, "server_timeout_s": 60, **more}


def rows(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


@pytest.mark.parametrize("recipe", [ppo_recipe, grpo_recipe, best_of_n_recipe, distill_recipe])
def test_every_algorithm_that_draws_can_draw_by_a_server(
    recipe: Any, server: CompletionsServer, tmp_path: Path
) -> None:
    inputs: dict[str, Any] = {} if recipe is distill_recipe else {"rewards": [low_letters]}
    result = training(recipe(tmp_path, rollout=on(server)), prompts=PROMPTS, **inputs)
    assert len(result.metrics) == 3
    assert server.calls.count("tunesmith_load") >= 3
    setup = json.loads((result.run_dir / "setup.json").read_text())
    assert setup["engine"] == "vllm" and setup["engine_exact"] is False


def test_a_run_learns_what_it_learns_with_our_engine_and_says_how_far_the_server_is_away(
    server: CompletionsServer, tmp_path: Path
) -> None:
    def run(folder: str, **rollout: Any) -> Any:
        cfg = grpo_recipe(tmp_path / folder, rollout={"top_p": 0.9, **rollout}, run={"steps": 4})
        return training(cfg, prompts=PROMPTS, rewards=[low_letters]).metrics

    own, remote = run("own"), run("remote", **on(server))
    assert [row["rollout/weight_check_diff"] for row in remote] == pytest.approx([0.0] * 4, abs=1e-3)
    assert all(row["rollout/server_retries"] == 0 for row in remote)
    assert remote[0]["time/rollout/load_s"] > 0 and "rollout/weight_check_diff" not in own[0]
    for row in remote:  # nucleus sampling makes the sampled distribution another than the policy's
        assert row["sampling/sampling_logp_difference/mean"] > 1e-3
        assert row["rollout/logp_diff_max"] < 1e-2
    assert {name for name in own[0].keys() - remote[0].keys() if name.startswith("rollout/")} <= {
        f"rollout/{name}"
        for name in ("slots_used", "tail_s", "starved_s", "decode_steps", "prefill_tokens", "shared_tokens")
    }


def test_a_server_that_dies_in_a_run_and_comes_back_changes_nothing(server: CompletionsServer, tmp_path: Path) -> None:
    def run(folder: str) -> Any:
        cfg = grpo_recipe(tmp_path / folder, rollout=on(server, num_slots=4), run={"steps": 5})
        return training(cfg, prompts=PROMPTS, rewards=[low_letters])

    whole = run("whole")
    server.stop()
    server.start()
    server.num_draws, server.restart_after_s = 0, 0.3
    server.faults = {4: "die", 11: "restart"}  # three draws a step, of which the first proves weights
    disturbed = run("disturbed")
    samples = [[row["completion"] for row in rows(result.run_dir, "samples.jsonl")] for result in (whole, disturbed)]
    assert samples[0] == samples[1]
    assert [row["reward"] for row in disturbed.metrics] == [row["reward"] for row in whole.metrics]
    assert sum(row["rollout/server_retries"] for row in disturbed.metrics) >= 2


@pytest.mark.parametrize("while_evaluating", [False, True])
def test_a_server_that_stays_away_ends_the_run_after_a_checkpoint_and_it_goes_on_from_there(
    while_evaluating: bool, server: CompletionsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights are proven by one draw; a step draws two prompts, an evaluation one, of the next weights."""
    section = {"steps": 4, "checkpoint_every": 0, "eval_every": 1}
    prompts = {"heldout_fraction": 0.25} if while_evaluating else {}
    cfg = grpo_recipe(tmp_path, rollout=on(server), run=section, prompts=prompts)
    monkeypatch.setattr("tunesmith.engine.rollout.remote.engine.time", Clock())
    server.faults = {8: "die"} if while_evaluating else {7: "die"}
    with pytest.raises(ServerError, match="goes on with `tunesmith resume`"):
        training(cfg, prompts=PROMPTS, rewards=[low_letters])
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert list_steps(run_dir / "checkpoints") == [2]
    assert [row["step"] for row in rows(run_dir, "metrics.jsonl")] == [1, 2]
    server.start()
    result = training(cfg, run_dir, prompts=PROMPTS, rewards=[low_letters])
    assert [row["step"] for row in rows(result.run_dir, "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"server_url": "http://localhost:8000"}, "set backend to vllm"),
        ({"backend": "vllm", "server_url": "localhost:8000"}, "give one such as http://localhost:8000"),
        ({"vllm_options": {"max_model_len": 64}}, "set backend to vllm"),
    ],
)
def test_settings_of_a_server_that_do_not_fit_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPORecipe.model_validate({"rollout": section})


def test_the_live_loop_refuses_a_server() -> None:
    with pytest.raises(ValueError, match="live loop draws from several models"):
        LiveRecipe.model_validate({"rollout": {"backend": "vllm"}})
