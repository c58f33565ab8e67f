"""TRL's private methods are as the table says, and another TRL is refused with what to do."""

import pytest

trl = pytest.importorskip("trl")

from tunesmith.core.errors import MissingDependencyError  # noqa: E402
from tunesmith.integrations.trl import contract  # noqa: E402


def test_the_installed_trl_is_as_the_table_says():
    contract.check()


def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trl, "__version__", "7.3.0")
    with pytest.raises(MissingDependencyError, match=r"TRL 7\.3\.0 .*1\.15\.\*, 1\.16\.\*.*pip install"):
        contract.check()


def test_a_changed_method_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_prepare_inputs", lambda self, batch, more: batch)
    with pytest.raises(MissingDependencyError, match=r"GRPOTrainer\._prepare_inputs takes"):
        contract.check()


def test_a_missing_part_is_named():
    assert contract.differences(trl, {"GRPOTrainer._gone": "self"}) == ["GRPOTrainer._gone is missing"]
