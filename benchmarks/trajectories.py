"""Exactness of trajectories: what is learnt is what was drawn, whatever draws it and however slow the environment is.

An environment talks for three to five turns, in words that depend on what was said, each after a random time. For
bfloat16 and float32 are counted: the largest difference between the engine's log-prob of a drawn token and that of the
trainer's pass; the tokens learnt that were not drawn, which must be 0; and those that would be other tokens if the
conversation were rendered again, as some trainers do. Then the same trajectories are drawn by 1, 2 and 7 workers, by
two of which one is killed in the middle, and by actors of the Ray cluster `--ray`; `differ` are the trajectories that
are not those of the engine in one process, by a token, a log-prob or a reward.
"""

import os
import random
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from difflib import SequenceMatcher
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith.base.config.sections import EnvironmentSection, ModelSection
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel, context_length
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tokenizer import encode_prompt
from tunesmith.engine.models.tool_messages import as_template_takes
from tunesmith.engine.rollout.engine import Continuation, Dialogue, Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.workers.engine import WorkerEngine, Workers
from tunesmith.learn.environments.contract import Reply, Said
from tunesmith.learn.environments.episodes import Conversations

MOST_TURNS, NEW_TOKENS, GROUP = 5, 12, 8
SLOWEST_S = 0.02
WORDS = ("no", " yes ", "\n\nlook: ", "don't", "42", "é", "  two  spaces", "<b>", '{"a": 1}')


class Talks:
    """Three to five turns that follow from the seed and from what is said. `in_between` is called in each."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, in_between: Callable[[], None]) -> None:
        self._in_between = in_between

    def reset(self, row: Mapping[str, Any]) -> str:
        """See `Episode.reset`."""
        self._draw = random.Random(row["seed"])
        self._left = self._draw.randint(3, MOST_TURNS)
        return f" {self._draw.choice(WORDS)}"

    def step(self, said: Said) -> Reply:
        """See `Episode.step`."""
        time.sleep(random.Random().uniform(0, SLOWEST_S))
        self._in_between()
        self._left -= 1
        self._draw.seed(f"{said.text} {self._draw.random()}")
        reward = self._draw.random()
        if self._left == 0:
            return Reply(reward=reward, done=True)
        return Reply(({"role": "user", "content": " ".join(self._draw.choices(WORDS, k=2))},), reward)

    def reward(self) -> float | None:
        """See `Episode.reward`."""
        return None

    def close(self) -> None:
        """See `Episode.close`."""


class Recorded:
    """An engine that keeps the ids of all turns that it draws, by conversation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.turns: dict[int, list[tuple[int, ...]]] = {}

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `Engine.converse`."""

        def on_turn(index: int, turn: Completion) -> "Future[Continuation | None]":
            self.turns.setdefault(index, []).append(turn.token_ids)
            return dialogue.on_turn(index, turn)

        return self._engine.converse(prompts, sampling, replace(dialogue, on_turn=on_turn))


def drawn(
    engine: Any, loaded: LoadedModel, options: Namespace, in_between: Callable[[], None] = lambda: None
) -> list[Group]:
    """The trajectories of `engine`."""
    talks = Conversations(
        lambda calls: Talks(in_between),
        loaded.tokenizer,
        EnvironmentSection(max_turns=MOST_TURNS + 1, max_reply_tokens=64),
        max_new_tokens=NEW_TOKENS,
        context=context_length(loaded.model),
    )
    questions = random.Random(options.seed)
    prompts = [
        Prompt(str(number), ({"role": "user", "content": f"{number} {questions.choice(WORDS)}"},))
        for number in range(options.trajectories // GROUP)
    ]
    try:
        return talks.draw(engine, prompts, GROUP, SamplingParams(seed=options.seed))
    finally:
        talks.close()


@torch.no_grad()
def largest_difference(model: LanguageModel, groups: Sequence[Group]) -> float:
    """Of the engine's log-probs of drawn tokens and those of the trainer's pass, in nats."""
    largest = 0.0
    for group in groups:
        rows = pack([group], 0)
        scores = token_logps(model, rows.ids_BS, rows.lengths_B, prompt_lengths_B=rows.prompt_lengths_B)
        difference_BT = (scores.logp_BT.double() - rows.raw_logp_BT.double()).abs()
        largest = max(largest, difference_BT[rows.mask_BT].max().item())
    return largest


def learnt(one: Completion) -> list[int]:
    """The ids that a trainer learns."""
    pairs = ((i, yes) for sample in one.samples for i, yes in zip(sample.token_ids, sample.is_sampled, strict=True))
    return [token for token, is_sampled in pairs if is_sampled]


def not_drawn(groups: Sequence[Group], recorded: Recorded) -> int:
    """The tokens that are learnt but are not those that the engine drew at their place."""
    completions = [one for group in groups for one in group.completions]
    count = 0
    for index, one in enumerate(completions):
        found, turns = learnt(one), [token for turn in recorded.turns[index] for token in turn]
        count += abs(len(found) - len(turns)) + sum(a != b for a, b in zip(found, turns, strict=False))
    return count


def other_when_rendered(loaded: LoadedModel, groups: Sequence[Group]) -> int:
    """The drawn tokens that do not come back when the text of the conversation is made into tokens."""
    count = 0
    for group in groups:
        for one in group.completions:
            assert one.trajectory is not None and not isinstance(group.prompt.content, str)
            messages: Any = as_template_takes(loaded.tokenizer, (*group.prompt.content, *one.trajectory.messages))
            again = encode_prompt(loaded.tokenizer, replace(group.prompt, content=messages, token_ids=None))
            sequence = (*(one.prompt_ids or group.prompt_token_ids), *one.token_ids)
            kept = set[int]()
            for match in SequenceMatcher(None, sequence, again, autojunk=False).get_matching_blocks():
                kept.update(range(match.a, match.a + match.size))
            front = len(sequence) - len(one.token_ids)
            count += sum(yes and front + place not in kept for place, yes in enumerate(one.is_sampled))
    return count


def facts_of(groups: Sequence[Group]) -> list[tuple[object, ...]]:
    """What must be the same, of each trajectory."""
    return [
        (one.token_ids, one.logps, one.raw_logps, one.prompt_ids, one.trajectory.reward, one.trajectory.messages)
        for group in groups
        for one in group.completions
        if one.trajectory is not None
    ]


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark."""
    if options.quick:
        options.trajectories = 24
    figures: dict[str, object] = {}
    for dtype in ("float32", "bfloat16"):
        loaded = load_policy(ModelSection(name=options.model, dtype=dtype))
        model = language_model(loaded.model)
        recorded = Recorded(open_engine(loaded.model, loaded.tokenizer))
        begun_s = time.perf_counter()
        groups = drawn(recorded, loaded, options)
        turns = [len(one) for one in recorded.turns.values()]
        say(f"{dtype}: {len(turns)} trajectories, {time.perf_counter() - begun_s:.0f} s")
        figures[dtype] = {
            "trajectories": len(turns),
            "fewest_turns": min(turns),
            "turns": sum(turns),
            "drawn_tokens": sum(len(learnt(one)) for group in groups for one in group.completions),
            "largest_difference": largest_difference(model, groups),
            "learnt_not_drawn": not_drawn(groups, recorded),
            "other_when_rendered_again": other_when_rendered(loaded, groups),
        }
    return {
        **head(options, "trajectories", "model", "quick", "seed"),
        "exactness": figures,
        "differ": _with_workers(loaded, facts_of(groups), options, say),
    }


def _with_workers(
    loaded: LoadedModel, expected: Sequence[object], options: Namespace, say: Say
) -> dict[str, int | str]:
    """The trajectories that other ways draw otherwise, or why a way was not taken. Raises TrainingError if nobody
    was killed who should be.
    """
    found: dict[str, int | str] = {}
    ways = {f"{count} workers": Workers(count) for count in (1, 2, 7)} | {"2 workers, one killed": Workers(2)}
    if options.ray:
        ways["2 actors of Ray"] = Workers(2, address=options.ray)
    else:
        hint = "no --ray HOST:PORT; begin a cluster with `ray start --head --num-cpus 2`"
        found["2 actors of Ray"] = hint if find_spec("ray") else "Ray is not installed"
    for way, workers in ways.items():
        engine = open_engine(loaded.model, loaded.tokenizer, backend=workers)
        assert isinstance(engine, WorkerEngine)
        killer = Killer(engine, options.trajectories) if "killed" in way else None
        begun_s = time.perf_counter()
        groups = drawn(engine, loaded, options, (lambda: None) if killer is None else killer)
        if killer is not None and killer.killed is None:
            raise TrainingError("no worker was killed: there were too few turns")
        found[way] = sum(a != b for a, b in zip(facts_of(groups), expected, strict=True))
        say(f"{way}: {found[way]} differ, {time.perf_counter() - begun_s:.0f} s")
    return found


class Killer:
    """Kills a worker of `engine` while it draws: some time after half of the turns of `count` trajectories."""

    def __init__(self, engine: WorkerEngine, count: int) -> None:
        self._engine, self._left = engine, 2 * count
        self._lock = threading.Lock()
        self.killed: int | None = None

    def __call__(self) -> None:
        """Count a turn."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                threading.Timer(2 * SLOWEST_S, self._kill).start()

    def _kill(self) -> None:
        self.killed = self._engine.process_of(0)
        os.kill(self.killed, signal.SIGKILL)


def _show(facts: Mapping[str, Any]) -> None:
    exactness = facts["exactness"]
    names = list(exactness["float32"])
    print_table(["figure", *exactness], [[name, *(f"{one[name]:g}" for one in exactness.values())] for name in names])
    for way, count in facts["differ"].items():
        print(f"{way}: {count if isinstance(count, str) else f'{count} differ'}")


main = benchmark(
    measure,
    _show,
    *("model", "threads", "seed", "quick"),
    trajectories={"type": int, "default": 1000, "metavar": "N", "help": "trajectories of each way"},
    ray={"metavar": "HOST:PORT", "help": "a Ray cluster that this machine is part of"},
)


if __name__ == "__main__":
    run("trajectories")
