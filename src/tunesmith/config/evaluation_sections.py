"""What is judged at the end of a run. Every default stands here and nowhere else."""

from pydantic import Field

from tunesmith.config.sections import Section


class RewardEvaluationSection(Section):
    """How a reward model is judged once it is trained."""

    judge: bool = Field(
        default=False,
        description="Judge it on the held-out pairs as `tunesmith eval reward` does, with a TF-IDF model fitted on the "
        "training pairs beside it; the figures stand in the result, and all of them in reward_quality.json.",
    )
