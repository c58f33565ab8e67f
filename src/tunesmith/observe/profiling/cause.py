"""The record of a cause of slowness."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of slowness. `share` is the predicted saving as a share of the run,
    `predicted_saving_s` the same in seconds of a mean step; `low` and `high` are its interval.

    `settings` are the keys of the recipe to set, `figures` the facts that were looked at, by name.
    """

    name: str
    symptom: str
    share: float
    evidence: str
    advice: str
    settings: Mapping[str, object]
    predicted_saving_s: float
    low: float
    high: float
    figures: Mapping[str, object]
    is_urgent: bool
