"""The learning rate over a run: a linear rise, then a fall."""

import math

from tunesmith.config.sections import OptimizerSection


def schedule_factor(section: OptimizerSection, step: int, total_steps: int) -> float:
    """The share of the peak learning rate that step `step` (from 0) of `total_steps` takes; above 0 for all of them.

    `cosine`: Loshchilov and Hutter 2017, eq. 5; `warmup_stable_decay`: Hu et al. 2024 (arXiv 2404.06395), section 4.
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    begin = section.warmup_steps
    if section.schedule == "warmup_stable_decay":
        begin = max(begin, total_steps - round(section.decay_share * total_steps))
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    match section.schedule:
        case "constant":
            return 1.0
        case "linear" | "warmup_stable_decay":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_ratio + (1.0 - section.min_ratio) * share
