"""Rows that people wrote for other trainers."""

from pathlib import Path

import pytest

from tunesmith import train
from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.demonstrations import load_demonstrations
from tunesmith.collect.data.pairs import load_preferences

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}


@pytest.mark.parametrize("conversations", [[HUMAN, GPT], [USER, ANSWER]])
def test_sharegpt_conversations(conversations: list[dict[str, str]]) -> None:
    """People have `conversations` of `from` and `value`. Reported: axolotl-ai-cloud/axolotl#1649."""
    (item,) = load_demonstrations([{"conversations": conversations}])
    assert item.completion == (USER, ANSWER)


SYSTEM_TURN = {"from": "system", "value": "Be kind"}


@pytest.mark.parametrize(
    "row", [{"conversations": [HUMAN, GPT], "system": "Be kind"}, {"conversations": [SYSTEM_TURN, HUMAN, GPT]}]
)
def test_sharegpt_system_message(row: dict[str, object]) -> None:
    """The system message is a turn, or a column beside them. Reported: axolotl-ai-cloud/axolotl#1179."""
    (item,) = load_demonstrations([row])
    assert item.completion == ({"role": "system", "content": "Be kind"}, USER, ANSWER)


def test_sharegpt_pairs() -> None:
    """`conversations` with `chosen` and `rejected` turns. Reported: hiyouga/LLaMA-Factory data/README.md."""
    no = {"from": "gpt", "value": "No"}
    (pair,) = load_preferences([{"conversations": [HUMAN], "chosen": GPT, "rejected": no}])
    assert (pair.prompt.content, pair.chosen) == ((USER,), (ANSWER,))
    assert pair.rejected == ({"role": "assistant", "content": "No"},)


def test_unknown_sharegpt_role_is_refused() -> None:
    """Function calls of ShareGPT have roles of their own. Reported: hiyouga/LLaMA-Factory#2529."""
    with pytest.raises(DataError, match="role 'function_call' is unknown"):
        load_demonstrations([{"conversations": [HUMAN, {"from": "function_call", "value": "f()"}, GPT]}])


def test_alpaca_rows() -> None:
    """`instruction`, `input`, `output`, with a system prompt or without. Reported: axolotl-ai-cloud/axolotl#222."""
    rows = [
        {"instruction": "Say", "input": "Hi", "output": "Hello", "system": "Be kind"},
        {"instruction": "Say", "input": "", "output": "Hello", "system": None},
    ]
    first, second = load_demonstrations(rows)
    said = {"role": "user", "content": "Say\nHi"}
    assert first.prompt.content == ({"role": "system", "content": "Be kind"}, said)
    assert second.prompt.content == ({"role": "user", "content": "Say"},)
    assert first.completion == second.completion == (ANSWER,)


def test_alpaca_pairs() -> None:
    """`instruction` with `chosen` and `rejected`. Reported: hiyouga/LLaMA-Factory data/README.md."""
    (pair,) = load_preferences([{"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "No"}])
    assert (pair.prompt.content, pair.chosen) == ((USER,), (ANSWER,))


def test_pairs_of_different_prompts_are_no_preference_of_a_policy(tmp_path: Path) -> None:
    """`chosen` and `rejected` are exchanges with questions of their own. Reported: huggingface/trl#2578."""
    chosen = [USER, ANSWER]
    rejected = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "No"}]
    with pytest.raises(DataError, match="share no prompt"):
        train.dpo(model="tiny:llama", steps=1, pairs=[{"chosen": chosen, "rejected": rejected}], progress=False)
