import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    """The module `synthetic.py` beside this file: facts of runs that never happened."""
    spec = importlib.util.spec_from_file_location("report_synthetic", Path(__file__).with_name("synthetic.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
