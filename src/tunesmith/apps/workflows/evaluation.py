"""`tunesmith compare`: two models, the same prompts and seeds, one scorer. `tunesmith eval reward`: a reward model on
held-out pairs."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.judge import is_judge, judge_settings
from tunesmith.base.config.load import load_recipe, read_algorithm
from tunesmith.base.config.recipe import ENVIRONMENT_REWARD
from tunesmith.base.config.sections import (
    EnvironmentSection,
    MixedPairsSection,
    ModelSection,
    PromptsSection,
    RewardSource,
    Truncate,
)
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.environment import other_folder
from tunesmith.base.runs.listing import read_object
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.sets import preference_sets
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.load import compute_dtype, load_policy, load_reward_model
from tunesmith.engine.models.loaded import context_length
from tunesmith.learn.environments.episodes import Conversations
from tunesmith.learn.environments.packages import rows_of
from tunesmith.learn.environments.sources import opener
from tunesmith.learn.evaluation.compare import Comparison, Side, compare
from tunesmith.learn.evaluation.judged import JudgedPairs
from tunesmith.learn.evaluation.reward_quality import RewardQuality, decided_pairs
from tunesmith.learn.evaluation.reward_quality import judge as judge_model
from tunesmith.learn.evaluation.reward_sources import pairs_to_judge
from tunesmith.learn.judges.judge import open_judge
from tunesmith.learn.rewards.judged import JudgeReward
from tunesmith.learn.rewards.outcome import Policy
from tunesmith.learn.rewards.scorer import Scorer

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of the demo or of the sentiment workflow, the comparison that they come from, and the folder."""

    figures: Mapping[str, object]
    comparison: Comparison
    run_dir: Path


def run_comparison(
    before: str,
    after: str,
    prompts: str,
    scorer: str | RewardSource | None = None,
    *,
    environment: EnvironmentSection | None = None,
    sampling: SamplingParams,
    num_completions: int = 8,
    trust_remote_code: bool = False,
) -> Comparison:
    """The comparison of the models named `before` and `after` on the prompts of a file.

    `scorer` is an item of a recipe's `reward`, or its `source`; without one it is what the `environment` gives, which
    both models talk to, in the same episodes. `trust_remote_code` is for the two models; code of a reward model is
    never run. Raises InputError for a model, file, scorer or environment that cannot be used.
    """
    environment = environment or EnvironmentSection()
    reward = _reward_of(scorer, environment)
    open_episode = opener(environment)
    loaded_before, loaded_after = (
        load_policy(ModelSection(name=name, trust_remote_code=trust_remote_code)) for name in (before, after)
    )
    given = rows_of(prompts, environment.arguments)
    rows = load_prompts(prompts if given is None else given, PromptsSection(source=prompts))
    judge = open_judge(judge_settings(reward.source)) if is_judge(reward.source) else None
    if judge is not None and judge.settings.mode == "pairwise":
        scoring = JudgedPairs(judge)
    else:
        scorer_of = reward if judge is None else JudgeReward(judge, policy=Policy("drop"))
        scoring = Scorer([scorer_of], policy_tokenizer=loaded_before.tokenizer)
    with ExitStack() as opened:
        sides: list[Side] = []
        for name, loaded in ((before, loaded_before), (after, loaded_after)):
            side = Side.of(name, loaded.model, loaded.tokenizer)
            if open_episode is not None:
                context = context_length(loaded.model)
                talks = Conversations(
                    open_episode, loaded.tokenizer, environment, max_new_tokens=sampling.max_new_tokens, context=context
                )
                opened.callback(talks.close)
                talks.check()
                side = replace(side, conversations=talks)
            sides.append(side)
        first, second = sides
        seed = sampling.seed or 0
        found = compare(first, second, rows, scoring, sampling, num_completions=num_completions, seed=seed)
        return found if judge is None or found.judge else replace(found, judge=judge.facts())


def _reward_of(scorer: str | RewardSource | None, environment: EnvironmentSection) -> RewardSource:
    """The reward that a comparison is judged by. Raises InputError if nothing gives any."""
    if isinstance(scorer, RewardSource) and scorer.source != ENVIRONMENT_REWARD["source"]:
        return scorer
    if isinstance(scorer, str) and scorer != ENVIRONMENT_REWARD["source"]:
        return RewardSource(source=scorer)
    if not environment.is_given:
        raise InputError(
            "nothing scores the completions; name a reward with --scorer, or what gives one with --environment or "
            "--tools"
        )
    return RewardSource.model_validate(ENVIRONMENT_REWARD)


_JUDGED_SHARE = 0.5
"""Share of the prompts that is judged where a model's training pairs are not known."""


@dataclass(frozen=True, slots=True)
class RewardEvaluation:
    """The quality of the reward model `model` on pairs of `source`.

    `train_source` is where the TF-IDF model was fitted: on the pairs that the run was trained on, or, where these are
    not known, on half of the prompts of `source`, so that the other half is judged.
    """

    model: str
    source: str
    train_source: str
    quality: RewardQuality

    def to_json(self) -> dict[str, object]:
        """The figures at the top level, and the names of model and pairs."""
        return {
            "model": self.model,
            "source": self.source,
            "train_source": self.train_source,
            **self.quality.to_json(),
        }


def evaluate_reward(
    model: str,
    pairs: str | None = None,
    *,
    label: str | None = None,
    skip_bad: bool = False,
    truncate: Truncate | None = None,
    micro_batch_size: int = 16,
    num_bins: int = 10,
) -> RewardEvaluation:
    """The evaluation of the reward model `model`: a run folder, a local folder or a hub id.

    Of a run, pairs are read, cut and split as its recipe says, or cut as `truncate` says. Without `pairs`, or with the
    run's own source, those that it held out are judged, and the TF-IDF model is fitted on those that it was trained on.
    Other `pairs` are all judged, and the TF-IDF model is fitted on the run's training pairs. Where `model` is no run,
    half of the prompts of `pairs` are judged and the TF-IDF model is fitted on the other half. Raises InputError for a
    model or pairs that cannot be used, or if nothing says which pairs to take.
    """
    recipe = run_recipe(model)
    if recipe is None and pairs is None:
        raise InputError(f"{model} is no folder of a reward run, so its pairs are not known; name some with --pairs")
    dtype = compute_dtype(recipe.model.dtype) if recipe else None
    reward_model = load_reward_model(model, label=label, dtype=dtype)
    if not reward_model.pools_last_token:
        raise InputError(
            f"{model} is no decoder with a score head, so its inputs have a form of their own; give the run folder of "
            "`tunesmith train reward`, or a classifier on a decoder"
        )
    section, seed = (
        (recipe.pairs, recipe.run.seed)
        if recipe
        else (MixedPairsSection(source=str(pairs), heldout_fraction=_JUDGED_SHARE), 0)
    )
    changes = {"skip_bad": section.skip_bad or skip_bad, "truncate": truncate or section.truncate, "rankings": "pairs"}
    section = section.model_copy(update=changes)
    source = section.source or ", ".join(one.source for one in section.sources)
    if not source:
        raise InputError(
            f"{model} was given its pairs in Python, so they are not known; judge `{model}/final` with --pairs"
        )
    if pairs is not None and pairs != section.source:
        section = section.model_copy(update={"heldout_source": pairs, "heldout_sources": ()})
    limit = context_length(reward_model.model)
    sets = preference_sets(section, reward_model.tokenizer, seed, max_length=limit, encode=reward_model.encode)
    heldout, elsewhere = pairs_to_judge(sets)
    found = judge_model(
        reward_model,
        heldout,
        decided_pairs(sets.train, {}),
        elsewhere,
        micro_batch_size=micro_batch_size,
        num_bins=num_bins,
    )
    return RewardEvaluation(model, section.heldout_source or source, source, found)


def run_recipe(model: str) -> RewardRecipe | None:
    """The recipe of the run in the folder `model`, or None if it is no run of `tunesmith train reward`."""
    file = Path(model).expanduser() / "recipe.yaml"
    if not file.is_file() or read_algorithm(file) != "reward":
        return None
    if elsewhere := other_folder(read_object(file.with_name("environment.json")).get("folder")):
        _log.info("%s", elsewhere)
    recipe = load_recipe("reward", file=file).recipe
    assert isinstance(recipe, RewardRecipe)
    return recipe
