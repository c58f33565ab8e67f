"""Direct preference optimisation: a policy learns from preferences without a reward model and without drawing anything.

DPO (Rafailov et al. 2023, arXiv 2305.18290) and the losses of `algorithms.direct_loss`. Shape legend: A distinct
answers of the data, B answers of a micro-batch, S sides (0 chosen, 1 rejected), N pairs. A completion that stands in
several pairs of a micro-batch is computed once, and those of one prompt side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from tunesmith.algorithms import direct_loss, sums
from tunesmith.algorithms.direct_loss import DirectStats, PairLogps
from tunesmith.algorithms.sums import Sums, merged, total
from tunesmith.batch.pack import chunks
from tunesmith.batch.upload import Uploader
from tunesmith.config.schema import DPORecipe
from tunesmith.core.errors import DataError
from tunesmith.core.log import get_logger
from tunesmith.core.seeds import items_at
from tunesmith.core.trace import span
from tunesmith.data.answers import AnswerLabel, AnswerPair, collate_answers, in_order
from tunesmith.data.judgements import JudgementLike
from tunesmith.data.sets import DirectSets, Unit, direct_sets
from tunesmith.kernels.native import Kernels
from tunesmith.models.export import ModelCard, save_final
from tunesmith.models.freeze import freeze_lower_layers
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.load import frozen_copy, load_policy
from tunesmith.models.loaded import PreTrainedTokenizerBase, context_length
from tunesmith.models.logprob import token_logps
from tunesmith.models.optimizer import MasterAdamW, StepReport
from tunesmith.models.tokenizer import decode
from tunesmith.trainers import setup
from tunesmith.trainers.estimate import announce, direct_estimate
from tunesmith.trainers.restart import Resumable, fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.trainers.session import Session, StepRecord, open_session
from tunesmith.trainers.update_metrics import update_metrics

_log = get_logger(__name__)

SHOWN = ("loss", "rewards/accuracies", "rewards/margins")
"""Figures that stand behind the progress bar."""


@dataclass(slots=True)
class State:
    """What the loop owns. `step` changes the policy and the optimizer, nothing else.

    `reference` is the starting model where it is asked at each step, `reference_A` its log-probs of all answers where
    they were computed before the first; a loss without a reference has neither.
    """

    cfg: DPORecipe
    device: torch.device
    policy: LanguageModel
    reference: LanguageModel | None
    reference_A: torch.Tensor | None
    tokenizer: PreTrainedTokenizerBase
    optimizer: MasterAdamW
    data: DirectSets
    length_A: torch.Tensor
    identity: Mapping[str, str]
    num_steps: int
    uploader: Uploader | None = field(init=False)

    def __post_init__(self) -> None:
        self.uploader = setup.uploader_to(self.device)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step hands to `run`."""

    metrics: setup.Metrics
    report: StepReport


@dataclass(frozen=True, slots=True)
class TokenSums(Sums):
    """Completion tokens that a step computed, and the sum of their entropies in nats."""

    num_tokens: torch.Tensor
    entropy: torch.Tensor


def build(
    cfg: DPORecipe,
    *,
    pairs: Sequence[JudgementLike] | None = None,
    heldout_pairs: Sequence[JudgementLike] | None = None,
) -> State:
    """The state before the first step, but for precomputed log-probs of the reference: `compute_reference` fills them
    in. `pairs`, where given, stand in for those that `cfg` names; they are held out by prompt as `cfg` says, unless
    `heldout_pairs` are given.
    """
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    room = context_length(loaded.model)
    data = direct_sets(cfg.pairs, loaded.tokenizer, cfg.dpo, cfg.run.seed, pairs, heldout_pairs, room=room)
    check_labels(data, cfg)
    policy = language_model(loaded.model, Kernels())
    identity = {
        "the model": fingerprint_of_tensors(loaded.model),
        "the pairs": fingerprint_of_rows([*data.answers, *data.train, *data.heldout]),
        "the device": device.type,
    }
    is_live = cfg.dpo.needs_reference and cfg.dpo.reference == "live"
    reference = language_model(frozen_copy(loaded.model), policy.kernels) if is_live else None
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    num_steps = cfg.run.steps or -(-len(data.train) * cfg.dpo.num_epochs // cfg.dpo.pairs_per_step)
    return State(
        cfg=cfg,
        device=device,
        policy=policy,
        reference=reference,
        reference_A=None,
        tokenizer=loaded.tokenizer,
        optimizer=MasterAdamW(loaded.model, cfg.optimizer, total_steps=num_steps, kernels=policy.kernels),
        data=data,
        length_A=torch.tensor([len(answer.completion_ids) for answer in data.answers], device=device),
        identity=identity,
        num_steps=num_steps,
    )


def check_labels(data: DirectSets, cfg: DPORecipe) -> None:
    """Refuse labels of which KTO cannot learn, and warn of weights that leave one side without a voice.

    The weighted numbers of wanted and unwanted completions should be within a third of each other (Ethayarajh et al.
    2024, equation 8). Raises DataError if all prompts are equal.
    """
    labels = [unit for unit in data.train if isinstance(unit, AnswerLabel)]
    if any(label.mismatched < 0 for label in labels):
        raise DataError("the loss kto compares with completions of other prompts; give rows of two prompts or more")
    wanted = cfg.dpo.desirable_weight * sum(label.is_wanted for label in labels)
    unwanted = cfg.dpo.undesirable_weight * sum(not label.is_wanted for label in labels)
    if labels and not 3 / 4 <= (wanted + 1e-9) / (unwanted + 1e-9) <= 4 / 3:
        _log.warning(
            "wanted and unwanted completions weigh %g and %g; bring them within a third of each other by "
            "dpo.desirable_weight or dpo.undesirable_weight",
            wanted,
            unwanted,
        )


def compute_reference(state: State, progress: bool = False) -> None:
    """Fill in the log-probs of the reference of all answers, where the recipe wants them precomputed.

    The policy is the reference before its first step, so no second model is held. A resumed run computes them anew,
    before it takes over its checkpoint, and is refused if they are not those that it began with.
    """
    if not state.cfg.dpo.needs_reference or state.cfg.dpo.reference == "live":
        return
    units = [*state.data.train, *state.data.heldout]
    asked = in_order(state.data.answers, chain(places_of(units), mismatched_of(units)))
    setup.say(f"log-probs of {len(asked)} completions under the starting model", enabled=progress)
    state.reference_A = answer_logps(state, state.policy, asked)
    digest = fingerprint_of_rows(state.reference_A.tolist())
    state.identity = {**state.identity, "the log-probs of the reference": digest}


def step(state: State, units: Sequence[Unit]) -> StepResult:
    """One step: the loss of the pairs (or labels) `units`, accumulated over micro-batches, and an update."""
    cfg = state.cfg.dpo
    num_units = sums.sum_over_ranks(len(units))  # one global denominator
    with span("reference"):
        reference_A = reference_logps(state, units)
    with span("kl"):
        kl = mismatched_kl(state, units, reference_A)
    stats: list[DirectStats] = []
    tokens: list[TokenSums] = []
    total_loss = torch.zeros((), device=state.device)
    for micro in chunks(units, cfg.micro_batch_size):
        with span("forward"):
            loss, micro_stats, micro_tokens = micro_batch_loss(state, micro, reference_A, num_units, kl)
        with span("backward"):
            state.optimizer.scaled(loss).backward()
        total_loss += loss.detach()
        stats.append(micro_stats)
        tokens.append(micro_tokens)
    with span("optimizer"):
        report = state.optimizer.step(loss=total_loss.item())
    counted = merged(tokens).floats()
    metrics = {**merged(stats).metrics(), "num_tokens": counted["num_tokens"]}
    metrics |= {"entropy": counted["entropy"] / counted["num_tokens"], **({"kl": kl} if cfg.loss == "kto" else {})}
    return StepResult({**metrics, **update_metrics([report])}, report)


def micro_batch_loss(
    state: State, micro: Sequence[Unit], reference_A: torch.Tensor | None, num_units: float, kl: float
) -> tuple[torch.Tensor, DirectStats, TokenSums]:
    """The loss of one micro-batch, a scalar, with its statistics. An answer of several pairs is computed once."""
    batch = setup.sent(collate_answers(state.data.answers, places_of(micro)), state.uploader)
    scores = token_logps(state.policy, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B)
    logp_A = torch.zeros_like(state.length_A, dtype=torch.float32)
    logp_A = logp_A.index_put((batch.answer_B,), scores.logp_BT.sum(dim=1))
    loss, stats = loss_of(state, micro, logp_A, reference_A, num_units, kl)
    return loss, stats, TokenSums(total(batch.lengths_B - batch.prompt_lengths_B), total(scores.entropy_BT))


def loss_of(
    state: State,
    units: Sequence[Unit],
    logp_A: torch.Tensor,
    reference_A: torch.Tensor | None,
    num_units: float,
    kl: float,
) -> tuple[torch.Tensor, DirectStats]:
    """The loss of `units`, divided by `num_units`, and its statistics, from log-probs of their answers."""
    cfg = state.cfg.dpo
    labels = [unit for unit in units if isinstance(unit, AnswerLabel)]
    if labels:
        assert reference_A is not None
        answer_B = torch.tensor([label.answer for label in labels], device=state.device)
        wanted_B = torch.tensor([label.is_wanted for label in labels], device=state.device)
        return direct_loss.kto(logp_A[answer_B], reference_A[answer_B], wanted_B, cfg, kl=kl, num_completions=num_units)
    pairs = [unit for unit in units if isinstance(unit, AnswerPair)]
    answer_SN = torch.tensor([[p.chosen for p in pairs], [p.rejected for p in pairs]], device=state.device)
    reference_SN = None if reference_A is None else reference_A[answer_SN]
    has_ties = any(pair.tie for pair in pairs)
    tie_N = torch.tensor([pair.tie for pair in pairs], device=state.device) if has_ties else None
    logps = PairLogps(logp_A[answer_SN], state.length_A[answer_SN], reference_SN, tie_N)
    return direct_loss.paired(logps, cfg, num_pairs=num_units)


def reference_logps(state: State, units: Sequence[Unit]) -> torch.Tensor | None:
    """Log-probs of the reference for the answers of `units`, by place; None where the loss has no reference."""
    if state.reference is None:
        return state.reference_A
    return answer_logps(state, state.reference, chain(places_of(units), mismatched_of(units)))


def mismatched_kl(state: State, units: Sequence[Unit], reference_A: torch.Tensor | None) -> float:
    """KTO's estimate of the KL to the reference from mismatched completions of the whole step; 0 for other losses."""
    mismatched = mismatched_of(units)
    if not mismatched or reference_A is None:
        return 0.0
    logp_A = answer_logps(state, state.policy, mismatched)
    kl = direct_loss.mismatched_kl(logp_A[mismatched], reference_A[mismatched])
    return sums.sum_over_ranks(kl) / sums.sum_over_ranks(1)


@torch.no_grad()
def answer_logps(state: State, model: LanguageModel, places: Iterable[int]) -> torch.Tensor:
    """logp_A: the log-prob of each answer at `places` under `model`, summed over its tokens; NaN at all others."""
    logp_A = torch.full_like(state.length_A, torch.nan, dtype=torch.float32)
    for chunk in chunks(in_order(state.data.answers, places), 2 * state.cfg.dpo.micro_batch_size):
        batch = setup.sent(collate_answers(state.data.answers, chunk), state.uploader)
        scores = token_logps(model, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B)
        logp_A[batch.answer_B] = scores.logp_BT.sum(dim=1)
    return logp_A


def places_of(units: Sequence[Unit]) -> list[int]:
    """Places of the answers of `units`."""
    return [place for unit in units for place in unit.answers]


def mismatched_of(units: Sequence[Unit]) -> list[int]:
    """Places of the mismatched answers, by which KTO estimates the KL; none for pairs."""
    return [unit.mismatched for unit in units if isinstance(unit, AnswerLabel) and unit.mismatched >= 0]


@torch.no_grad()
def evaluate(state: State) -> setup.Metrics:
    """Loss, rewards and accuracy on what is held out, ties left out; empty without any.

    For labels `eval/rewards/accuracies` is the chance that a wanted completion has a higher reward than an unwanted
    one, all of them compared, equal ones half.
    """
    units = [unit for unit in state.data.heldout if not (isinstance(unit, AnswerPair) and unit.tie)]
    if not units:
        return {}
    with span("evaluate"):
        reference_A = reference_logps(state, units)
        logp_A = answer_logps(state, state.policy, places_of(units))
        kl = mismatched_kl(state, units, reference_A)
        metrics = loss_of(state, units, logp_A, reference_A, len(units), kl)[1].metrics()
    labels = [unit for unit in units if isinstance(unit, AnswerLabel)]
    if labels and reference_A is not None:
        ratio_A = logp_A - reference_A
        wanted, unwanted = (ratio_A[[one.answer for one in labels if one.is_wanted is side]] for side in (True, False))
        higher = torch.sign(wanted[:, None] - unwanted[None]) / 2 + 0.5
        metrics |= {"rewards/accuracies": higher.mean().item()} if higher.numel() else {}
    return {**{f"eval/{name}": value for name, value in metrics.items()}, "eval/num_pairs": float(len(units))}


def run(
    cfg: DPORecipe,
    *,
    provenance: Mapping[str, str] | None = None,
    pairs: Sequence[JudgementLike] | None = None,
    heldout_pairs: Sequence[JudgementLike] | None = None,
    progress: bool = True,
    resume: Path | None = None,
) -> setup.RunResult:
    """Train a policy as `cfg` says, or go on with the run in the folder `resume`; folder, metrics and summary.

    Raises:
        InputError: for a config, model or pairs that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite, or memory runs out.
        StoppedError: after SIGTERM or SIGINT, once a checkpoint is written.
    """
    state = build(cfg, pairs=pairs, heldout_pairs=heldout_pairs)
    announce(direct_estimate(state.policy.module, cfg, state.data), state.num_steps, progress)
    compute_reference(state, progress)
    keys = [state.data.answers[unit.answers[0]].prompt_ids for unit in state.data.train]
    size = min(cfg.dpo.pairs_per_step, len(keys))
    with open_session(
        cfg,
        resumable(state),
        provenance=provenance,
        show_progress=progress,
        data=state.data.facts,
        resume=resume,
        from_python=setup.given(pairs=pairs),
    ) as session:
        for index in session.steps():
            # The pairs of a prompt stay together: a completion that stands in several is computed once.
            units = [state.data.train[i] for i in items_at(cfg.run.seed, index * size, size, len(keys), keys=keys)]
            with session.working() as times:
                result = step(state, units)
                evaluation = evaluate(state) if session.is_due(index, cfg.run.eval_every) else {}
            speed = {"tokens_per_s": result.metrics["num_tokens"] / times.wall_s}
            metrics = {**result.metrics, **evaluation, **times.metrics(), **speed}
            session.end_step(index + 1, StepRecord(metrics, result.report, partial(batch_rows, state, units)), SHOWN)
        figures = summary(state, session)
        export(state, session, figures)
        return session.finish({**figures, "algorithm": "dpo"})


def resumable(state: State) -> Resumable:
    """How a session saves and restores `state`."""
    return Resumable({"policy": state.policy.module}, state.optimizer, {}, state.num_steps, state.identity)


def batch_rows(state: State, units: Sequence[Unit]) -> list[dict[str, object]]:
    """The pairs or labels of a step as text, for a person who looks why an update was refused."""
    rows: list[dict[str, object]] = []
    for unit in units:
        answers = [state.data.answers[place] for place in unit.answers]
        texts = [decode(state.tokenizer, answer.completion_ids) for answer in answers]
        row: dict[str, object] = {"id": unit.prompt_id, "prompt": decode(state.tokenizer, answers[0].prompt_ids)}
        if isinstance(unit, AnswerPair):
            row |= {"chosen": texts[0], "rejected": texts[1], "tie": unit.tie}
        else:
            row |= {"completion": texts[0], "label": unit.is_wanted}
        rows.append(row)
    return rows


def summary(state: State, session: Session) -> dict[str, object]:
    """What the run came to: the last training loss, and the figures on held-out pairs."""
    last = session.metrics[-1]
    names = ("loss", "rewards/accuracies", "rewards/margins")
    refused = int(sum(row["refused_steps"] for row in session.metrics))
    figures = {name: last[name] for name in (*names, *(f"eval/{n}" for n in (*names, "num_pairs"))) if name in last}
    sizes = {"steps": len(session.metrics), "num_pairs": len(state.data.train), "num_ties": state.data.num_ties}
    return {**sizes, "refused_steps": refused, **figures}


def export(state: State, session: Session, figures: Mapping[str, object]) -> None:
    """Write `final/`: the policy in the Hugging Face layout."""
    card = ModelCard(
        base_model=state.cfg.model.name,
        algorithm=f"direct preference optimisation ({state.cfg.dpo.loss})",
        title=session.folder.path.name,
        metrics=figures,
        recipe=state.cfg.model_dump(mode="json"),
    )
    save_final(state.policy.module, state.tokenizer, session.folder.final, card)
