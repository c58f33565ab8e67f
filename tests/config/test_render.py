import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.yaml_text import parse, to_yaml

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    [
        "1e-6",
        "no",
        "null",
        "~",
        "",
        " x",
        "a: b",
        "a #b",
        "12:30",
        "0x1F",
        "1_000",
        "[a]",
        "- a",
        "\n",
        "é\u2028\x7f",
        "=",
    ]
)
ARGUMENTS = st.dictionaries(
    TEXTS, TEXTS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
)


@settings(deadline=None)
@given(text=TEXTS, arguments=ARGUMENTS, rate=st.floats(min_value=1e-12, max_value=1e3))
def test_what_is_rendered_loads_again_to_the_same_recipe(text: str, arguments: dict[str, object], rate: float) -> None:
    recipe = PPORecipe.model_validate(
        {
            "description": text,
            "optimizer": {"learning_rate": rate},
            "reward": [{"source": text, "arguments": arguments}, {"source": "length", "label": text}],
        }
    )
    assert PPORecipe.model_validate(parse(to_yaml(recipe), "again").data) == recipe


def test_other_yaml_readers_see_the_same_values() -> None:
    recipe = load_recipe("ppo", recipe="ppo_sentiment", overrides={"optimizer.learning_rate": 1e-6}).recipe
    assert PPORecipe.model_validate(yaml.safe_load(to_yaml(recipe))) == recipe
    assert isinstance(yaml.safe_load(to_yaml(recipe))["optimizer"]["learning_rate"], float)


def test_the_origin_stands_beside_each_value_and_does_not_change_it() -> None:
    resolved = load_recipe("ppo", recipe="scratch_ppo", overrides={"run.seed": 1})
    text = to_yaml(resolved.recipe, resolved.provenance)
    assert PPORecipe.model_validate(parse(text, "again").data) == resolved.recipe
    line = next(line for line in text.splitlines() if line.strip().startswith("max_new_tokens"))
    assert line.endswith("# recipe scratch_ppo:16")
    assert text.count(" # ") == len(resolved.provenance)
