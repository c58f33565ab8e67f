"""The private parts of TRL that Tunesmith overrides or calls, by version. They change without notice, so they are
checked when `tunesmith.integrations.trl` is imported, and a version that is not in the table is refused.
"""

import importlib
import inspect
import operator
from collections.abc import Mapping
from typing import Any

from tunesmith.base.core.errors import MissingDependencyError

_LOGPS = (
    "self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, "
    "compute_aux_loss=False, pixel_values=None, image_grid_thw=None, num_images=None, pixel_attention_mask=None, "
    "spatial_shapes=None, num_tiles=None, image_sizes=None, token_type_ids=None, mm_token_type_ids=None, "
    "image_position_ids=None"
)

_POLICY = {
    "_get_per_token_logps_and_entropies": _LOGPS,
    "_generate_and_score_completions": "self, inputs",
    "_prepare_inputs": "self, generation_batch",
    "_compute_loss": "self, model, inputs",
    "_generate": "self, prompts",
}

_LOSS = "self, model, inputs, return_outputs=False, num_items_in_batch=None"

_1_16 = {
    "trainer.utils.FusedCausalLMOutput": (
        "loss=None, log_probs=None, entropy=None, log_sum_sq_probs=None, mean_logits=None, is_top1=None, "
        "label_mask=None, aux_loss=None"
    ),
    "trainer.utils.add_fused_lm_head": ("model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=('log_probs',)"),
    **{f"GRPOTrainer.{name}": parameters for name, parameters in _POLICY.items()},
    **{f"RLOOTrainer.{name}": parameters for name, parameters in _POLICY.items()},
    "DPOTrainer._compute_loss": "self, model, inputs, return_outputs",
    "DPOTrainer.compute_ref_log_probs": "self, model, inputs",
    "KTOTrainer._compute_loss": "self, model, inputs, return_outputs",
    "KTOTrainer.compute_ref_log_probs": "self, model, inputs",
    "SFTTrainer.compute_loss": _LOSS,
    "RewardTrainer.compute_loss": _LOSS,
    "GRPOTrainer._generate_single_turn": (
        "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False"
    ),
    "GRPOTrainer._tool_call_loop": (
        "self, prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields"
    ),
    "RLOOTrainer._generate_single_turn": "self, prompt_ids, images, multimodal_fields",
}

SIGNATURES: Mapping[str, Mapping[str, str]] = {"1.15": _1_16, "1.16": _1_16}
"""By minor version of TRL: the parameters of each part, named from `trl` on, without annotations."""


def check() -> None:
    """Compare the installed TRL with the table.

    Raises:
        MissingDependencyError: TRL is not installed, its version is unknown, or it is not as that version was.
    """
    known = ", ".join(f"{minor}.*" for minor in sorted(SIGNATURES))
    install = "run `pip install 'tunesmith[trl]'`, or import the trainer from trl itself"
    try:
        trl = importlib.import_module("trl")
        importlib.import_module("trl.trainer.utils")
    except ImportError as error:
        raise MissingDependencyError(f"tunesmith.integrations.trl needs TRL ({error}); {install}") from error
    version = str(trl.__version__)
    signatures = SIGNATURES.get(".".join(version.split(".")[:2]))
    if signatures is None:
        raise MissingDependencyError(
            f"TRL {version} is installed and its private methods are not known; known versions are {known}: {install}"
        )
    if changed := differences(trl, signatures):
        raise MissingDependencyError(f"TRL {version} is not as released ({'; '.join(changed)}): {install}")


def differences(trl: Any, signatures: Mapping[str, str]) -> list[str]:
    """A line for each part that is missing or has other parameters."""
    found: list[str] = []
    for name, expected in signatures.items():
        try:
            signature = inspect.signature(operator.attrgetter(name)(trl))
        except AttributeError:
            found.append(f"{name} is missing")
            continue
        plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        if (parameters := ", ".join(map(str, plain))) != expected:
            found.append(f"{name} takes ({parameters}), expected ({expected})")
    return found
