"""What holds for every loaded model."""

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tunesmith.engine.models.loaded import disable_dropout, quiet_transformers


def test_quiet_puts_the_librarys_settings_back_even_after_an_error():
    before = (transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity())
    with pytest.raises(KeyError), quiet_transformers():
        assert not transformers_logging.is_progress_bar_enabled()
        raise KeyError("x")
    assert (transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()) == before


def test_dropout_is_set_to_zero_in_every_module():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Sequential(torch.nn.Dropout(0.1)))
    disable_dropout(model)
    assert torch.equal(model.train()(torch.ones(99)), torch.ones(99))
