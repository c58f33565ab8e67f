import pytest

from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.learn.rewards.scorer import Scorer


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sentimnt", "no built-in and no model; did you mean 'sentiment'"),
        ("rewards.py", "names no function; write `./file.py:name`"),
        ("./no/such/folder", "A reward is `./file.py:name`.* or a built-in: sentiment"),
        ("tiny:llama", "there is no module `tiny`"),
        (RewardSource(source="json:dumps", arguments={"a": 1}), "takes no `arguments`: only built-ins do"),
        (
            RewardSource(source="length", label=1),
            "is a function; `label`, `transform`, `pessimism` and `weights` belong to reward models",
        ),
        (RewardSource(source="json:dumps", transform="log_odds"), "is a function; `label`"),
        (
            RewardSource(source="org/model", timeout_s=5),
            "is a reward model; `timeout_s` belongs to functions, remove it",
        ),
        (7, "is of type int, which cannot be called"),
        (dict, "is a class"),
    ],
)
def test_a_source_that_is_no_reward_is_explained(source: object, message: str):
    with pytest.raises(RewardError, match=message):
        Scorer([source])  # type: ignore[list-item]
