"""`tunesmith trl-check`: what it reads in a script, what it leaves open, and that it runs nothing of it."""

import ast
import json
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import ROOT, blocks
from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import InputError
from tunesmith.integrations import trl_support as support
from tunesmith.integrations.trl_check import Report, check

SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this script must not run")

args = GRPOConfig(output_dir="out", num_generations=8, max_completion_length=64)
trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B", reward_funcs=len, args=args, train_dataset=load_dataset("x"))
trainer.train()
"""


def report_on(folder: Path, script: str, config: str | None = None) -> Report:
    (folder / "train.py").write_text(script)
    if config is None:
        return check(folder / "train.py")
    (folder / "config.yaml").write_text(config)
    return check(folder / "train.py", folder / "config.yaml")


def left(report: Report) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(one.setting, one.works, one.is_certain) for use in report.uses for one in use.left]


def test_a_plain_script_is_faster_throughout_by_one_changed_import(tmp_path: Path):
    report = report_on(tmp_path, SCRIPT)
    (use,) = report.uses
    assert (use.trainer, use.faster, use.left) == ("GRPOTrainer", ("rollout", "forward", "optimizer"), ())
    (change,) = report.changes
    assert (change.where, change.old) == ("train.py:2", "from trl import GRPOConfig, GRPOTrainer")
    assert change.new == ("from trl import GRPOConfig", "from tunesmith.integrations.trl import GRPOTrainer")
    assert (report.gone, report.newest_version) == ((), None)


def test_after_the_change_there_is_nothing_to_change(tmp_path: Path):
    report = report_on(tmp_path, SCRIPT)
    changed = SCRIPT.replace(report.changes[0].old, "\n".join(report.changes[0].new))
    again = report_on(tmp_path, changed)
    assert again.changes == ()
    assert [(use.trainer, use.faster) for use in again.uses] == [(use.trainer, use.faster) for use in report.uses]


def test_settings_with_which_trl_does_the_work_are_named_with_place_and_reason(tmp_path: Path):
    script = SCRIPT.replace("num_generations=8", 'use_vllm=True, optim="adafactor"').replace(
        "args=args", "args=args, rollout_func=draw"
    )
    (use,) = report_on(tmp_path, script).uses
    assert use.faster == ("forward",)
    assert [(one.setting, one.where) for one in use.left if one.is_certain] == [
        ("use_vllm=True", "train.py:6"),
        ("optim='adafactor'", "train.py:6"),
    ]
    assert all(one.why for one in use.left)


def test_a_value_that_only_the_running_script_knows_is_left_open(tmp_path: Path):
    report = report_on(tmp_path, SCRIPT.replace("num_generations=8", "use_vllm=flags.vllm"))
    assert left(report) == [("use_vllm=flags.vllm", ("rollout",), False)]
    assert report.uses[0].faster == ("rollout", "forward", "optimizer")


def test_a_variable_counts_as_what_is_assigned_to_it_once(tmp_path: Path):
    used = SCRIPT.replace("num_generations=8", "use_vllm=vllm")
    assert left(report_on(tmp_path, "vllm = False\n" + used)) == []
    assert left(report_on(tmp_path, "vllm = True\n" + used)) == [("use_vllm=vllm", ("rollout",), True)]
    assert left(report_on(tmp_path, "vllm = True\nvllm = False\n" + used)) == [("use_vllm=vllm", ("rollout",), False)]


def test_an_attribute_that_is_set_and_the_yaml_file_count_too(tmp_path: Path):
    by_attribute = SCRIPT.replace("trainer = ", "args.use_vllm = True\ntrainer = ")
    assert left(report_on(tmp_path, by_attribute)) == [("use_vllm=True", ("rollout",), True)]
    report = report_on(tmp_path, SCRIPT, "use_vllm: true\nload_in_4bit: false\nlearning_rate: 1e-6\n")
    assert [(one.setting, one.where) for one in report.uses[0].left] == [("use_vllm: True", "config.yaml")]


def test_settings_count_for_the_trainer_that_they_are_given_to(tmp_path: Path):
    script = """\
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
SFTTrainer(model, SFTConfig(label_smoothing_factor=0.1)).train()
DPOTrainer(model, args=DPOConfig(use_weighting=True, label_smoothing_factor=0.1)).train()
"""
    uses = {use.trainer: use for use in report_on(tmp_path, script).uses}
    assert [one.setting for one in uses["SFTTrainer"].left] == ["label_smoothing_factor=0.1"]
    assert [one.setting for one in uses["DPOTrainer"].left] == ["use_weighting=True"]
    assert [one.where for one in uses["DPOTrainer"].left] == ["train.py:3"]


@pytest.mark.parametrize(
    ("head", "name", "expected"),
    [
        ("import trl", "trl.GRPOTrainer", ("from tunesmith.integrations.trl import GRPOTrainer", "GRPOTrainer")),
        ("import trl as t", "t.GRPOTrainer", ("from tunesmith.integrations.trl import GRPOTrainer", "GRPOTrainer")),
        (
            "from trl import GRPOTrainer as Mine",
            "Mine",
            ("from tunesmith.integrations.trl import GRPOTrainer as Mine",),
        ),
        (
            "from trl.trainer.grpo_trainer import GRPOTrainer, RewardFunc",
            "GRPOTrainer",
            (
                "from trl.trainer.grpo_trainer import RewardFunc",
                "from tunesmith.integrations.trl import GRPOTrainer",
            ),
        ),
    ],
)
def test_every_form_of_the_import_is_understood(tmp_path: Path, head: str, name: str, expected: tuple[str, ...]):
    report = report_on(tmp_path, f"{head}\n{name}(model, use_vllm=True)\n")
    assert left(report) == [("use_vllm=True", ("rollout",), True)]
    assert [change.new for change in report.changes] == [expected]
    for change in report.changes:
        ast.parse("\n".join(change.new))


def test_a_subclass_counts_as_its_trainer_and_its_own_methods_are_named(tmp_path: Path):
    script = """\
from trl import GRPOTrainer
class Mine(GRPOTrainer):
    def _generate_single_turn(self, *args):
        return super()._generate_single_turn(*args)
    def log(self, *args):
        pass
Mine(model, optimizers=(None, schedule))
"""
    report = report_on(tmp_path, script)
    assert left(report) == [
        ("_generate_single_turn()", ("rollout",), True),
        ("optimizers=(None, schedule)", ("optimizer",), False),
    ]


def test_models_that_see_images_and_adapters_that_learn_a_prompt_are_trls(tmp_path: Path):
    script = """\
from trl import SFTTrainer
model = AutoModelForImageTextToText.from_pretrained("x")
SFTTrainer(model, peft_config=LoraConfig())
"""
    assert left(report_on(tmp_path, script)) == [("model=model", ("forward",), True)]
    script = script.replace("AutoModelForImageTextToText", "AutoModelForCausalLM").replace("Lora", "peft.PromptTuning")
    assert left(report_on(tmp_path, script)) == [("peft_config=peft.PromptTuningConfig()", ("forward",), True)]


def test_an_old_script_is_told_what_trl_lacks_and_for_which_version_it_is(tmp_path: Path):
    script = """\
from trl import DPOConfig, DPOTrainer, PPOConfig, PPOTrainer
DPOTrainer(model, tokenizer=tokenizer, args=DPOConfig(max_prompt_length=128))
PPOTrainer(args=PPOConfig(), model=model)
"""
    report = report_on(tmp_path, script)
    assert report.newest_version == "0.11"
    assert {one.name: (one.where, one.last_version) for one in report.gone} == {
        "PPOTrainer": ("train.py:1", "1.12"),
        "PPOConfig": ("train.py:1", "1.12"),
        "tokenizer": ("train.py:2", "0.11"),
        "max_prompt_length": ("train.py:2", "0.28"),
    }
    assert "from tunesmith.integrations.trl import DPOTrainer, PPOConfig, PPOTrainer" in report.changes[0].new
    ours = "from tunesmith.integrations.trl import PPOConfig, PPOTrainer\nPPOTrainer(args=PPOConfig(), model=model)\n"
    assert report_on(tmp_path, ours).gone == ()


def test_names_that_are_not_trls_are_not_taken_for_what_trl_removed(tmp_path: Path):
    script = """\
from trl import SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("x")
state.tokenizer = tokenizer
transformers.Trainer(tokenizer=tokenizer)
SFTTrainer(model, processing_class=tokenizer)
"""
    assert report_on(tmp_path, script).gone == ()
    assert [one.name for one in report_on(tmp_path, script, "max_seq_length: 512\n").gone] == ["max_seq_length"]


def test_a_subclass_of_a_config_counts_as_that_config(tmp_path: Path):
    script = """\
from trl import GRPOConfig, GRPOTrainer
class Mine(GRPOConfig):
    seed = 3
GRPOTrainer(model, args=Mine(use_vllm=True))
"""
    assert left(report_on(tmp_path, script)) == [("use_vllm=True", ("rollout",), True)]


def test_what_the_report_does_not_cover_is_said(tmp_path: Path):
    script = """\
from trl import BCOTrainer, GRPOConfig, GRPOTrainer, TrlParser
(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()
GRPOTrainer(model, args=args, **more)
"""
    notes = "\n".join(report_on(tmp_path, script).notes)
    assert "train.py:2: TrlParser reads settings" in notes
    assert "train.py:3: GRPOTrainer takes ** arguments" in notes
    assert "BCOTrainer stays TRL's" in notes
    assert "TrlParser" not in "\n".join(report_on(tmp_path, script, "beta: 0.1\n").notes)


@pytest.mark.parametrize(
    ("script", "config", "message"),
    [
        ("def f(:\n", None, "cannot be read as Python"),
        ("x = 1\0", None, "cannot be read as Python"),
        ("import torch\n", None, "uses none of the trainers that Tunesmith makes faster: GRPOTrainer"),
        (SCRIPT, "- 1\n", "has no keys and values"),
        (SCRIPT, "a: [\n", "not valid YAML"),
    ],
)
def test_bad_input_is_an_error_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, config: str | None, message: str
):
    with pytest.raises(InputError, match=message):
        report_on(tmp_path, script, config)
    words = [str(tmp_path / "train.py"), *(["--config", str(tmp_path / "config.yaml")] if config else [])]
    assert main(["trl-check", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_script_is_an_error(tmp_path: Path):
    assert main(["trl-check", str(tmp_path / "none.py")]) == 2


def test_the_command_prints_text_or_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("num_generations=8", "use_vllm=True, max_prompt_length=4"))
    assert main(["trl-check", str(script)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "GRPOTrainer, train.py:2",
        "faster   forward ",
        "TRL's    rollout    use_vllm=True (train.py:6): vLLM draws",
        "+ from tunesmith.integrations.trl import GRPOTrainer",
        "written for TRL 0.28 or older",
    ):
        assert part in shown
    assert main(["trl-check", str(script), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["uses"][0]["left"][0]["setting"] == "use_vllm=True"
    assert set(facts) == {field.name for field in fields(Report)}


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = blocks(ROOT / "docs" / "trl.md")
    (script,) = [block.text for block in found if (block.kind, block.value) == ("file", "train.py")]
    (shown,) = [block.text for block in found if block.text.startswith("$ tunesmith trl-check train.py\n")]
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    assert main(["trl-check", "train.py"]) == 0
    assert capsys.readouterr().out.startswith(shown.partition("\n")[2])


SCRIPTS = sorted((Path(str(find_spec("trl").origin)).parent / "scripts").glob("[a-z]*.py")) if find_spec("trl") else []


@pytest.mark.parametrize(
    "path",
    [path for path in SCRIPTS if path.stem in ("grpo", "rloo", "dpo", "kto", "sft", "reward")],
    ids=lambda p: p.stem,
)
def test_trls_own_scripts_are_read(path: Path):
    report = check(path)
    assert f"{path.stem}trainer" in [use.trainer.lower() for use in report.uses]
    assert any("quantization_config" in one.setting and not one.is_certain for use in report.uses for one in use.left)
    assert report.gone == ()
    assert report.changes


def test_options_of_generation_that_the_engine_has_leave_the_rollout_to_it(tmp_path: Path):
    given = SCRIPT.replace("num_generations=8", 'generation_kwargs={"top_k": 5}')
    assert left(report_on(tmp_path, given)) == []
    report = report_on(tmp_path, given.replace("top_k", "typical_p"))
    assert [(works, is_certain) for _, works, is_certain in left(report)] == [(("rollout",), True)]


def test_the_tables_name_what_trl_has():
    """Fields and arguments in the table exist in TRL; removed ones do not, and what to use instead does."""
    trl = pytest.importorskip("trl")
    known: dict[str, set[str]] = {}
    for trainer in support.TRAINERS.keys() - {"PPOTrainer"}:
        config = getattr(trl, trainer.replace("Trainer", "Config"))
        arguments = getattr(trl, trainer).__init__.__code__
        names = {field.name for field in fields(config)} | set(arguments.co_varnames[: arguments.co_argcount])
        known[trainer] = names | {field.name for field in fields(trl.ModelConfig)}
    for reason in support.REASONS:
        assert set(reason.works) <= set(support.WORKS)
        owners = [one for one in reason.trainers if one in known and reason.name in known[one]]
        assert owners, f"no trainer has {reason.name}"
    for name in support.REMOVED:
        assert not any(name in names for names in known.values()), name
        assert not hasattr(trl, name), name
