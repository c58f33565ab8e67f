"""What the live loop owns, how it is built, and what a checkpoint holds of it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tunesmith.algorithms import kl
from tunesmith.batch.pack import chunks
from tunesmith.batch.rollout import SamplingParams
from tunesmith.batch.upload import Uploader
from tunesmith.config.schema import LiveRecipe
from tunesmith.core.errors import CheckpointError, DataError
from tunesmith.core.seeds import derive
from tunesmith.data import sets
from tunesmith.data.answers import Answer, collate_answers
from tunesmith.data.prompts import PromptLike
from tunesmith.data.sets import PromptSets
from tunesmith.kernels.native import Kernels
from tunesmith.live.votes import VoteMemory
from tunesmith.models.freeze import freeze_lower_layers
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.load import frozen_copy, load_policy
from tunesmith.models.loaded import PreTrainedModel, PreTrainedTokenizerBase, context_length
from tunesmith.models.logprob import token_logps
from tunesmith.models.optimizer import MasterAdamW, OptimizerState
from tunesmith.rollout.engine import Engine
from tunesmith.runs.checkpoint import Checkpoint
from tunesmith.store.records import PolicyVersion
from tunesmith.trainers import setup
from tunesmith.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.trainers.rollouts import engine_for, sampling_params

ENDLESS = 10**9
"""Steps of a schedule that never ends."""

_MAX_LATENCIES = 100_000


@dataclass(slots=True)
class Position:
    """Where the loop stands: what a restarted trainer needs besides weights and votes.

    `num_updates` counts those that were dropped too, `num_votes` the votes that the served version has learnt from.
    Cursors are ids of the newest vote and command that were read, `fresh` ids of votes that are not learnt yet.
    `unserved` are the times of votes whose update was dropped; `latencies_s` runs from each vote to its version.
    """

    num_updates: int = 0
    num_steps: int = 0
    serving: int = 0
    newest: int = 0
    num_votes: int = 0
    vote_cursor: int = 0
    command_cursor: int = 0
    last_offer: int = 0
    fresh: list[int] = field(default_factory=list[int])
    unserved: list[float] = field(default_factory=list[float])
    latencies_s: list[float] = field(default_factory=list[float])
    versions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def note_latencies(self, created_at: Iterable[float], now: float) -> None:
        """Note how long votes waited for the version that is served since `now`."""
        self.latencies_s = [*self.latencies_s, *(now - one for one in created_at)][-_MAX_LATENCIES:]

    def note_version(self, version: PolicyVersion, keep: int) -> None:
        """Remember a version, so that its row can be written again; the oldest are forgotten, the served one never."""
        rows = [row for row in self.versions if row["version"] != version.version]
        rows = [{**row, "serving": bool(row["serving"]) and not version.serving} for row in rows] + [asdict(version)]
        newest = {row["version"] for row in rows[-keep:]}
        self.versions = [row for row in rows if row["version"] in newest or row["serving"] or row["version"] == 0]

    def version(self, number: int) -> PolicyVersion | None:
        """A version that is remembered, or None."""
        return next((PolicyVersion(**row) for row in self.versions if row["version"] == number), None)


class ReferenceLogps:
    """Log-probs of answers under the base model, token by token: each answer is asked once."""

    def __init__(self, model: LanguageModel, temperature: float, rows_per_pass: int, uploader: Uploader | None) -> None:
        self._model = model
        self._temperature = temperature
        self._rows = rows_per_pass
        self._uploader = uploader
        self._known: dict[Answer, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, answers: Iterable[Answer]) -> list[torch.Tensor]:
        """logp_T of each answer, in order, float32."""
        asked = list(answers)
        missing = sorted(set(asked) - self._known.keys(), key=lambda one: (one.prompt_ids, one.completion_ids))
        for some in chunks(missing, self._rows):
            made = collate_answers(some, range(len(some)))
            batch = setup.sent(made, self._uploader)
            logp_BT = token_logps(
                self._model,
                batch.ids_BS,
                batch.lengths_B,
                prompt_lengths_B=batch.prompt_lengths_B,
                temperature=self._temperature,
            ).logp_BT.cpu()
            for place, logp_T in zip(made.answer_B.tolist(), logp_BT, strict=True):
                self._known[some[place]] = logp_T[: len(some[place].completion_ids)].clone()
        return [self._known[one] for one in asked]

    def forget_all_but(self, answers: Iterable[Answer]) -> None:
        """Free what is not among `answers`."""
        kept = set(answers)
        self._known = {one: logp_T for one, logp_T in self._known.items() if one in kept}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is known, flat: `sizes` holds the tokens of each prompt and each completion.

        In float32 a log-prob depends in its last bits on what is computed beside it, so a checkpoint keeps them.
        """
        known = list(self._known)
        ids = [token for one in known for token in (*one.prompt_ids, *one.completion_ids)]
        sizes = [(len(one.prompt_ids), len(one.completion_ids)) for one in known]
        return {
            "ids": torch.tensor(ids, dtype=torch.int32),
            "sizes": torch.tensor(sizes, dtype=torch.int32).reshape(-1, 2),
            "logps": torch.cat([*self._known.values(), torch.zeros(0)]),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Know what `tensors()` gave, and nothing else."""
        self._known = {}
        ids, logps = tensors["ids"].tolist(), tensors["logps"]
        place = token = 0
        for num_prompt, num_completion in tensors["sizes"].tolist():
            middle, end = place + num_prompt, place + num_prompt + num_completion
            answer = Answer(tuple(ids[place:middle]), tuple(ids[middle:end]))
            self._known[answer] = logps[token : token + num_completion].clone()
            place, token = end, token + num_completion


@dataclass(slots=True)
class State:
    """What the loop owns. The weights of `policy` are those of the served version, but inside of an update."""

    cfg: LiveRecipe
    device: torch.device
    policy: LanguageModel
    reference: LanguageModel
    reference_logps: ReferenceLogps
    uploader: Uploader | None
    tokenizer: PreTrainedTokenizerBase
    optimizer: MasterAdamW
    engine: Engine
    kl: kl.Controller
    prompts: PromptSets
    memory: VoteMemory
    identity: Mapping[str, str]
    position: Position = field(default_factory=Position)


def build(cfg: LiveRecipe, *, prompts: Iterable[PromptLike] | None = None) -> State:
    """The state before the first update: version 0, the model that `cfg` names. `prompts` stand in for those of `cfg`.

    Raises InputError for a model or prompts that cannot be used.
    """
    device = setup.prepare(cfg)
    loaded = load_policy(cfg.model, device=device)
    context = context_length(loaded.model)
    room = None if context is None else context - cfg.rollout.max_new_tokens
    given = None if prompts is None else list(prompts)
    found = sets.prompt_sets(cfg.prompts, loaded.tokenizer, cfg.run.seed, given, room=room)
    if cfg.live.heldout_prompts_per_round and not found.heldout:
        raise DataError(
            "no prompts are held out, so nothing can tell whether an update is better; give prompts.heldout_fraction a "
            "larger share, prompts.heldout_source a file, or set live.heldout_prompts_per_round to 0"
        )
    policy = language_model(loaded.model, Kernels())
    reference = language_model(frozen_copy(loaded.model), policy.kernels)
    uploader = setup.uploader_to(device)
    rows = [(prompt.id, prompt.content) for prompt in (*found.train, *found.heldout)]
    identity = {
        "the model": fingerprint_of_tensors(loaded.model),
        "the prompts": fingerprint_of_rows(rows),
        "the device": device.type,
    }
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    optimizer = fresh_optimizer(cfg, policy)
    engine = engine_for(cfg.rollout, policy, loaded.tokenizer, lambda: state.optimizer)  # rollback replaces it
    state = State(
        cfg=cfg,
        device=device,
        policy=policy,
        reference=reference,
        reference_logps=ReferenceLogps(reference, cfg.rollout.temperature, 2 * cfg.dpo.micro_batch_size, uploader),
        uploader=uploader,
        tokenizer=loaded.tokenizer,
        optimizer=optimizer,
        engine=engine,
        kl=kl.controller(cfg.live.kl.coef, cfg.live.kl.target, horizon=1.0),
        prompts=found,
        memory=VoteMemory(loaded.tokenizer, context or 10**9, keeps_ties=cfg.dpo.ties != "drop"),
        identity=identity,
    )
    return state


def fresh_optimizer(cfg: LiveRecipe, policy: LanguageModel) -> MasterAdamW:
    """The optimizer at its first step, on the weights as they are."""
    return MasterAdamW(policy.module, cfg.optimizer, total_steps=ENDLESS, kernels=policy.kernels)


def sampling(cfg: LiveRecipe, *stream: int | str) -> SamplingParams:
    """Sampling parameters of a round; the seed is a pure function of the run's seed and `stream`."""
    return sampling_params(cfg.rollout, derive(cfg.run.seed, *stream))


def trained(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights that updates change, by name: the live tensors."""
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}


def contents(state: State) -> Checkpoint:
    """A checkpoint of the state as it is; its tensors are the live ones."""
    optimizer = state.optimizer.state_dict()
    return Checkpoint(
        step=state.position.num_updates,
        tensors={
            "policy": trained(state.policy.module),
            "optimizer": optimizer.tensors,
            "reference": state.reference_logps.tensors(),
        },
        state={
            "position": asdict(state.position),
            "kl": state.kl.state_dict(),
            "optimizer": dict(optimizer.scalars),
            "identity": dict(state.identity),
        },
    )


@torch.no_grad()
def restore(state: State, found: Checkpoint) -> None:
    """Put weights, optimizer, KL coefficient and log-probs of the base model of a checkpoint into `state`.

    Raises:
        CheckpointError: if it belongs to another model.
    """
    values: Any = found.state
    parameters, saved = trained(state.policy.module), found.tensors["policy"]
    if {name: p.shape for name, p in parameters.items()} != {name: p.shape for name, p in saved.items()}:
        raise CheckpointError("the checkpoint has other parameters; start again with the recipe that it was made with")
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
    state.optimizer.load_state_dict(OptimizerState(found.tensors["optimizer"], values["optimizer"]))
    state.kl.load_state_dict(values["kl"])
    state.reference_logps.restore(found.tensors["reference"])
