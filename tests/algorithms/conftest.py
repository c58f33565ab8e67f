"""TRL's own code as an oracle, called on light stand-ins for its trainers' state."""

import importlib
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from torch import Tensor

# A test never judges seconds: the first example pays for torch's start, and the machine may be shared.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def _trl() -> object:
    if importlib.util.find_spec("trl") is not None:
        return importlib.import_module("trl")
    reason = "TRL is not installed; `pip install -e .[dev]` brings it"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _accelerator() -> SimpleNamespace:
    return SimpleNamespace(
        num_processes=1,
        pad_across_processes=lambda tensor, **_: tensor,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
        sync_gradients=False,
    )


@pytest.fixture(scope="session")
def trl() -> object:
    """The installed TRL."""
    return _trl()


GRPOLoss = Callable[..., tuple[Tensor, dict[str, float]]]
RewardLoss = Callable[..., tuple[Tensor, dict[str, float]]]


@pytest.fixture(scope="session")
def trl_grpo_loss() -> GRPOLoss:
    """Loss and metrics of `GRPOTrainer._compute_loss`; by default `loss_type="dapo"`, one global token denominator."""
    trainer_class = _trl().GRPOTrainer

    def loss(logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens, clip_low, clip_high, **options):
        entropy_BT = options.get("entropy_BT", torch.zeros_like(logp_BT))
        entropy_coef = options.get("entropy_coef", 0.0)
        state = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp_BT, entropy_BT, None),
            _entropy_bonus_enabled=entropy_coef != 0,
            _metrics={"train": defaultdict(list)},
            accelerator=_accelerator(),
            args=SimpleNamespace(
                delta=options.get("delta"),
                sapo_temperature_pos=options.get("temperature_positive"),
                sapo_temperature_neg=options.get("temperature_negative"),
                use_bias_correction_kl=options.get("use_bias_correction_kl", False),
                steps_per_generation=1,
            ),
            aux_loss_enabled=False,
            beta=options.get("beta", 0.0),
            current_gradient_accumulation_steps=1,
            entropy_coef=entropy_coef,
            epsilon_high=clip_high,
            epsilon_low=clip_low,
            importance_sampling_level=options.get("importance_sampling_level", "token"),
            loss_type=options.get("loss_type", "dapo"),
            max_completion_length=options.get("max_completion_length"),
            model=SimpleNamespace(training=True),
            off_policy_mask_threshold=options.get("off_policy_mask_threshold"),
            get_off_policy_mask=trainer_class.get_off_policy_mask,
            top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
            get_high_entropy_mask=lambda *given: trainer_class.get_high_entropy_mask(state, *given),
            use_adaptive_entropy=False,
            use_vllm=False,
        )
        ids_BT = torch.zeros(logp_BT.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids_BT[:, :1],
            "prompt_mask": ids_BT[:, :1] + 1,
            "completion_ids": ids_BT,
            "completion_mask": mask_BT.long(),
            "advantages": advantage_BT,
            "old_per_token_logps": old_logp_BT,
            "ref_per_token_logps": options.get("ref_logp_BT"),
            "num_items_in_batch": torch.tensor(float(num_tokens)),
        }
        value = trainer_class._compute_loss(state, None, inputs)
        return value, {name: values[0] for name, values in state._metrics["train"].items()}

    return loss


@pytest.fixture(scope="session")
def trl_gmpo_loss() -> Callable[..., torch.Tensor]:
    """Loss of `GMPOTrainer._compute_loss`."""
    _trl()
    from trl.experimental.gmpo import GMPOTrainer

    def loss(logp_BT, old_logp_BT, advantage_B, mask_BT, clip_low, clip_high):
        state = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp_BT, torch.zeros_like(logp_BT), None),
            _metrics={"train": defaultdict(list)},
            accelerator=_accelerator(),
            beta=0.0,
            current_gradient_accumulation_steps=1,
            epsilon_high=clip_high,
            epsilon_low=clip_low,
            model=SimpleNamespace(training=True),
            top_entropy_quantile=1.0,
        )
        ids_BT = torch.zeros(logp_BT.shape, dtype=torch.long)
        inputs = {"prompt_ids": ids_BT[:, :1], "prompt_mask": ids_BT[:, :1] + 1, "completion_ids": ids_BT}
        inputs |= {"completion_mask": mask_BT.long(), "advantages": advantage_B, "old_per_token_logps": old_logp_BT}
        return GMPOTrainer._compute_loss(state, None, inputs)

    return loss


@pytest.fixture(scope="session")
def trl_rloo_loss() -> GRPOLoss:
    """Loss and metrics of `RLOOTrainer._compute_loss`: one ratio and one advantage for each completion."""
    trainer_class = _trl().RLOOTrainer

    def loss(logp_BT, old_logp_BT, advantage_B, mask_BT, clip_low, clip_high):
        state = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp_BT, torch.zeros_like(logp_BT), None),
            _metrics={"train": defaultdict(list)},
            accelerator=_accelerator(),
            aux_loss_enabled=False,
            epsilon_high=clip_high,
            epsilon_low=clip_low,
            model=SimpleNamespace(training=True),
        )
        ids_BT = torch.zeros(logp_BT.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids_BT[:, :1],
            "prompt_mask": ids_BT[:, :1] + 1,
            "completion_ids": ids_BT,
            "completion_mask": mask_BT.long(),
            "advantages": advantage_B,
            "old_logps": (old_logp_BT * mask_BT).sum(dim=1),
        }
        value = trainer_class._compute_loss(state, None, inputs)
        return value, {name: values[0] for name, values in state._metrics["train"].items()}

    return loss


@pytest.fixture(scope="session")
def trl_reward_loss() -> RewardLoss:
    """Loss and metrics of `RewardTrainer.compute_loss` for given rewards."""
    trainer_class = _trl().RewardTrainer

    def loss(chosen_B, rejected_B, margin_B=None, center_coef=None):
        logits = torch.cat([chosen_B, rejected_B])[:, None]
        state = SimpleNamespace(
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            accelerator=_accelerator(),
            args=SimpleNamespace(center_rewards_coefficient=center_coef),
            model=SimpleNamespace(training=True),
        )
        inputs = {"attention_mask": torch.ones(len(logits), 1)}
        if margin_B is not None:
            inputs["margin"] = margin_B
        value = trainer_class.compute_loss(state, lambda **_: SimpleNamespace(logits=logits), inputs)
        return value, {name: values[0] for name, values in state._metrics["train"].items()}

    return loss


@pytest.fixture(scope="session")
def trl_advantages() -> Callable[..., Tensor]:
    """Advantages of `_generate_and_score_completions` of TRL's GRPO or RLOO trainer for rewards of P groups of G.

    NaN is a completion that no reward could score. What draws the completions is left out: only rewards matter here.
    """
    trl = _trl()

    def advantages(trainer: str, reward_PG: Tensor, **options) -> Tensor:
        num_completions, names = reward_PG.numel(), ("GRPOTrainer", "RLOOTrainer")
        ids, texts = [[1]] * num_completions, [""] * num_completions
        generated = {names[0]: (ids, ids, None, texts, None, {}, None, None), names[1]: (ids, ids, texts)}
        state = _rollout_state(generated[trainer], reward_PG, torch.zeros(num_completions, 1), **options)
        rows = [{"prompt": "text"}] * num_completions
        return getattr(trl, trainer)._generate_and_score_completions(state, rows)["advantages"].reshape(reward_PG.shape)

    return advantages


@pytest.fixture(scope="session")
def trl_importance() -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Weights and their metrics of `GRPOTrainer._generate_and_score_completions` for log-probs of trainer and engine.

    What draws the completions is left out: only the two log-probs and the mask matter here.
    """
    trl = _trl()

    def weights(train_BT: Tensor, sampled_BT: Tensor, mask_BT: Tensor, mode: str, cap: float, floor: float):
        num_completions, lengths = len(mask_BT), mask_BT.sum(1).tolist()
        ids, texts = [[1] * length for length in lengths], [""] * num_completions
        sampled = [row[:length] for row, length in zip(sampled_BT.tolist(), lengths, strict=True)]
        generated = ([[1]] * num_completions, ids, None, texts, sampled, {}, None, None)
        metrics: dict[str, list[float]] = defaultdict(list)
        state = _rollout_state(
            generated,
            torch.zeros(1, num_completions),
            train_BT,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=cap,
            vllm_importance_sampling_clip_min=floor,
            num_iterations=1,
            scale_rewards="none",
            _metrics={"train": metrics},
        )
        rows = [{"prompt": "text"}] * num_completions
        scored = trl.GRPOTrainer._generate_and_score_completions(state, rows)
        named = {name: values[0] for name, values in metrics.items() if name.startswith("sampling/")}
        return scored["importance_sampling_ratio"], named

    return weights


def _rollout_state(generated: tuple[object, ...], reward_PG: Tensor, train_BT: Tensor, **options) -> SimpleNamespace:
    """What `_generate_and_score_completions` reads of its trainer, for completions that are given."""
    defaults = {
        "_calculate_rewards": lambda *_: reward_PG.reshape(-1, 1).clone(),
        "_generate": lambda _: generated,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (train_BT, None, None),
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_metrics": {"train": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "accelerator": SimpleNamespace(device="cpu", process_index=0, gather=lambda tensor: tensor),
        "args": SimpleNamespace(
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=1,
            steps_per_generation=1,
        ),
        "beta": 0.0,
        "environment_factories": None,
        "environments": None,
        "log_multimodal": False,
        "mask_truncated_completions": False,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "multi_objective_aggregation": "sum_then_normalize",
        "num_generations": reward_PG.shape[1],
        "num_iterations": 1,
        "pad_to_multiple_of": None,
        "reward_clip_range": None,
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1),
        "tools": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
    }
    return SimpleNamespace(**{**defaults, **options})
