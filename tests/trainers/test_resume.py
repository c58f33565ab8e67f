"""A run that was interrupted ends as one that was not: the same weights, metrics and tokens, bit for bit."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import jobs
import pytest
from jobs import TRAINERS, forked, go_on, outcome, the_run, train

from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.checkpoint import list_steps
from tunesmith.base.runs.listing import read_run
from tunesmith.learn.trainers.resume import as_begun

POLICY = (  # all that policies share; GRPO has only its own below
    *("rollout", "reward", "reward/noisy", "old_policy", "reference", "update/forward", "update/backward"),
    *("update/optimizer", "evaluate", "log/samples", "log/findings"),
)
SPANS = {
    "sft": ("update/forward", "update/backward", "update/optimizer", "evaluate"),
    "reward": ("update/forward", "update/backward", "update/optimizer", "evaluate"),
    "dpo": ("reference", "kl", "update/forward", "update/backward", "update/optimizer", "evaluate"),
    "ppo": POLICY,
    "grpo": ("old_policy", "reference", "update/forward", "update/backward", "update/optimizer", "accuracy"),
    "best_of_n": ("rollout", "reference", "update/backward"),
    "distill": ("rollout", "update/teachers", "update/optimizer", "evaluate"),
}
PLACES = (
    *("log/metrics", "checkpoint/tensors", "checkpoint/manifest"),
    *("checkpoint/written", "checkpoint/renamed", "checkpoint/pruned"),
)

VISITS = {"evaluate": 2, "accuracy": 2, "log/samples": 3, "log/findings": 1, "checkpoint/pruned": 1}
"""The visit at which a run is killed first at a place, where it is not the fifth."""

KILLED = -9

OF_SESSION = ("sft", "ppo")
"""Trainers to test what the session does for all of them in the same way."""


def kills() -> Iterator[Any]:
    """Each trainer with up to four places at a time; those that a run may reach only once are first.

    By day the others than those of `OF_SESSION` are killed once, at a place that their name alone decides.
    """
    for trainer in TRAINERS:
        spans, marks = SPANS[trainer], ()
        if trainer not in OF_SESSION:
            yield pytest.param(trainer, (spans[crc32(trainer.encode()) % len(spans)],))
            marks = (pytest.mark.nightly,)
        places = (*spans, *(PLACES if trainer in OF_SESSION else ()))
        places = sorted(places, key=lambda place: VISITS.get(place) != 1)
        num_runs = math.ceil(len(places) / 4)
        yield from (pytest.param(trainer, places[index::num_runs], marks=marks) for index in range(num_runs))


Copies = Callable[[str, Path], Path]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, object]]:
    """The outcome of a whole run of each trainer, in a process of its own."""
    known: dict[str, Mapping[str, object]] = {}

    def outcome_of(trainer: str) -> Mapping[str, object]:
        if trainer not in known:
            folder = tmp_path_factory.mktemp(trainer)
            assert forked(train, trainer, folder) == 0
            known[trainer] = outcome(the_run(folder))
        return known[trainer]

    return outcome_of


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Copies:
    """A copy, below a folder, of the run of a trainer that was killed in step 7; it is trained once."""
    known: dict[str, Path] = {}

    def copy_of(trainer: str, folder: Path) -> Path:
        if trainer not in known:
            parent = tmp_path_factory.mktemp(f"{trainer}-killed")
            assert forked(train, trainer, parent, fault="log/metrics:kill:7") == KILLED
            known[trainer] = the_run(parent)
        return shutil.copytree(known[trainer], folder / known[trainer].name)

    return copy_of


@pytest.mark.parametrize(
    ("trainer", "places"), list(kills()), ids=lambda part: part if isinstance(part, str) else part[0]
)
def test_killed_at_any_place_and_resumed_a_run_ends_the_same(
    trainer: str, places: Sequence[str], tmp_path: Path, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    """Killed at the first place in the middle of the run, then at each of the others as soon as it is resumed."""
    first, *others = places
    assert forked(train, trainer, tmp_path, fault=f"{first}:kill:{VISITS.get(first, 5)}") == KILLED
    run_dir = the_run(tmp_path)
    for place in others:
        assert forked(go_on, run_dir, fault=f"{place}:kill:1") == KILLED, place
    assert not (run_dir / "result.json").exists()
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)
    assert not list((run_dir / "checkpoints").glob("tmp-*"))


@pytest.mark.parametrize("trainer", OF_SESSION)
def test_a_resume_that_is_killed_is_resumed(
    trainer: str, tmp_path: Path, interrupted: Copies, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    run_dir = interrupted(trainer, tmp_path)
    for place in ("log/resumes", "checkpoint/tensors"):
        assert forked(go_on, run_dir, fault=f"{place}:kill:1") == KILLED
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


@pytest.mark.parametrize("trainer", OF_SESSION)
def test_killed_before_the_first_checkpoint_a_run_begins_again(
    trainer: str, tmp_path: Path, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    assert forked(train, trainer, tmp_path, fault="log/metrics:kill:2") == KILLED
    run_dir = the_run(tmp_path)
    assert list_steps(run_dir / "checkpoints") == []
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


@pytest.mark.parametrize(
    ("trainer", "dtype"),
    [*((trainer, "float16" if trainer in ("sft", "ppo", "grpo") else "bfloat16") for trainer in TRAINERS)],
)
def test_masters_of_16_bit_weights_are_restored_too(trainer: str, dtype: str, tmp_path: Path) -> None:
    """With float16 the loss scale is, too: PPO and GRPO halve it in the first steps."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, trainer, whole, dtype) == 0
    assert forked(train, trainer, killed, dtype, fault="log/metrics:kill:7") == KILLED
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))


@pytest.mark.parametrize("trainer", OF_SESSION)
@pytest.mark.parametrize(("action", "code"), [("term", 143), ("interrupt", 130)])
def test_a_signal_saves_and_leaves(
    trainer: str, action: str, code: int, tmp_path: Path, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    assert forked(train, trainer, tmp_path, fault=f"update/forward:{action}:1") == code
    run_dir = the_run(tmp_path)
    assert list_steps(run_dir / "checkpoints") == [1]
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


@pytest.mark.parametrize("trainer", OF_SESSION)
def test_a_second_signal_leaves_at_once(
    trainer: str, tmp_path: Path, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    assert forked(train, trainer, tmp_path, fault="update/forward:term:1,update/backward:term:1") == 143
    run_dir = the_run(tmp_path)
    assert list_steps(run_dir / "checkpoints") == []
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


@pytest.mark.parametrize("trainer", OF_SESSION)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(
    trainer: str, tmp_path: Path, interrupted: Copies, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    run_dir = interrupted(trainer, tmp_path)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    assert newest.name == "step-000006"
    damaged = newest / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)
    findings = [json.loads(line) for line in (run_dir / "findings.jsonl").read_text().splitlines()]
    assert any("SHA-256" in finding["message"] for finding in findings)


def test_a_torn_last_line_of_the_metrics_is_cut_off(
    tmp_path: Path, interrupted: Copies, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    metrics = interrupted("grpo", tmp_path) / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 7, "rew')
    assert forked(go_on, metrics.parent) == 0
    assert outcome(metrics.parent) == uninterrupted("grpo")


def test_with_damaged_checkpoints_alone_nothing_is_touched(tmp_path: Path, interrupted: Copies) -> None:
    run_dir = interrupted("grpo", tmp_path)
    for manifest in run_dir.glob("checkpoints/*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    before = (run_dir / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match=r"no checkpoint that can be used:\n .* has version 2, this release reads"):
        go_on(run_dir)
    assert (run_dir / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_environment_file_is_named(content: str, tmp_path: Path, interrupted: Copies) -> None:
    run_dir = interrupted("ppo", tmp_path)
    (run_dir / "environment.json").write_text(content)
    with pytest.raises(RunError, match=r"environment\.json cannot be read"):
        go_on(run_dir)


def test_metrics_that_lost_lines_are_refused(tmp_path: Path, interrupted: Copies) -> None:
    run_dir = interrupted("grpo", tmp_path)
    os.truncate(run_dir / "metrics.jsonl", 10)
    with pytest.raises(RunError, match=r"metrics\.jsonl has 10 bytes"):
        go_on(run_dir)


def test_more_steps_can_be_asked_of_a_run_that_has_ended(tmp_path: Path) -> None:
    longer, shorter = tmp_path / "longer", tmp_path / "shorter"
    longer.mkdir()
    shorter.mkdir()
    whole = jobs.train("ppo", longer, steps=6, eval_every=2)
    first = jobs.train("ppo", shorter, steps=4, eval_every=2)
    for given in ({}, {"run.steps": 4}, {"run.steps": 3}):
        with pytest.raises(RunError, match=r"has ended after step 4; .* give more steps: --steps N"):
            go_on(first, **given)
    go_on(first, **{"run.steps": 6})
    assert (read_run(first).num_steps, read_run(first).total_steps) == (6, 6)
    # The last step is always sampled, so step 4 of the shorter run left a sample more.
    assert {**outcome(first), "samples": ""} == {**outcome(whole), "samples": ""}


@pytest.mark.parametrize(
    "key", ["run.seed", "model.seed", "rollout.temperature", "ppo.kl.coef", "ppo.micro_batch_size"]
)
def test_what_may_not_change_is_refused_with_the_difference(key: str, tmp_path: Path, interrupted: Copies) -> None:
    run_dir = interrupted("ppo", tmp_path)
    before = {path.name for path in run_dir.iterdir()} - {"lock.json"}  # of the process that was killed
    with pytest.raises(RunError, match=rf"{key}: .* -> 7"):
        go_on(run_dir, **{key: 7})
    assert {path.name for path in run_dir.iterdir()} == before


def test_it_goes_on_with_the_threads_that_the_run_began_with(tmp_path: Path, interrupted: Copies) -> None:
    run_dir = interrupted("ppo", tmp_path)
    setup = run_dir / "setup.json"
    setup.write_text(json.dumps({**json.loads(setup.read_text()), "num_threads": 3}))
    recipe = load_recipe("ppo", file=run_dir / "recipe.yaml", overrides={"run.num_threads": 0}).recipe
    assert as_begun(recipe, run_dir).run.num_threads == 3
    setup.unlink()  # killed before it was written
    num_cores = json.loads((run_dir / "environment.json").read_text())["num_cores"]
    assert as_begun(recipe, run_dir).run.num_threads == num_cores


def test_the_learning_rate_may_change_and_the_change_is_noted(tmp_path: Path, interrupted: Copies) -> None:
    run_dir = interrupted("ppo", tmp_path)
    go_on(run_dir, **{"optimizer.learning_rate": 5e-4})
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == [1e-3] * 6 + [5e-4] * 4
    (note,) = [json.loads(line) for line in (run_dir / "resumes.jsonl").read_text().splitlines()]
    assert note["changes"] == {"optimizer.learning_rate": [1e-3, 5e-4]}


def test_other_data_is_refused(tmp_path: Path, interrupted: Copies) -> None:
    from tunesmith.learn.trainers.resume import Inputs, resume

    run_dir = interrupted("ppo", tmp_path)
    with pytest.raises(RunError, match=r"the prompts .* changed since its checkpoint"):
        resume(run_dir, inputs=Inputs(prompts=["Another"], rewards=[jobs.noisy]), progress=False)
    with pytest.raises(RunError, match="was given its prompts and rewards as Python objects"):
        resume(run_dir, progress=False)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_newest_and_the_best_checkpoints_are_kept(trainer: str, tmp_path: Path) -> None:
    assert forked(partial(train, eval_every=2), trainer, tmp_path) == 0
    folder = the_run(tmp_path) / "checkpoints"
    scores = {
        step: json.loads((folder / f"step-{step:06d}" / "manifest.json").read_text())["score"]
        for step in list_steps(folder)
    }
    assert list(scores)[-2:] == [8, 10]
    assert len(scores) <= 3
    assert all(isinstance(score, float) for score in scores.values())
