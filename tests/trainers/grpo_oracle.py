"""GRPO once more, in float64 and plain loops: the loss of one update, written from the papers, with no shared code.

A completion's tokens are scored by one plain forward pass over its own row, without padding.
"""

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from recipes import Started

from tunesmith.engine.batch.rollout import Completion, Group

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """The weights before an update and the gradients that it was made from, by the name of the parameter."""

    weights: Tensors
    gradients: Tensors


@dataclass
class Recorder:
    """Notes every update of a state's optimizer just before it is made."""

    state: Started
    updates: list[Update] = field(default_factory=list)

    def __post_init__(self) -> None:
        step = self.state.optimizer.step

        def recording(**arguments: Any) -> Any:
            named = dict(self.state.policy.module.named_parameters())
            weights = {name: parameter.detach().clone() for name, parameter in named.items()}
            gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
            self.updates.append(Update(weights, gradients))
            return step(**arguments)

        self.state.optimizer.step = recording  # type: ignore[method-assign]


@dataclass(frozen=True)
class Oracle:
    """What a step of `state` should have done with `groups`; `reward` gives a completion's reward, None to drop it.

    `reference` and `old` are models in float64: the frozen start, and the policy that drew the completions.
    """

    state: Started
    groups: Sequence[Group]
    reward: Callable[[Completion], float | None]
    reference: Any
    old: Any

    def advantages(self) -> list[list[float]]:
        """Of every completion; 0 where it is dropped or its group all equal."""
        cfg = self.state.cfg.grpo
        totals = [[self._penalised(group, completion) for completion in group.completions] for group in self.groups]
        over_all = [total for group in totals for total in group if total is not None]
        rows = []
        for group in totals:
            known = [total for total in group if total is not None]
            divisor = {"group": _std(known) + 1e-4, "batch": _std(over_all) + 1e-4}.get(cfg.scale, 1.0)
            row = []
            for place, total in enumerate(group):
                others = [other for k, other in enumerate(group) if k != place and other is not None]
                compared = others if cfg.baseline == "leave_one_out" else known
                is_flat = len(set(known)) < 2
                row.append(0.0 if total is None or is_flat else (total - statistics.fmean(compared)) / divisor)
            rows.append(row)
        if cfg.scale == "advantages":
            valid = [[total is not None for total in group] for group in totals]
            known = [
                a for row, is_valid in zip(rows, valid, strict=True) for a, v in zip(row, is_valid, strict=True) if v
            ]
            rows = [[advantage / (_std(known) + 1e-4) for advantage in row] for row in rows]
        return rows

    def gradients(self, weights: Tensors) -> Tensors:
        """The gradient of the loss over all completions that teach something, at `weights`.

        All of them are one minibatch; `micro_batch` needs them to be one micro-batch too.
        """
        cfg = self.state.cfg.grpo
        model = double(self.state.policy.module, weights)
        losses_BT, entropies, num_compared = [], [], 0
        for group, advantages in zip(self.groups, self.advantages(), strict=True):
            known = [completion for completion in group.completions if self.reward(completion) is not None]
            num_compared += len(known)
            if len({self.reward(completion) for completion in known}) < 2 and cfg.kl.place == "loss":
                continue
            for completion, advantage in zip(group.completions, advantages, strict=True):
                if self.reward(completion) is None:
                    continue
                if cfg.mask_truncated_completions and completion.finish_reason == "length":
                    continue
                losses, entropy_T = self._losses(model, group, completion, advantage)
                losses_BT.append(losses)
                entropies.extend(entropy_T)
        num_tokens = sum(map(len, losses_BT))
        loss = sum(torch.stack(losses).sum() / self._share(losses, num_tokens, num_compared) for losses in losses_BT)
        (loss - cfg.entropy_coef * torch.stack(entropies).sum() / num_tokens).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def _share(self, losses: Sequence[torch.Tensor], num_tokens: int, num_compared: int) -> float:
        """What the losses of one completion are divided by."""
        return {
            "token": num_tokens,
            "micro_batch": num_tokens,
            "sequence": len(losses) * num_compared,
            "sequence_sum": num_compared,
            "constant": num_compared * self.state.cfg.rollout.max_new_tokens,
        }[self.state.cfg.grpo.loss_normalization]

    def _losses(self, model: Any, group: Group, completion: Completion, advantage: float) -> tuple[Any, Any]:
        """Loss of each token of a completion, with the KL, and its entropies."""
        cfg = self.state.cfg.grpo
        new_T, entropy_T = self._score(model, group, completion)
        with torch.no_grad():
            old_T, _ = self._score(self.old, group, completion)
            reference_T, _ = self._score(self.reference, group, completion)
        total = (new_T - old_T).sum()
        whole = {"token": None, "sequence": torch.exp(total / len(new_T)), "product": torch.exp(total)}
        losses = []
        for new, old, reference in zip(new_T, old_T, reference_T, strict=True):
            own = whole[cfg.importance_sampling_level]
            ratio = torch.exp(new - old) if own is None else own
            if cfg.surrogate == "cispo":
                loss = -min(ratio.item(), 1 + cfg.clip_high) * advantage * new
            else:
                bounded = min(max(ratio.item(), 1 - cfg.clip_low), 1 + cfg.clip_high)
                is_cut = bounded * advantage < ratio.item() * advantage
                loss = -(bounded if is_cut else ratio) * advantage
                if cfg.dual_clip is not None and advantage < 0 and ratio.item() > cfg.dual_clip:
                    loss = torch.tensor(-cfg.dual_clip * advantage, dtype=torch.float64)
            if cfg.kl.place == "loss":
                weight = ratio if cfg.kl.bias_correction else 1.0
                loss = loss + weight * cfg.kl.coef * (torch.exp(reference - new) - 1 - (reference - new))
            losses.append(torch.as_tensor(loss, dtype=torch.float64))
        return losses, entropy_T

    def _penalised(self, group: Group, completion: Completion) -> float | None:
        cfg, reward = self.state.cfg.grpo, self.reward(completion)
        if reward is None or cfg.kl.place == "loss" or cfg.kl.coef == 0:
            return reward
        with torch.no_grad():
            old_T, _ = self._score(self.old, group, completion)
            reference_T, _ = self._score(self.reference, group, completion)
        return reward - cfg.kl.coef * math.fsum((old_T - reference_T).tolist())

    def _score(self, model: Any, group: Group, completion: Completion) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of each token of a completion, and entropy of the distribution that it was drawn from."""
        ids = [*group.prompt_token_ids, *completion.token_ids]
        logits_SV = model(torch.tensor([ids])).logits[0, len(group.prompt_token_ids) - 1 : -1]
        logp_TV = torch.log_softmax(logits_SV / self.state.cfg.rollout.temperature, dim=-1)
        return logp_TV[range(len(completion.token_ids)), completion.token_ids], -(logp_TV.exp() * logp_TV).sum(dim=-1)


def double(model: Any, weights: Tensors | None = None) -> Any:
    """A copy of `model` in float64, with other `weights` where given."""
    twin = copy.deepcopy(model)
    if weights is not None:
        twin.load_state_dict(weights, strict=False)
    twin.zero_grad()
    return twin.double()


def _std(numbers: Sequence[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0
