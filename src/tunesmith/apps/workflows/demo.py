"""`tunesmith demo`: the whole loop on a real language model, in minutes, on two CPU cores.

1. The base model continues openings of film reviews, several times each: plainly, and steered to praise and complain.
2. A rater votes between two continuations: a simulated one (VADER's lexicon), or you.
3. A reward model learns from the votes; votes on other openings tell how well.
4. PPO, GRPO or best-of-n moves the policy toward the reward model, held near the base model by a KL penalty.
5. Both models continue 15 openings that nothing was trained on, and the rater, not the reward model, judges.
"""

import gc
import json
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from tunesmith.apps.workflows.evaluation import Outcome
from tunesmith.apps.workflows.voting import ask_votes, votes_on
from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.load import load_recipe, shipped_names
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.config.sections import PromptsSection, RewardSource
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.seeds import derive
from tunesmith.base.runs.environment import peak_rss_gb
from tunesmith.base.runs.folder import RunFolder
from tunesmith.base.runs.progress import progress
from tunesmith.base.schema.records import Pair, Prompt, Vote
from tunesmith.collect.data.pairs import write_pairs
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import split_by_prompt
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tokenizer import encode_prompt
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import Backend, open_engine
from tunesmith.learn.evaluation.compare import Comparison, Side, compare
from tunesmith.learn.rewards.builtin import RATER_NAME, SimulatedRater
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.rollouts import sampling_params
from tunesmith.learn.trainers.run import run
from tunesmith.learn.trainers.work import Rows, Work, announce_time, trial
from tunesmith.observe.reports.html import write_demo_report

if TYPE_CHECKING:
    from tunesmith.learn.live.loop import LiveResult

NUM_COMPARED = 15
"""Openings that are kept away from votes and training, and compared at the end."""

STEERS = ("", "I loved this film. ", "I hated this film. ")
"""Voted completions are drawn after each of these, which the rater does not see: pairs that differ teach more than
pairs that are alike (after Yang et al. 2023, arXiv 2307.12950). What is trained and compared is drawn without any.
"""

COMPLETIONS_PER_STEER = 3

COMPARED_COMPLETIONS = 16

REPETITION_PENALTY = 1.25
"""Of what is voted on and compared: without it one completion in ten says a phrase twice. PPO and GRPO also train on
such completions, with importance weights; best-of-n, which has none, would learn the penalty itself.
"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo. `algorithm` trains the policy; the other stages do not depend on it.

    `quick` takes a fifth of the openings, fewer completions and two steps: it shows that all parts work, no more.
    `backend` draws all completions; `level` is that of both trainings, `dtype` that of all models.
    """

    algorithm: str = "ppo"
    seed: int = 0
    vote: bool = False
    out: str = "runs"
    quick: bool = False
    backend: Backend = "native"
    level: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes to learn from and votes held out, by opening."""

    train: Sequence[Vote]
    heldout: Sequence[Vote]


@dataclass(frozen=True, slots=True)
class Stage:
    """Inputs of every stage: options, the demo's folder, the recipes of its two trainings."""

    options: DemoOptions
    folder: RunFolder
    reward_recipe: RewardRecipe
    policy_recipe: PolicyRecipe

    def sampling(self, purpose: str) -> SamplingParams:
        """Settings that completions for votes or for the comparison are drawn with: training's, and the penalty."""
        sampling = sampling_params(self.policy_recipe.rollout, derive(self.options.seed, purpose))
        return replace(sampling, repetition_penalty=REPETITION_PENALTY)

    def say(self, number: int, text: str) -> None:
        """Announce stage `number` of five on stderr."""
        setup.say(f"\n[{number}/5] {text}", enabled=True)


def run_demo(options: DemoOptions) -> Outcome:
    """Run the demo and write its folder; the figures that `tunesmith demo --json` prints.

    Raises InputError for an algorithm that there is not.
    """
    watch = setup.Stopwatch()
    stage = prepare(options)
    openings = load_prompts("films", PromptsSection())
    openings = openings[::5] if options.quick else openings
    split = split_by_prompt(openings, 0.0, options.seed, num_heldout=NUM_COMPARED)

    votes = collect_votes(stage, split.train)
    reward_run = train_reward_model(stage, votes)
    policy_run = train_policy(stage, split.train, reward_run)
    comparison = compare_models(stage, split.heldout, reward_run, policy_run)

    facts = figures(stage, comparison, reward_run, watch)
    write_report(stage, facts, comparison, votes, (reward_run, policy_run))
    return Outcome(facts, comparison, stage.folder.path)


def prepare(options: DemoOptions) -> Stage:
    """The demo's folder and its two recipes, with this run's seed and folder filled in."""
    algorithm = options.algorithm
    if algorithm not in (known := demo_algorithms()):
        raise InputError(f"the demo's algorithm is {algorithm!r}; give {' or '.join(known)}")
    chosen = {"algorithm": algorithm, "seed": options.seed, "vote": options.vote}
    folder = RunFolder.create(Path(options.out), "demo", {"demo": chosen})
    overrides: dict[str, object] = {"run.seed": options.seed, "run.dir": str(folder.path), "model.dtype": options.dtype}
    overrides |= {"level": options.level} if options.level else {}
    drawing = {} if options.backend == "native" else {"rollout.backend": options.backend}
    few = {"run.steps": 2} if options.quick else {}
    fewer = few_prompts(algorithm) if options.quick else {}
    # A person gives some 45 votes to learn from: in steps of 72 that would be two steps.
    small_steps = {"reward_model.pairs_per_step": 4} if options.vote else {}
    loaded = load_recipe("reward", recipe="demo_reward", overrides={**overrides, **few, **small_steps})
    reward_recipe = loaded.recipe
    loaded = load_recipe(algorithm, recipe=f"demo_{algorithm}", overrides={**overrides, **drawing, **few, **fewer})
    policy_recipe = loaded.recipe
    assert isinstance(reward_recipe, RewardRecipe)
    assert isinstance(policy_recipe, PolicyRecipe)
    setup.prepare(policy_recipe)
    return Stage(options, folder, reward_recipe, policy_recipe)


def demo_algorithms() -> list[str]:
    """The algorithms that the demo has a recipe for."""
    shipped = shipped_names()
    return [name for name, spec in SPECS.items() if spec.draws and f"demo_{name}" in shipped]


def few_prompts(algorithm: str) -> dict[str, object]:
    """Keys of a quick step of the demo's recipe: a few prompts in one update."""
    rollout: Any = load_recipe(algorithm, recipe=f"demo_{algorithm}").recipe
    num_prompts = max(2, 8 // rollout.rollout.completions_per_prompt)
    return {"rollout.prompts_per_step": num_prompts, f"{algorithm}.num_minibatches": 1}


def collect_votes(stage: Stage, openings: Sequence[Prompt]) -> Votes:
    """Draw completions of every opening from the base model and have them voted on; some openings are held out."""
    num = 1 if stage.options.quick else COMPLETIONS_PER_STEER
    times = num * len(STEERS)
    stage.say(1, f"the base model continues {len(openings)} openings, {times} times each, two thirds of them steered")
    groups = draw_candidates(stage, openings, num)
    gc.collect()
    fraction = stage.reward_recipe.pairs.heldout_fraction
    split = split_by_prompt(
        groups, fraction, derive(stage.options.seed, "heldout votes"), key=lambda group: str(group.prompt.content)
    )
    votes = vote(stage, split.train, split.heldout)
    write_pairs(stage.folder.path / "votes.jsonl", as_pairs(votes.train))
    write_pairs(stage.folder.path / "heldout_votes.jsonl", as_pairs(votes.heldout))
    return votes


def draw_candidates(stage: Stage, openings: Sequence[Prompt], num: int) -> list[Group]:
    """One group for each opening, with `num` completions after each steer."""
    loaded = load_policy(stage.policy_recipe.model)
    engine = open_engine(loaded.model, loaded.tokenizer, backend=stage.options.backend, batch_size=128)
    sampling = stage.sampling("votes")
    steered = [Prompt(prompt.id, f"{steer}{prompt.content}") for prompt in openings for steer in STEERS]
    say_time(loaded, engine, steered, sampling, num)
    with progress("completions", len(steered) * num) as reporter:
        drawn = engine.generate(steered, num, sampling, on_progress=lambda done, _: reporter.update(done))
    candidates: list[Group] = []
    for prompt, groups in zip(openings, chunks(drawn, len(STEERS)), strict=True):
        completions = tuple(completion for group in groups for completion in group.completions)
        # The first group is the one without a steer: its prompt ids are the opening's own.
        candidates.append(Group(prompt, groups[0].prompt_token_ids, completions, groups[0].weight_version))
    return candidates


def vote(stage: Stage, train: Sequence[Group], heldout: Sequence[Group]) -> Votes:
    """The rater's votes on both parts: yours, or those of the simulated rater."""
    if stage.options.vote:
        stage.say(2, "you vote")
        return Votes(*ask_votes(train, heldout, seed=stage.options.seed))
    votes = Votes(votes_on(train, SimulatedRater()), votes_on(heldout, SimulatedRater()))
    num_ties = sum(v.preference == "tie" for v in (*votes.train, *votes.heldout))
    num_votes = len(votes.train) + len(votes.heldout)
    stage.say(2, f"{num_votes} votes by the {RATER_NAME}, {num_ties} of them ties; no person voted")
    return votes


def train_reward_model(stage: Stage, votes: Votes) -> setup.RunResult:
    """Train the reward model on the votes that are no ties; its run, with the accuracy on the held-out votes in the
    summary.
    """
    decided = [pair for pair in as_pairs(votes.train) if not pair.tie]
    heldout = [pair for pair in as_pairs(votes.heldout) if not pair.tie]
    stage.say(3, f"a reward model learns from {len(decided)} votes, {len(heldout)} others tell how well")
    result = run(stage.reward_recipe, Inputs(pairs=decided, heldout_pairs=heldout))
    gc.collect()
    return result


def train_policy(stage: Stage, openings: Sequence[Prompt], reward_run: setup.RunResult) -> setup.RunResult:
    """Train the policy against the reward model, on the openings that the votes were about."""
    stage.say(4, f"{SPECS[stage.options.algorithm].title} moves the policy toward the reward model")
    source = RewardSource(source=str(reward_run.run_dir))
    cfg = stage.policy_recipe.model_copy(update={"reward": (source,)})
    result = run(cfg, Inputs(prompts=openings))
    gc.collect()
    return result


def compare_models(
    stage: Stage, openings: Sequence[Prompt], reward_run: setup.RunResult, policy_run: setup.RunResult
) -> Comparison:
    """Base model and policy on openings that nothing was trained on; the rater judges, or after your votes the
    reward model.
    """
    num = 2 if stage.options.quick else COMPARED_COMPLETIONS
    judge = str(reward_run.run_dir) if stage.options.vote else "sentiment"
    stage.say(5, f"before and after, {num} completions of each of {len(openings)} openings")
    before = load_policy(stage.policy_recipe.model)
    after = load_policy(stage.policy_recipe.model.model_copy(update={"name": str(policy_run.run_dir)}))
    scorer = Scorer([RewardSource(source=judge)], policy_tokenizer=before.tokenizer)
    first, second = (
        Side.of(name, one.model, one.tokenizer, backend=stage.options.backend, batch_size=128)
        for name, one in (("before", before), ("after", after))
    )
    sampling = stage.sampling("compare")
    say_time(before, first.engine, openings, sampling, num, num_models=2)
    return compare(
        first,
        second,
        openings,
        scorer,
        sampling,
        num_completions=num,
        seed=derive(stage.options.seed, "compare"),
    )


def say_time(
    loaded: LoadedModel,
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    num: int,
    *,
    num_models: int = 1,
) -> None:
    """Announce about how long drawing `num` completions of each prompt takes; each of two models also scores what
    the other drew, and without an exact engine what it drew itself.
    """
    num_given = fmean(len(encode_prompt(loaded.tokenizer, prompt)) for prompt in prompts)
    num_rows, num_slots = len(prompts) * num, min(128, len(prompts) * num)
    rows = Rows(num_given, sampling.max_new_tokens, num)
    scored = len(prompts) * num_given + (num_models - engine.is_exact) * rows.tokens(num_rows) * (num_models > 1)
    work = (Work.drawing(num_rows, sampling.max_new_tokens, num_slots) + Work(scored)) * num_models
    cost = trial(language_model(loaded.model), rows, engine, sampling, num_slots)
    announce_time(work.seconds(cost), f"{num_rows} completions")


def as_pairs(votes: Sequence[Vote]) -> list[Pair]:
    """Votes as preference pairs, in order; ties are kept and marked."""
    return [
        Pair(v.prompt, v.b, v.a) if v.preference == "b" else Pair(v.prompt, v.a, v.b, tie=v.preference == "tie")
        for v in votes
    ]


def figures(
    stage: Stage, comparison: Comparison, reward_run: setup.RunResult, watch: setup.Stopwatch
) -> dict[str, object]:
    """The object that `tunesmith demo --json` prints."""
    samples = comparison.write_samples_jsonl(stage.folder.path / "samples.jsonl")
    names = (
        "num_improved", "num_prompts", "mean_before", "mean_after", "median_before", "median_after",
        "p_value", "kl_per_sequence", "distinct2_ratio",
    )  # fmt: skip
    return {
        **{name: getattr(comparison, name) for name in names},
        "reward_model_accuracy": reward_run.summary.get("eval/accuracy"),
        "num_heldout_votes": int(float(str(reward_run.summary.get("eval/num_pairs", 0)))),
        "minutes": watch.minutes,
        "peak_rss_gb": peak_rss_gb(),
        "algorithm": stage.options.algorithm,
        "seed": stage.options.seed,
        "report": str(stage.folder.path / "report.html"),
        "samples": str(samples),
    }


def write_report(
    stage: Stage,
    facts: Mapping[str, object],
    comparison: Comparison,
    votes: Votes,
    runs: tuple[setup.RunResult, setup.RunResult],
) -> None:
    """Write `result.json` and `report.html` into the demo's folder."""
    reward_run, policy_run = runs
    stage.folder.write_json("result.json", facts)
    all_votes = [*votes.train, *votes.heldout]
    demo: dict[str, Any] = {
        "result": facts,
        "comparison": comparison.to_json(),
        "votes": {
            "steers": [steer.strip() for steer in STEERS if steer],
            "num_train": sum(v.preference != "tie" for v in votes.train),
            "num_heldout": facts["num_heldout_votes"],
            "num_ties": sum(v.preference == "tie" for v in all_votes),
            "accuracy": facts["reward_model_accuracy"],
            "examples": [{**asdict(v), "prompt": v.prompt.content} for v in all_votes if v.preference != "tie"][:6],
        },
        "reward_metrics": list(reward_run.metrics),
        "policy_metrics": list(policy_run.metrics),
        "algorithm": SPECS[stage.options.algorithm].title,
        "environment": json.loads((stage.folder.path / "environment.json").read_text(encoding="utf-8")),
        "rater": "you" if stage.options.vote else "simulated: VADER lexicon",
        "command": command(stage.options),
    }
    write_demo_report(stage.folder.path / "report.html", demo)


def command(options: DemoOptions) -> str:
    """The command line that runs the same demo again."""
    flags = [f"--algorithm {options.algorithm}", f"--seed {options.seed}", *(["--vote"] if options.vote else [])]
    flags += [f"--level {options.level}"] if options.level else []
    flags += [f"--dtype {options.dtype}"] if options.dtype != "auto" else []
    return " ".join(["tunesmith demo", *flags])


def run_live_demo(folder: Path, *, seed: int = 0, announce: Callable[[str], object]) -> "LiveResult":
    """Serve the voting page and train on `folder` until Ctrl-C; a later call continues.

    `announce` is given the address that logs the person in. Raises RunError if the server does not come up.
    """
    # These need the extra `web`, which the demo without a page does not.
    from tunesmith.apps.workflows.live_simulation import server
    from tunesmith.learn.live import loop as live

    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_recipe("live", recipe="live_smollm2", overrides={"live.dir": str(folder), "run.seed": seed})
    assert isinstance(loaded.recipe, LiveRecipe)
    with server(folder) as served:
        announce(served.login_url)
        webbrowser.open(served.login_url)
        return live.run(loaded.recipe, provenance=loaded.provenance)
