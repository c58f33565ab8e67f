"""Each rule finds its cause in facts that show it, abstains without them, and is silent on a healthy run."""

import random
import string
from pathlib import Path

import pytest
from runs_of import MEASURED, SHOWN, facts, recipe

from tunesmith.base.config.schema import RECIPES
from tunesmith.observe.profiling.cause import Cause
from tunesmith.observe.profiling.diagnosis import diagnose
from tunesmith.observe.profiling.facts import Facts
from tunesmith.observe.profiling.rules import RULES, Rule


def test_every_rule_has_facts_that_show_its_cause():
    assert sorted(SHOWN) == sorted(rule.name for rule in RULES)


@pytest.mark.parametrize("name", SHOWN)
def test_a_cause_is_named_first_where_its_facts_are(name: str):
    first = diagnose(facts(SHOWN[name])).causes[0]
    assert first.name == name
    assert 0 < first.low <= first.predicted_saving_s <= first.high <= 6.0
    assert first.share == first.predicted_saving_s / 6.0


@pytest.mark.parametrize("algorithm", [name for name in RECIPES if name != "live"])
def test_a_healthy_run_has_no_cause(algorithm: str):
    found = diagnose(facts(algorithm=algorithm))
    assert [cause.name for cause in found.causes] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_abstains_without_one_of_its_facts(rule: Rule):
    shown = facts(SHOWN[rule.name])
    for name in rule.needs:
        if "{" in name:  # the peak of a dtype, which the test of another fact covers
            continue
        without = {key: value for key, value in shown.values.items() if key != name}
        found = diagnose(Facts(shown.path, without, shown.num_steps))
        assert rule.name not in [cause.name for cause in found.causes]
        assert name in found.missing[rule.name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_the_evidence_shows_is_needed(rule: Rule):
    shown = {name for _, name, _, _ in string.Formatter().parse(rule.evidence) if name}
    assert {name for name in shown if not name.startswith("time/")} <= set(rule.needs)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_cause_has_its_place_on_the_page(rule: Rule):
    page = (Path(__file__).parents[2] / "docs" / "slow.md").read_text(encoding="utf-8")
    assert f"**{rule.name}" in page


@pytest.mark.parametrize("name", SHOWN)
def test_the_settings_that_are_advised_are_valid_and_change_the_recipe(name: str):
    shown = facts(SHOWN[name])
    for path, value in diagnose(shown).causes[0].settings.items():
        assert shown.values[f"recipe.{path}"] != value
        section, key = path.rsplit(".", 1) if "." in path else ("", path)
        tree: dict[str, object] = {key: value}
        for part in reversed(section.split(".")):
            tree = {part: tree}
        RECIPES["grpo"].model_validate(tree)


def test_savings_stay_within_the_step_whatever_the_figures():
    draw = random.Random(0)
    for _ in range(300):
        changes = dict(SHOWN[draw.choice(list(SHOWN))])
        for name in draw.sample(list(MEASURED), 12):
            changes[name] = draw.choice([0.0, 1e-6, 0.5, 1.0, 7.0, 1e4])
        found = diagnose(facts(changes))
        for cause in found.causes:
            assert 0 <= cause.low <= cause.predicted_saving_s <= cause.high <= found.step_s


def test_causes_are_ranked_by_what_they_cost():
    both = diagnose(facts({**SHOWN["slow_reward"], **SHOWN["checkpoints"]}))
    assert [cause.name for cause in both.causes] == ["slow_reward", "checkpoints"]


def test_a_leak_that_will_end_the_run_comes_first():
    leak = {"memory/growth_mb": 400.0}
    found = diagnose(facts({**SHOWN["slow_reward"], **leak, "memory/available_gb": 10.0}))
    assert [cause.name for cause in found.causes] == ["memory_growth", "slow_reward"]
    found = diagnose(facts({**SHOWN["slow_reward"], **leak, "memory/available_gb": 1000.0}))
    assert [cause.name for cause in found.causes] == ["slow_reward", "memory_growth"]


def test_of_two_causes_with_one_remedy_the_larger_is_credited_with_all_of_it():
    planted = {**SHOWN["precision"], "setup.engine_exact": False}
    (alone,) = diagnose(facts(planted)).causes
    first, second = diagnose(facts({**planted, "time/old_policy_s": 0.5})).causes
    assert (first.name, second.name) == ("precision", "recomputed_old_policy")
    assert first.predicted_saving_s == pytest.approx(alone.predicted_saving_s + 1.0, abs=0.51)
    assert second.predicted_saving_s == pytest.approx(0.5)


def test_a_reward_is_called_by_evaluations_too():
    slow = {**SHOWN["slow_reward"], "time/reward_s": 1.0, "time/reward/rules_s": 1.0, "time/evaluate/rules_s": 0.5}
    assert diagnose(facts(slow)).causes[0].predicted_saving_s == pytest.approx(1.5)


def test_a_reward_that_waits_for_a_core_is_no_remote_one():
    busy = {
        **SHOWN["starved"],
        "time/reward_s": 2.0,
        "cpu/process": 0.6,
        "cpu/run_delay_s": 6.0,
        "cpu/stage/reward": 0.3,
    }
    names = [cause.name for cause in diagnose(facts(busy)).causes]
    assert "slow_reward" in names
    assert "remote_reward_serial" not in names


def test_a_thread_with_a_core_of_its_own_is_not_starved_by_workers_on_the_others():
    starved = {**SHOWN["starved"], "cpu/run_delay_s": 0.03}
    for num_threads, named in ((2, True), (1, False)):
        found = diagnose(facts({**starved, "setup.num_threads": num_threads})).causes
        assert ("starved" in [cause.name for cause in found]) == named


def test_prompts_of_groups_that_are_left_out_are_not_missed():
    dropped = {"groups/num_dropped": 4.0, "update/shared_tokens": 224.0, "rollout/prefill_tokens": 4000.0}
    shared = {"rollout/shared_tokens": 28000.0, "update/shared_tokens": 14000.0, "update/micro_batch_tokens": 2000.0}
    assert "prompts_not_shared" not in [cause.name for cause in diagnose(facts({**dropped, **shared})).causes]


def test_a_live_reference_of_dpo_is_computed_once_if_there_are_several_epochs():
    live: dict[str, object] = {"recipe.dpo.reference": "live"}
    assert diagnose(facts(live, algorithm="dpo")).causes == []
    (cause,) = diagnose(facts({**live, "recipe.dpo.num_epochs": 3}, algorithm="dpo")).causes
    assert cause.settings == {"dpo.reference": "precomputed"}
    assert cause.predicted_saving_s == pytest.approx(0.6 * 2 / 3)


def test_a_slow_tracker_is_left_out_before_samples_are():
    (cause,) = diagnose(facts({**SHOWN["logging"], "recipe.run.report_to": ["wandb"]})).causes
    assert cause.settings == {"run.report_to": []}
    (cause,) = diagnose(facts(SHOWN["logging"])).causes
    assert cause.settings == {"run.sample_every": 10}


def test_a_slow_disk_is_not_blamed_on_the_number_of_checkpoints():
    found = diagnose(facts({**SHOWN["slow_disk"], "recipe.run.checkpoint_every": 1}))
    assert [cause.name for cause in found.causes][:1] == ["slow_disk"]


def test_an_adaptive_penalty_needs_its_reference():
    found = diagnose(facts({**SHOWN["unneeded_reference"], "recipe.grpo.kl.target": 3.0}))
    assert found.causes == []


def named(changes: dict[str, object], name: str, algorithm: str = "grpo") -> Cause:
    (cause,) = [cause for cause in diagnose(facts(changes, algorithm)).causes if cause.name == name]
    return cause


def test_fewer_prompts_are_no_remedy_for_groups_without_signal():
    for dropped in (4.0, 6.0, 8.0):
        cause = named({"groups/num_dropped": dropped}, "no_signal_groups")
        assert cause.settings == {}, "as large a share of fewer groups would teach nothing"
        assert "completions_per_prompt 16" in cause.advice
    assert (
        "2 of them in a step teach as much as 8 do now" in named({"groups/num_dropped": 6.0}, "no_signal_groups").advice
    )


def test_a_run_without_any_signal_comes_first_and_a_constant_reward_is_what_to_look_at():
    slow = {**SHOWN["slow_reward"], "groups/num_dropped": 8.0}
    cause = diagnose(facts(slow)).causes[0]
    assert cause.name == "no_signal_groups"
    assert "always or never solved" in cause.advice
    constant = diagnose(facts({**slow, "reward_std": 0.0})).causes[0]
    assert "the reward gives all completions the same number" in constant.advice
    assert "completions_per_prompt" not in constant.advice


def test_a_low_temperature_is_raised_where_groups_have_no_signal():
    alike = {"groups/num_dropped": 6.0, "recipe.rollout.temperature": 0.3}
    assert named(alike, "no_signal_groups").settings == {"rollout.temperature": 1.0}


def test_a_lock_that_training_does_not_wait_for_is_no_cause():
    for waiting in (0.0, 0.004, 0.02):
        busy = {
            "gil/busy_share": 0.9,
            "gil/waiting_share": waiting,
            "gil/waiting/rollout": waiting,
            "cpu/run_delay_s": 3.0,
        }
        assert "gil" not in [cause.name for cause in diagnose(facts(busy)).causes]


def test_the_live_loop_has_no_reward_function_that_could_grow():
    growth: dict[str, object] = {"memory/growth_mb": 400.0}
    assert "reward" not in named(growth, "memory_growth", "live").advice
    assert "reward function" in named(growth, "memory_growth").advice


def test_no_advice_turns_something_on_or_makes_it_worse():
    never: dict[str, object] = {"time/checkpoint_s": 1.0, "recipe.run.checkpoint_every": 0}
    assert "checkpoints" not in [cause.name for cause in diagnose(facts(never)).causes]
    padded: dict[str, object] = {"update/padding_share": 0.6, "setup.forward": "padded", "recipe.sft.bucket_steps": 32}
    assert "sft.bucket_steps" not in named(padded, "padding", "sft").settings


def test_advice_names_no_setting_that_has_its_value_or_is_not_there():
    rare = {"time/log_s": 0.8, "recipe.run.sample_every": 50}
    cause = named(rare, "logging")
    assert (cause.settings, "less often" in cause.advice) == ({}, False)
    full = {**SHOWN["cache_starved"], "recipe.rollout.kv_cache_mb": None}
    assert "null takes" in named(full, "cache_starved").advice
    assert "int8" not in named({"faults/major": 3000.0, "recipe.optimizer.state": "int8"}, "memory_pressure").advice
    assert "score after drawing" not in named(SHOWN["gil"], "gil").advice
    assert "live.dir" in named(SHOWN["slow_disk"], "slow_disk", "live").advice


def test_workers_of_the_run_itself_are_not_to_be_stopped():
    own = {**SHOWN["starved"], "recipe.scale.workers": 2}
    assert "processes of this run are among them" in named(own, "starved").advice


@pytest.mark.parametrize("algorithm", list(RECIPES))
@pytest.mark.parametrize("name", SHOWN)
def test_settings_are_keys_of_the_recipe_whatever_the_algorithm(name: str, algorithm: str):
    shown = facts({key: value for key, value in SHOWN[name].items() if not key.startswith("recipe.")}, algorithm)
    for cause in diagnose(shown).causes:
        assert cause.share >= 0.01
        assert all(f"recipe.{key}" in recipe(algorithm) for key in cause.settings)


def test_8_bits_are_advised_with_their_trade_and_what_they_cost() -> None:
    faster: dict[str, object] = {"setup.products_s.int8": 0.002}
    cause = named(faster, "int8_drawing")
    assert cause.settings == {"rollout.weights": "int8"}
    assert "The trade" in cause.advice
    epochs = {**faster, "setup.int8_needs_old_policy": True, "recipe.grpo.num_epochs": 4}
    with_pass = named(epochs, "int8_drawing")
    assert cause.predicted_saving_s - with_pass.predicted_saving_s == pytest.approx(1.1 / 4)
    for silent in (
        {"recipe.rollout.weights": "auto"},
        {"recipe.rollout.weights": "int8"},
        {"recipe.rollout.importance.mode": "off"},
        {"setup.products_s.int8": 0.03},
    ):
        assert "int8_drawing" not in [one.name for one in diagnose(facts({**faster, **silent})).causes]
