"""The reward model: a scalar head on a language model, trained on which of two completions was preferred.

Bradley and Terry 1952; Stiennon et al. 2020. Shape legend: N pairs, B = 2 N sequences, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from tunesmith.algorithms import sums
from tunesmith.algorithms.preference_loss import PreferenceStats, RankingStats, bradley_terry, plackett_luce
from tunesmith.algorithms.sums import merged
from tunesmith.batch.pack import chunks
from tunesmith.batch.upload import Uploader
from tunesmith.config.schema import RewardRecipe
from tunesmith.core.errors import ConfigError
from tunesmith.core.seeds import items_at
from tunesmith.core.trace import span
from tunesmith.data.collate import Encoded, as_pairs, as_rankings, collate_pairs, collate_rankings
from tunesmith.data.pairs import PreferenceLike
from tunesmith.data.sets import Facts, preference_sets
from tunesmith.evaluation.reward_quality import decided_pairs, judge
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers, keep_lower_layers
from tunesmith.models.heads import RewardModel
from tunesmith.models.load import new_reward_model
from tunesmith.models.loaded import context_length
from tunesmith.models.optimizer import MasterAdamW, StepReport
from tunesmith.trainers import setup
from tunesmith.trainers.estimate import announce, reward_estimate
from tunesmith.trainers.restart import Resumable, fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.trainers.session import Session, StepRecord, open_session
from tunesmith.trainers.update_metrics import update_metrics

SHOWN = ("loss", "accuracy", "margin")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the model and the optimizer, nothing else."""

    cfg: RewardRecipe
    device: torch.device
    model: RewardModel
    optimizer: MasterAdamW
    pairs: Sequence[Encoded]
    heldout: Sequence[Encoded]
    heldout_prompts: Mapping[str, str]
    identity: Mapping[str, str]
    num_steps: int
    facts: Facts
    uploader: Uploader | None = field(init=False)

    def __post_init__(self) -> None:
        self.uploader = setup.uploader_to(self.device)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step hands to `run`."""

    metrics: setup.Metrics
    report: StepReport


def build(
    cfg: RewardRecipe,
    *,
    pairs: Sequence[PreferenceLike] | None = None,
    heldout_pairs: Sequence[PreferenceLike] | None = None,
) -> State:
    """The state before the first step. `pairs`, where given, stand in for those that `cfg` names.

    Pairs are held out by prompt as `cfg` says, unless `heldout_pairs` are given.
    """
    device = setup.prepare(cfg)
    if cfg.pairs.rankings == "plackett_luce" and cfg.reward_model.margin == "column":
        raise ConfigError("reward_model.margin: column needs pairs; set pairs.rankings: pairs, or margin: none")
    model = new_reward_model(cfg.model, device=device)
    keep_lower_layers(model.model, cfg.reward_model.num_layers)
    freeze_lower_layers(model.model, cfg.model.num_trainable_layers)
    model.model.score.requires_grad_(True)
    room = context_length(model.model)
    data = preference_sets(cfg.pairs, model.tokenizer, cfg.run.seed, pairs, heldout_pairs, room=room)
    num_steps = cfg.run.steps or -(-len(data.train) * cfg.reward_model.num_epochs // cfg.reward_model.pairs_per_step)
    optimizer = MasterAdamW(model, cfg.optimizer, total_steps=num_steps)
    identity = {
        "the model": fingerprint_of_tensors(model),
        "the pairs": fingerprint_of_rows([*data.train, *data.heldout]),
        "the device": device.type,
    }
    return State(
        cfg=cfg,
        device=device,
        model=model,
        optimizer=optimizer,
        pairs=data.train,
        heldout=data.heldout,
        heldout_prompts=data.heldout_prompts,
        identity=identity,
        num_steps=num_steps,
        facts=data.facts,
    )


def step(state: State, pairs: Sequence[Encoded]) -> StepResult:
    """One step: the loss of `pairs` (or rankings), accumulated over micro-batches, and an update."""
    cfg = state.cfg.reward_model
    num_pairs = sums.sum_over_ranks(len(pairs))  # one global denominator
    stats: list[PreferenceStats | RankingStats] = []
    total_loss = torch.zeros((), device=state.device)
    for micro in chunks(pairs, cfg.micro_batch_size):
        with span("forward"):
            loss, micro_stats = micro_batch_loss(
                state, micro, num_pairs, with_margin=cfg.margin == "column", center_coef=cfg.center_coef
            )
        with span("backward"):
            state.optimizer.scaled(loss).backward()
        total_loss += loss.detach()
        stats.append(micro_stats)
    with span("optimizer"):
        report = state.optimizer.step(loss=total_loss.item())
    return StepResult({**merged(stats).metrics(), **update_metrics([report])}, report)


def micro_batch_loss(
    state: State, items: Sequence[Encoded], num_items: float, *, with_margin: bool = False, center_coef: float = 0.0
) -> tuple[torch.Tensor, PreferenceStats | RankingStats]:
    """The loss of one micro-batch, divided by `num_items`, and its statistics: Bradley-Terry, or Plackett-Luce where
    the recipe asks for it. Each completion is scored once.
    """
    if state.cfg.pairs.rankings == "plackett_luce":
        ranked = setup.sent(collate_rankings(as_rankings(items), pad_id=0), state.uploader)
        reward_RK = ranked.by_ranking(state.model.score_sequences(ranked.ids_BT, ranked.lengths_B))
        return plackett_luce(reward_RK, ranked.rank_RK, num_rankings=num_items, center_coef=center_coef)
    batch = setup.sent(collate_pairs(as_pairs(items), pad_id=0), state.uploader)
    chosen_N, rejected_N = batch.chosen_and_rejected(state.model.score_sequences(batch.ids_BT, batch.lengths_B))
    margin_N = batch.margin_N if with_margin else None
    return bradley_terry(chosen_N, rejected_N, margin_N, batch.tie_N, num_pairs=num_items, center_coef=center_coef)


@torch.no_grad()
def evaluate(state: State) -> setup.Metrics:
    """Accuracy, margin and loss on the held-out pairs or rankings that are no ties; empty without them.

    `eval/longer_wins` is the accuracy of the rule "the longer one was preferred", a coin decides between equals: a
    reward model must beat it.
    """
    items = [item for item in state.heldout if item.decided]
    if not items:
        return {}
    with span("evaluate"):
        micros = chunks(items, state.cfg.reward_model.micro_batch_size)
        stats = [micro_batch_loss(state, micro, len(items))[1] for micro in micros]
    decided = [pair for item in items for pair in item.decided]
    longer = sum((len(better) > len(worse)) + 0.5 * (len(better) == len(worse)) for better, worse in decided)
    metrics = {f"eval/{name}": value for name, value in merged(stats).metrics().items() if name != "tie_fraction"}
    return {**metrics, "eval/num_pairs": float(len(decided)), "eval/longer_wins": longer / len(decided)}


def mean_pair_tokens(pairs: Sequence[Encoded]) -> float:
    """Tokens of both sides of a pair, on average; a completion that stands in several pairs counts once."""
    distinct = {ids for pair in pairs for ids in pair.sequences}
    return sum(map(len, distinct)) / len(pairs)


def run(
    cfg: RewardRecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    pairs: Sequence[PreferenceLike] | None = None,
    heldout_pairs: Sequence[PreferenceLike] | None = None,
    progress: bool = True,
    resume: Path | None = None,
) -> setup.RunResult:
    """Train a reward model as `cfg` says, or go on with the run in the folder `resume`; folder, metrics and summary.

    Raises:
        InputError: for a config, model or pairs that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite, or memory runs out.
        StoppedError: after SIGTERM or SIGINT, once a checkpoint is written.
    """
    state = build(cfg, pairs=pairs, heldout_pairs=heldout_pairs)
    estimate = reward_estimate(state.model.model, cfg, pair_tokens=mean_pair_tokens(state.pairs))
    announce(estimate, state.num_steps, progress)
    keys = [pair.prompt_id for pair in state.pairs]
    size = min(cfg.reward_model.pairs_per_step, len(state.pairs))
    with open_session(
        cfg,
        resumable(state),
        provenance=provenance,
        show_progress=progress,
        data=state.facts,
        resume=resume,
        from_python=setup.given(pairs=pairs),
    ) as session:
        for index in session.steps():
            # The pairs of one prompt stay together: a completion that stands in several is scored once.
            chosen = [state.pairs[i] for i in items_at(cfg.run.seed, index * size, size, len(keys), keys=keys)]
            with session.working() as times:
                result = step(state, chosen)
                evaluation = evaluate(state) if session.is_due(index, cfg.run.eval_every) else {}
            metrics = {**result.metrics, **evaluation, **times.metrics()}
            rows = partial(batch_rows, chosen)
            session.end_step(index + 1, StepRecord(metrics, result.report, rows), SHOWN)
        figures = {**summary(state, session), **judged(state, session)}
        card = ModelCard(
            base_model=cfg.model.name,
            algorithm="Bradley-Terry reward model",
            title=session.folder.path.name,
            metrics=figures,
            recipe=cfg.model_dump(mode="json"),
        )
        save_final(state.model, state.model.tokenizer, session.folder.final, card)
        return session.finish({**figures, "algorithm": "reward"})


def judged(state: State, session: Session) -> dict[str, object]:
    """The figures of `evaluation.judge` on held-out pairs, which take the place of those of the last training step;
    empty if it is off or no pairs are held out. All figures are written to `reward_quality.json`.
    """
    heldout = decided_pairs(state.heldout, state.heldout_prompts)
    if not state.cfg.evaluation.judge or not heldout:
        return {}
    train = decided_pairs(state.pairs, {})
    found = judge(state.model, heldout, train, micro_batch_size=state.cfg.reward_model.micro_batch_size)
    session.folder.write_json("reward_quality.json", found.to_json())
    names = ("accuracy", "accuracy_low", "accuracy_high", "tfidf", "longer_wins", "brier", "ece", "num_pairs")
    return {"num_train_pairs": len(state.pairs), **{name: getattr(found, name) for name in names}}


def resumable(state: State) -> Resumable:
    """How a session saves and restores `state`."""
    return Resumable({"model": state.model}, state.optimizer, {}, state.num_steps, state.identity)


def batch_rows(pairs: Sequence[Encoded]) -> list[dict[str, object]]:
    """The pairs of a step, for a person who looks why an update was refused."""
    return [asdict(pair) for pair in pairs]


def summary(state: State, session: Session) -> dict[str, object]:
    """What the run came to: the last training loss, and the figures on held-out pairs."""
    last = session.metrics[-1]
    names = ("loss", "accuracy", "eval/accuracy", "eval/margin", "eval/num_pairs", "eval/longer_wins")
    refused = int(sum(row["refused_steps"] for row in session.metrics))
    figures = {name: last[name] for name in names if name in last}
    return {"steps": len(session.metrics), "num_pairs": len(state.pairs), "refused_steps": refused, **figures}
