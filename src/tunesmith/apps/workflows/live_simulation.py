"""`tunesmith live --simulate`: the whole loop with simulated raters in the place of people, measured at the end.

1. `tunesmith serve` and `tunesmith live` are started as processes, as a person would start them.
2. Raters of a stated accuracy vote over HTTP while the trainer answers with version after version.
3. Both processes end, and the base model and the last version answer held-out prompts; the lexicon judges, without
   the raters' noise.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles

from tunesmith.apps.workflows.live_raters import Raters, RaterTraits, Talk
from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import LoraSection, RewardSource
from tunesmith.base.core.child import how_it_ended
from tunesmith.base.core.errors import InputError, RunError
from tunesmith.base.core.seeds import derive
from tunesmith.base.runs.folder import RunFolder
from tunesmith.base.schema.records import plain_text
from tunesmith.collect.data import sets
from tunesmith.collect.statistics.intervals import proportion_interval
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.learn.evaluation.compare import Comparison, Side, compare
from tunesmith.learn.rewards.builtin import RATER_NAME, TIE_BELOW
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers import setup

_RESERVE_S = 90.0
_RESERVE_SHARE = 0.2
"""Of the duration, so much at most is kept for the comparison at the end."""

_LOWEST_S = 20.0

_LEAVE_S = 60.0
"""Seconds after which a process that was asked to end is killed."""

_POLL_S = 0.25

_PROGRAM = """
import sys
from tunesmith.apps.cli.main import main
from tunesmith.base.core.child import end_with
end_with(int(sys.argv.pop(1)))
sys.exit(main())
"""

_TAIL = 2_000
"""Characters of a log that an error shows."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of a simulation: `duration_s` of the whole, comparison included, and the arguments of the trainer.

    `num_pairs` fresh pairs, at least, are compared at the end. With `num_conversations`, raters vote in as many
    conversations in the arena, and not on the trainer's pairs. With `num_versions`, voting ends before its time once
    so many versions were accepted.
    """

    folder: Path
    num_raters: int = 8
    duration_s: float = 600.0
    traits: RaterTraits = field(default_factory=RaterTraits)
    trainer_words: Sequence[str] = ()
    num_pairs: int = 200
    seed: int = 0
    num_conversations: int = 0
    num_versions: int | None = None

    def __post_init__(self) -> None:
        if self.num_raters < 1:
            raise InputError(f"--simulate is {self.num_raters}; give 1 or more raters")
        if self.num_conversations < 0:
            raise InputError(f"--conversations is {self.num_conversations}; give 1 or more, or 0 for none")
        if self.num_versions is not None and self.num_versions < 1:
            raise InputError(f"--versions is {self.num_versions}; give 1 or more")
        if self.duration_s < _LOWEST_S:
            raise InputError(f"--duration is {self.duration_s:g} seconds; give {_LOWEST_S:g} or more")


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulation.

    `win_rate` is the share of fresh pairs of completions, base model against last version, of which the last version's
    is the more positive by the lexicon, ties half, with its 95 % interval. `votes` were acknowledged by the server,
    `votes_learnt` are what the last version has learnt from; of 20 votes, 19 were acknowledged within `vote_p95_ms`.
    """

    win_rate: float
    win_rate_low: float
    win_rate_high: float
    num_pairs: int
    kl_per_sequence: float
    distinct2_ratio: float | None
    mean_before: float
    mean_after: float
    votes: int
    votes_learnt: int
    versions: int
    dropped: int
    vote_to_version_median_s: float | None
    vote_p95_ms: float | None
    conversations: int
    problems: int
    minutes: float
    accuracy: float
    rater: str = RATER_NAME

    def to_json(self) -> dict[str, object]:
        """All figures as JSON types."""
        return asdict(self)


def run_simulation(options: SimulationOptions) -> SimulationResult:
    """Run the loop with simulated raters; the figures, also in `simulation.json` of the folder.

    Raises:
        RunError: if the server or the trainer ends by itself, or the trainer had no time to end in order.
    """
    watch, start_s = setup.Stopwatch(), time.monotonic()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    deadline_s = start_s + options.duration_s - min(_RESERVE_S, _RESERVE_SHARE * options.duration_s)
    tokens = add_raters(folder, options.num_raters)
    words = ["live", "--dir", str(folder), *options.trainer_words]
    with server(folder) as served, child("trainer", words, folder / "trainer.log") as trainer:
        setup.say(f"{options.num_raters} simulated raters vote at {served.url}", enabled=True)
        talk = None
        if options.num_conversations:
            talk = Talk(options.num_conversations, openings(folder, trainer))
        with (
            Raters(served.url, tokens, options.traits, options.seed, talk) as raters,
            closing(RunReader.open(folder / "runs.db")) as runs,
        ):
            last = num_accepted(runs) + (options.num_versions or math.inf)  # the folder may have some already
            wait_until(deadline_s, [served.child, trainer], lambda: num_accepted(runs) >= last)
        trainer.end_in_order(options.duration_s)
        setup.say(f"{raters.num_votes} votes; the base model and the last version are compared", enabled=True)
    result = measured(options, raters, watch)
    RunFolder(folder).write_json("simulation.json", result.to_json())
    return result


@dataclass(frozen=True, slots=True)
class Child:
    """A `tunesmith` command in a child process; its stderr goes to `log`."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def require_alive(self) -> None:
        """Raise RunError, with the end of its log, if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise RunError(f"the {self.name} ended with code {code}; {self._said()}")

    def end_in_order(self, duration_s: float) -> None:
        """Ask it to end, after `duration_s`. Raises RunError if it had no time for a result."""
        if code := self.end():
            raise RunError(
                f"the {self.name} {how_it_ended(code)} without a result: {duration_s:g} s were too short for its start "
                f"or its update; give a longer --duration. {self._said()}"
            )

    def _said(self) -> str:
        """The end of its log."""
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        return f"{self.log} says:\n{tail}"

    def end(self) -> int:
        """Its exit code, after SIGTERM; it is killed if it does not leave."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def child(name: str, words: Sequence[str], log: Path) -> Iterator[Child]:
    """`tunesmith` with `words`, ended when the block or this process ends. Its stdout can be read line by line."""
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    found = Child(name, process, log)
    try:
        yield found
    finally:
        found.end()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its address, and the link that logs the first admin in, once; the API and a key, if any."""

    url: str
    login_url: str
    child: Child
    api: str = ""
    key: str = ""


@contextmanager
def server(folder: Path, *more: str) -> Iterator[Served]:
    """`tunesmith serve` on `folder` with `more` words, ended when the block ends.

    Raises RunError if it does not come up.
    """
    words = ["serve", "--dir", str(folder), "--port", "0", "--json", *more]
    with child("server", words, folder / "serve.log") as found:
        assert found.process.stdout is not None
        line = found.process.stdout.readline()
        if not line:
            found.process.wait(_LEAVE_S)
            found.require_alive()
        facts = json.loads(line)
        login = facts.get("login_url") or facts["url"]
        yield Served(facts["url"], login, found, facts.get("api") or "", facts.get("key") or "")


def num_accepted(runs: RunReader) -> int:
    """Accepted versions, without the base model."""
    return sum(one.version > 0 and one.accepted for one in runs.versions())


def wait_until(deadline_s: float, watched: Sequence[Child], is_done: Callable[[], bool]) -> None:
    """Wait until `is_done`, or the monotonic clock shows `deadline_s`.

    Raises RunError as soon as a watched process has ended.
    """
    while time.monotonic() < deadline_s and not is_done():
        for one in watched:
            one.require_alive()
        time.sleep(_POLL_S)


def add_raters(folder: Path, count: int) -> list[str]:
    """Tokens of new raters in the votes of `folder`, which no server has open."""
    with VoteStore.open(folder / "votes.db") as store:
        taken = {rater.name for rater in store.reader.raters()}
        names = (f"simulated {number}" for number in range(1, count + len(taken) + 1))
        free = [name for name in names if name not in taken][:count]
        return [store.add_rater(name).token for name in free]


def openings(folder: Path, trainer: Child) -> list[str]:
    """The training prompts of the trainer, once it has written its recipe: what raters say in conversations."""
    while not (folder / "recipe.yaml").is_file():
        trainer.require_alive()
        time.sleep(_POLL_S)
    cfg = load_recipe("live", file=folder / "recipe.yaml").recipe
    assert isinstance(cfg, LiveRecipe)
    tokenizer = load_policy(cfg.model).tokenizer
    return [plain_text(one.content) for one in sets.prompt_sets(cfg.prompts, tokenizer, cfg.run.seed).train]


def measured(options: SimulationOptions, raters: Raters, watch: setup.Stopwatch) -> SimulationResult:
    """The figures, once both processes have ended."""
    comparison = compare_versions(options)
    hits = [hit(sample.score_before, sample.score_after) for sample in comparison.samples]
    low, high = proportion_interval(hits, [sample.prompt_id for sample in comparison.samples])
    with closing(RunReader.open(options.folder / "runs.db")) as reader:
        versions = [version for version in reader.versions() if version.version > 0]
    latency = json.loads((options.folder / "result.json").read_text(encoding="utf-8"))["vote_to_version_median_s"]
    return SimulationResult(
        win_rate=sum(hits) / len(hits),
        win_rate_low=low,
        win_rate_high=high,
        num_pairs=len(hits),
        kl_per_sequence=comparison.kl_per_sequence,
        distinct2_ratio=comparison.distinct2_ratio,
        mean_before=comparison.mean_before,
        mean_after=comparison.mean_after,
        votes=raters.num_votes,
        votes_learnt=max((version.num_votes for version in versions if version.accepted), default=0),
        versions=sum(version.accepted for version in versions),
        dropped=sum(not version.accepted for version in versions),
        vote_to_version_median_s=latency,
        vote_p95_ms=quantiles(vote_ms, n=20)[-1] if len(vote_ms := raters.vote_ms) > 1 else None,
        conversations=raters.num_conversations,
        problems=len(raters.problems),
        minutes=watch.minutes,
        accuracy=options.traits.accuracy,
    )


def hit(before: float, after: float) -> float:
    """1 if the completion after is the better one, 0 if it is the worse one, a half for a tie."""
    if abs(after - before) < TIE_BELOW:
        return 0.5
    return float(after > before)


def compare_versions(options: SimulationOptions) -> Comparison:
    """Base model and last version on the held-out prompts, which nothing was trained on, by the lexicon."""
    cfg = load_recipe("live", file=options.folder / "recipe.yaml").recipe
    assert isinstance(cfg, LiveRecipe)
    setup.prepare(cfg)
    before = load_policy(cfg.model)
    final = options.folder / "final"
    last = {"name": str(final), "lora": LoraSection()}
    after = load_policy(cfg.model.model_copy(update=last) if final.exists() else cfg.model)
    prompts = sets.prompt_sets(cfg.prompts, before.tokenizer, cfg.run.seed).heldout
    comparison = compare(
        Side.of("before", before.model, before.tokenizer),
        Side.of("after", after.model, after.tokenizer),
        prompts,
        Scorer([RewardSource(source="sentiment")], policy_tokenizer=before.tokenizer),
        SamplingParams(max_new_tokens=cfg.rollout.max_new_tokens, temperature=cfg.rollout.temperature),
        num_completions=-(-options.num_pairs // len(prompts)),
        seed=derive(options.seed, "live comparison"),
    )
    comparison.write_samples_jsonl(options.folder / "simulation_samples.jsonl")
    return comparison
