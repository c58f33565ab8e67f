"""The sections of a recipe for supervised fine-tuning. Every default stands here and nowhere else."""

from typing import Literal

from pydantic import Field

from tunesmith.config.sections import Fraction, PositiveInt, Section


class DemonstrationsSection(Section):
    """Demonstrations, and which of their tokens are learnt."""

    SHORTHAND = "source"

    source: str = Field(
        default="",
        description="File (JSONL, JSON, CSV, Parquet), `datasets` folder, hub id (`org/name:split`) or `data:path`, "
        "with `prompt` and `completion`, with `messages`, or with `text`.",
    )
    heldout_source: str = Field(
        default="", description="Rows of a source of their own for evaluation; none of `source` are held out then."
    )
    skip_bad: bool = Field(default=False, description="Drop rows that cannot be used, and count them by reason.")
    loss_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Tokens that are learnt: of the completion, in a conversation every turn of the assistant in it; "
        "of its last turn alone; or all tokens, the prompt's too. Of `text` all are learnt either way.",
    )
    max_tokens: PositiveInt = Field(default=1024, description="A longer demonstration is a bad row, or is cut.")
    truncate: Literal["none", "right"] = Field(
        default="none", description="`right`: keep the first `max_tokens` tokens of a longer demonstration."
    )
    heldout_fraction: Fraction = Field(
        default=0.05,
        description="Share of demonstrations kept away from training, by a hash of the prompt or of how the "
        "conversation opens.",
    )


class SFTSection(Section):
    """Supervised fine-tuning: the mean negative log-likelihood of the learnt tokens of each step."""

    num_epochs: PositiveInt = Field(default=1, description="Passes over the demonstrations.")
    demonstrations_per_step: PositiveInt = Field(default=16, description="Demonstrations in one optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        default=2048,
        description="Tokens in one forward and backward pass; gradients are accumulated. A longer demonstration stands "
        "alone.",
    )
    bucket_steps: PositiveInt = Field(
        default=1,
        description="Demonstrations of so many steps are dealt out by length, so that those of a step are about "
        "equally long: less padding where a model needs any. 1 leaves the order as it was drawn.",
    )
