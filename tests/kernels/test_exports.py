"""What the package offers by name is there, is the thing itself, and is loaded only when asked for."""

import importlib
import subprocess
import sys

import pytest

from tunesmith import kernels


@pytest.mark.parametrize("name", dir(kernels))
def test_every_public_name_is_there_and_has_documentation(name: str):
    found = getattr(kernels, name)
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert found.__doc__


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'select'"):
        _ = kernels.select
    with pytest.raises(ImportError):
        exec("from tunesmith.kernels import select")


def test_the_package_itself_loads_no_torch():
    code = "import sys, tunesmith.kernels; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
