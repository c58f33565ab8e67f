"""Groups for the tests of rewards, as an engine would return them."""

from collections.abc import Callable, Mapping

import pytest

from tunesmith.base.schema.records import Prompt, Text
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.engine.models.tiny import EOS_ID, byte_tokenizer
from tunesmith.engine.models.tokenizer import encode_prompt

GroupMaker = Callable[..., Group]


@pytest.fixture(scope="session")
def make_group() -> GroupMaker:
    """A function that makes a group of the given texts in the byte tokenizer; `ended` ones carry the end-of-sequence
    id.
    """
    tokenizer = byte_tokenizer()

    def make(
        content: Text,
        *texts: str,
        id: str = "p.jsonl:1",
        columns: Mapping[str, object] | None = None,
        ended: bool = True,
    ) -> Group:
        prompt = Prompt(id, content, columns or {})
        completions: list[Completion] = []
        for text in texts:
            ids = (*tokenizer(text)["input_ids"], *([EOS_ID] if ended else []))
            completions.append(
                Completion(ids, (-1.0,) * len(ids), (-1.0,) * len(ids), text, "stop" if ended else "length")
            )
        return Group(prompt, encode_prompt(tokenizer, prompt), tuple(completions), weight_version=0)

    return make
