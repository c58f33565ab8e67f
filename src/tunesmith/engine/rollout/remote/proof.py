"""Shows by log-probs of fixed tokens that a vLLM computes with the trainer's weights.

It answers "loaded" also where it kept a packed copy of the old weights, or keys and values in a cache. Its arithmetic
differs from the trainer's, so equality cannot be asked for: see `WeightProof`.
"""

from collections.abc import Sequence

import torch

from tunesmith.base.core.errors import TrainingError
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout.remote.connection import PLAIN, Connection, Job, WrongWeightsError
from tunesmith.engine.rollout.weight_check import MAX_DIFFERENCE

_NUM_TOKENS = 80
_NUM_DRAWN = 8
_TIMES_NOISE, _LEAST_SHARE = 5.0, 0.1
"""A difference towards earlier weights counts if it is so many times that of rounding, and that share of the update."""


class WeightProof:
    """Compares a server's log-probs of fixed tokens with those of `model`, as its weights are at each check.

    Two conditions. No log-prob is further from the trainer's than rounding explains: at first the bound of
    `weight_check.MAX_DIFFERENCE` for the coarser of both dtypes, then four times what was seen so far, if that is less.
    And the difference does not point towards earlier weights, which also finds updates that change log-probs by less
    than that: with the trainer's log-probs now, `new`, and earlier, `old`, the projection of `server - new` on `old -
    new` is that of rounding alone for the new weights, and all of `old - new` for the old ones.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        config = model.module.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or _NUM_TOKENS
        num_tokens = min(_NUM_TOKENS, longest - _NUM_DRAWN)
        self._ids = tuple((7919 * (i + 1)) % config.vocab_size for i in range(num_tokens))
        self._vocabulary_size = int(config.vocab_size)
        self._first: torch.Tensor | None = None  # the trainer's log-probs with the first weights that were proven
        self._last: torch.Tensor | None = None  # and with the last ones
        self._largest = self._noise = 0.0  # largest and root mean square difference in all proofs so far

    def check(self, connection: Connection, temperature: float) -> float:
        """The largest difference in nats. Completions are drawn at `temperature`.

        Raises:
            WrongWeightsError: the log-probs are not those of the trainer's weights at that temperature.
            TrainingError: the trainer's own are not finite.
        """
        new_T = self._trained(self._ids, 1.0)
        # Drawn before the same tokens are scored, which would refill a cache with keys and values of the new weights.
        drawn = self._draw(connection, temperature)
        found_T = torch.tensor(connection.score(self._ids))
        if len(found_T) != len(new_T) or not bool(found_T.isfinite().all()):
            raise WrongWeightsError(f"it gave {len(found_T)} log-probs for {len(new_T)} tokens, or not finite ones")
        off_T = found_T - new_T
        differences = {"fixed": float(off_T.abs().max()), "drawn": drawn}
        self._require_near(connection, differences)
        self._require_not_old(off_T, new_T)
        self._first, self._last = new_T if self._first is None else self._first, new_T
        self._largest = max(self._largest, *differences.values())
        self._noise = max(self._noise, float(off_T.square().mean().sqrt()))
        return max(differences.values())

    def _require_near(self, connection: Connection, differences: dict[str, float]) -> None:
        own = self._model.module.dtype
        other = getattr(torch, str(connection.dtype).removeprefix("torch."), torch.bfloat16)
        bound = max(MAX_DIFFERENCE[own], MAX_DIFFERENCE[other])
        if self._first is not None:
            bound = min(bound, max(4 * self._largest, 1e-3))
        for tokens, difference in differences.items():
            if not difference <= bound:
                hint = " (is it started with --logprobs-mode processed_logprobs?)" if tokens == "drawn" else ""
                raise WrongWeightsError(
                    f"it has other weights than the trainer: its log-probs of {tokens} tokens are {difference:.3g} "
                    f"nats away, {bound:.3g} is allowed{hint}"
                )

    def _require_not_old(self, off_T: torch.Tensor, new_T: torch.Tensor) -> None:
        for name, old_T in (("last update", self._last), ("first update", self._first)):
            if old_T is None or not bool((old_T != new_T).any()):
                continue
            size = float((old_T - new_T).norm())
            missing = float(off_T @ (old_T - new_T)) / size
            if missing > max(_TIMES_NOISE * max(self._noise, 1e-6), _LEAST_SHARE * size):
                raise WrongWeightsError(
                    f"it draws from the weights before the {name}, wholly or in part ({missing / size:.0%} of the "
                    "change of fixed log-probs is missing), although it said that it loaded the new ones"
                )

    def _draw(self, connection: Connection, temperature: float) -> float:
        """Largest difference in nats on the tokens of a short completion of the fixed tokens."""
        settings = {**PLAIN, "n": 1, "max_tokens": _NUM_DRAWN, "temperature": temperature, "seed": 0}
        done, problem = connection.complete({0: Job(self._ids, 1, self._vocabulary_size, settings)})
        if problem is not None:
            raise problem
        (drawn,) = done[0]
        trained_T = self._trained((*self._ids, *drawn.token_ids), temperature)[len(self._ids) - 1 :]
        # A low temperature magnifies differences of logits.
        return float((torch.tensor(list(drawn.logps)) - trained_T).abs().max()) * min(1.0, temperature)

    @torch.no_grad()
    def _trained(self, ids: Sequence[int], temperature: float) -> torch.Tensor:
        """The trainer's log-probs of all tokens but the first, float32."""
        device = self._model.module.device
        ids_BS = torch.tensor([list(ids)], device=device)
        length_B, one_B = torch.tensor([len(ids)], device=device), torch.tensor([1], device=device)
        scores = token_logps(self._model, ids_BS, length_B, prompt_lengths_B=one_B, temperature=temperature)
        trained_T = scores.logp_BT[0].float().cpu()
        if not bool(trained_T.isfinite().all()):
            raise TrainingError("the trainer's log-probs of fixed tokens are not finite; its weights are damaged")
        return trained_T
