"""TRL's private methods are as the table says, and another TRL is refused with what to do."""

import importlib
import operator

import pytest

trl = pytest.importorskip("trl")

from tunesmith.base.core.errors import MissingDependencyError  # noqa: E402
from tunesmith.integrations import trl as ours  # noqa: E402
from tunesmith.integrations.trl import apply, contract  # noqa: E402

TABLE = contract.SIGNATURES[".".join(trl.__version__.split(".")[:2])]


def test_the_installed_trl_is_as_the_table_says():
    contract.check()


def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trl, "__version__", "7.3.0")
    with pytest.raises(MissingDependencyError, match=r"TRL 7\.3\.0 .*1\.15\.\*, 1\.16\.\*.*pip install"):
        contract.check()


@pytest.mark.parametrize("part", TABLE)
def test_each_changed_part_is_refused_by_name_at_import(part: str, monkeypatch: pytest.MonkeyPatch):
    owner, _, name = part.rpartition(".")
    monkeypatch.setattr(operator.attrgetter(owner)(trl), name, lambda self, more: more)
    with pytest.raises(MissingDependencyError, match=rf"is not as released \({part} takes \(self, more\), expected"):
        importlib.reload(ours)


def test_each_method_of_trl_that_ours_replace_is_in_the_table():
    for trainer, mixin in apply._MIXINS.items():
        mine = {name for one in mixin.__mro__[:-1] for name, member in vars(one).items() if callable(member)}
        theirs = {name for one in trainer.__mro__ if one.__module__.startswith("trl.") for name in vars(one)}
        replaced = mine & theirs - {"__init__", "__module__", "__doc__"}
        assert replaced <= {name.removeprefix(f"{trainer.__name__}.") for name in TABLE}, trainer.__name__


def test_a_missing_part_is_named():
    assert contract.differences(trl, {"GRPOTrainer._gone": "self"}) == ["GRPOTrainer._gone is missing"]
