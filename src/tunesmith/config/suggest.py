"""What was probably meant: suggestions for misspelt keys, flags and names."""

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6
_END_CUTOFF = 0.75

SYNONYMS = {
    "lr": "learning_rate",
    "beta": "kl.coef",
    "kl_coef": "kl.coef",
    "init_kl_coef": "kl.coef",
    "cliprange": "clip_low",
    "cliprange_value": "value_clip",
    "vf_coef": "value_coef",
    "num_ppo_epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "epochs": "num_epochs",
    "num_mini_batches": "num_minibatches",
    "per_device_train_batch_size": "micro_batch_size",
    "response_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "num_generations": "completions_per_prompt",
    "max_steps": "run.steps",
    "output_dir": "run.dir",
    "model_name_or_path": "model.name",
    "gae_lambda": "lam",
}
"""Names that other packages give to a key, and the end of its path here."""


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that `given` was probably meant to be, or None.

    For dotted paths: a known synonym or an equal last part comes first, then a like path of as many parts, then a like
    last part, then any like path.
    """
    options = list(allowed)
    last = given.rsplit(".", 1)[-1].lower().replace("-", "_")
    ending = SYNONYMS.get(last, last)
    same_end = [option for option in options if option == ending or option.endswith("." + ending)]
    if same_end:
        return max(same_end, key=lambda option: _likeness(option, given))
    as_deep = [option for option in options if option.count(".") == given.count(".")]
    if by_depth := difflib.get_close_matches(given, as_deep, n=1, cutoff=_END_CUTOFF):
        return by_depth[0]
    by_path = difflib.get_close_matches(given, options, n=1, cutoff=_CUTOFF)
    by_end = difflib.get_close_matches(last, {option.rsplit(".", 1)[-1] for option in options}, n=1, cutoff=_END_CUTOFF)
    if by_end:
        ends = [option for option in options if option.rsplit(".", 1)[-1] == by_end[0]]
        return max(ends, key=lambda option: _likeness(option, given))
    return by_path[0] if by_path else None


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no name is near."""
    found = nearest(given, allowed)
    return f"; did you mean {found}?" if found else ""


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
