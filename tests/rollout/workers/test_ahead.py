"""Completions drawn ahead: their weights, other calls in between, their part of a checkpoint, errors."""

import copy
import json
import os
import signal
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from tunesmith.base.core.errors import InputError, ServerError
from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.kernels.sample.torch_impl import NoiseKeys, SampleSettings, sample
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.sampler import noise_keys
from tunesmith.engine.rollout.workers.ahead import Ahead, AheadEngine, Arguments
from tunesmith.engine.rollout.workers.engine import WorkerEngine, Workers

NUM_STEPS = 6


def arguments_of(step: int) -> Arguments:
    prompts = [Prompt(f"{step}-{index}", f"Prompt {index} of step {step}") for index in range(3)]
    return prompts, 2, SamplingParams(max_new_tokens=8, seed=step)


class Trained:
    """A model whose weights change with each version, and engines of it."""

    def __init__(self) -> None:
        self.loaded: LoadedModel = tiny_model("llama")
        self.version = 0
        self.alone: Engine = open_engine(self.loaded.model, self.loaded.tokenizer)

    def ahead(self, staleness: int, count: int = 2, swap_tokens: int = 0) -> AheadEngine:
        inner = open_engine(
            self.loaded.model,
            self.loaded.tokenizer,
            backend=Workers(count, lease=2),
            weight_version=lambda: self.version,
        )
        assert isinstance(inner, WorkerEngine)
        return AheadEngine(inner, Ahead(staleness, NUM_STEPS, arguments_of, swap_tokens), lambda: self.version)

    def update(self) -> None:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.loaded.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def completions(groups: list[Group]) -> list[object]:
    return [group.completions for group in groups]


@pytest.mark.parametrize("staleness", (1, 2, 9))
def test_each_step_has_the_completions_of_the_weights_as_many_steps_before(staleness: int) -> None:
    trained = Trained()
    engine = trained.ahead(staleness)
    evaluation = [Prompt("e", "Something else")], 2, SamplingParams(max_new_tokens=6, seed=77)
    expected: list[list[object]] = []  # of each version, all steps
    for step in range(NUM_STEPS):
        expected.append([completions(trained.alone.generate(*arguments_of(other))) for other in range(NUM_STEPS)])
        with trace() as times, span("rollout"):
            groups = engine.generate(*arguments_of(step))
        drawn_by = max(0, step - staleness)
        assert {group.weight_version for group in groups} == {drawn_by}
        assert completions(groups) == expected[drawn_by][step]
        assert [group.prompt for group in groups] == arguments_of(step)[0]
        figures = times.metrics()
        assert figures["rollout/versions_behind"] == step - drawn_by
        assert figures["rollout/wait_s"] >= 0 and figures["rollout/worker_idle_s"] >= 0
        now = engine.generate(*evaluation)
        assert completions(now) == completions(trained.alone.generate(*evaluation)), "of the weights as they are"
        assert now[0].weight_version == step
        trained.update()
    assert not engine.state_dict()["drawn"], "nothing is drawn for steps that the run does not have"


def drawn_token_by_token(
    models: Sequence[PreTrainedModel], versions: Sequence[int], group: Group, n: int, seed: int
) -> list[int]:
    """Sample `n` of the group's prompt: each token by a forward pass of the model of its version."""
    (key,), ids = noise_keys([group.prompt_token_ids], 1), list(group.prompt_token_ids)
    for version in versions:
        logits_1V = models[version](torch.tensor([ids])).logits[:, -1].double()
        noise = NoiseKeys(*(torch.tensor([number]) for number in (seed, key.prompt, n, len(ids))))
        ids.append(int(sample(logits_1V, SampleSettings.same(1), noise).token_B))
    return ids[len(group.prompt_token_ids) :]


@pytest.mark.parametrize(("staleness", "swap_tokens"), ((2, 3), (3, 2)))
@torch.no_grad()
def test_a_completion_goes_on_with_newer_weights(staleness: int, swap_tokens: int) -> None:
    trained, models, seen = Trained(), list[PreTrainedModel](), set[tuple[int, ...]]()
    engine, other = (trained.ahead(staleness, count, swap_tokens) for count in (1, 3))
    for step in range(NUM_STEPS):
        models.append(copy.deepcopy(trained.loaded.model))
        with trace() as times, span("rollout"):
            groups = engine.generate(*arguments_of(step))
        assert other.generate(*arguments_of(step)) == groups, "whoever draws"
        # Token t is drawn before the first update at which the completion may be as long, or is needed.
        newest = max(0, step - 1)
        expected = [
            next(
                now
                for now in range(max(0, step - staleness), newest + 1)
                if now == newest or t < (staleness - step + now + 1) * swap_tokens
            )
            for t in range(8)
        ]
        behind: list[int] = []
        for group in groups:
            for number, one in enumerate(group.completions):
                versions = list(one.weight_versions or [group.weight_version] * len(one.token_ids))
                assert versions == expected[: len(versions)]
                assert list(one.token_ids) == drawn_token_by_token(models, versions, group, number, step)
                for version in set(versions):
                    logps = token_logps(
                        language_model(models[version]),
                        torch.tensor([[*group.prompt_token_ids, *one.token_ids]]),
                        torch.tensor([len(group.prompt_token_ids) + len(one.token_ids)]),
                        prompt_lengths_B=torch.tensor([len(group.prompt_token_ids)]),
                    ).logp_BT[0]
                    by_trainer = logps.tolist()
                    for t, found in enumerate(versions):
                        assert found != version or one.raw_logps[t] == by_trainer[t], "to the bit"
                text = trained.loaded.tokenizer.decode(one.token_ids, skip_special_tokens=True)
                assert one.text == text and one.logps == one.raw_logps
                behind += [step - version for version in versions]
                seen.add(tuple(versions))
        assert times.metrics()["rollout/versions_behind"] == pytest.approx(sum(behind) / len(behind))
        trained.update()
    assert max(len(set(versions)) for versions in seen) == staleness


def test_what_was_drawn_ahead_is_a_part_of_the_checkpoint() -> None:
    trained = Trained()
    engine = trained.ahead(2, swap_tokens=5)
    engine.generate(*arguments_of(0))
    trained.update()
    engine.generate(*arguments_of(1))
    saved = json.loads(json.dumps(engine.state_dict()))
    assert saved["step"] == 2 and set(saved["drawn"]) == {"2", "3"}
    again = trained.ahead(2, count=1, swap_tokens=5)
    again.load_state_dict(saved)
    trained.update()
    for step in range(2, NUM_STEPS):
        assert again.generate(*arguments_of(step)) == engine.generate(*arguments_of(step))
        trained.update()


def test_a_killed_worker_changes_nothing_and_one_that_cannot_live_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = Trained()
    engine = trained.ahead(1)
    expected = [completions(trained.alone.generate(*arguments_of(step))) for step in (0, 1)]
    assert completions(engine.generate(*arguments_of(0))) == expected[0]
    os.kill(engine.inner.process_of(0), signal.SIGKILL)
    assert completions(engine.generate(*arguments_of(1))) == expected[1]

    def lost(*_: object) -> None:
        raise ServerError("lost")

    monkeypatch.setattr(WorkerEngine, "_draw", lost)
    with pytest.raises(ServerError, match="lost"):
        for step in (2, 3):  # the first of them may have been drawn before
            engine.generate(*arguments_of(step))


def test_groups_are_reported_at_the_end_and_nothing_else_is() -> None:
    engine = Trained().ahead(1)
    found: dict[int, Group] = {}
    report: Callable[[int, Group], None] = lambda index, group: found.update({index: group})  # noqa: E731
    groups = engine.generate(*arguments_of(0), on_group=report)
    assert [found[index] for index in range(3)] == groups and not engine.is_exact
    with pytest.raises(InputError, match=r"set scale.staleness to 0"):
        engine.generate(*arguments_of(1), on_progress=lambda *_: None)
