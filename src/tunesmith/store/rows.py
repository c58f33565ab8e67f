"""A stored vote as a row in TRL's columns."""

from tunesmith.schema.records import Text
from tunesmith.store.content import content_sha256, encode_content
from tunesmith.store.records import ExportRow, PreferenceName, StoredVerdict, StoredVote

_NAMES: dict[StoredVerdict, PreferenceName] = {
    "left_much": "much_better",
    "right_much": "much_better",
    "left": "better",
    "right": "better",
    "tie": "tie",
    "both_bad": "both_bad",
}
_ID_LENGTH = 16


def export_row(vote: StoredVote) -> ExportRow:
    """The row of a vote that says something about its two answers: neither a skip nor a withdrawal."""
    return ExportRow(
        prompt=vote.prompt,
        chosen=as_answer(vote.prompt, vote.chosen.text),
        rejected=as_answer(vote.prompt, vote.rejected.text),
        margin=vote.margin,
        tie=vote.verdict in ("tie", "both_bad"),
        verdict=_NAMES[vote.verdict],
        rater=vote.rater,
        heldout=vote.heldout,
        created_at=vote.created_at,
        dwell_ms=vote.dwell_ms,
        reason=vote.reason,
        vote_id=vote.id,
        prompt_id=content_sha256(encode_content(vote.prompt))[:_ID_LENGTH],
        chosen_version=vote.chosen.weight_version,
        rejected_version=vote.rejected.weight_version,
    )


def as_answer(prompt: Text, text: str) -> Text:
    """An answer in the form of its prompt: text, or a message of the assistant."""
    return text if isinstance(prompt, str) else ({"role": "assistant", "content": text},)
