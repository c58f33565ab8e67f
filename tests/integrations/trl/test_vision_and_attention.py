"""Models that we leave to TRL, and TRL's trainers with `attn_implementation="tunesmith"`."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from same import arguments, assert_same, both, first_batch, model, step_of, tokenizer
from test_sft import completions
from transformers import AttentionInterface, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.masking_utils import AttentionMaskInterface

from tunesmith.engine.models.attention_interface import ATTENTION_NAME, register_attention
from tunesmith.integrations.trl import SFTTrainer

IMAGE, START = 250, 252


@pytest.fixture
def registered() -> Iterator[None]:
    register_attention()
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(ATTENTION_NAME)


def vision_model() -> Any:
    config = Qwen2_5_VLConfig(
        text_config={
            **{"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **{"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32},
            **{"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0]},
        },
        image_token_id=IMAGE,
        video_token_id=251,
        vision_start_token_id=START,
        vision_end_token_id=253,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration(config)


def images(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one image of 4 merged patches each, as a user's collator gives them."""
    ids_BS = torch.tensor([row["input_ids"] for row in rows])
    pixels = torch.randn(len(rows) * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids_BS,
        "attention_mask": torch.ones_like(ids_BS),
        "labels": ids_BS.masked_fill(ids_BS >= IMAGE, -100),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(rows)),
        "mm_token_type_ids": (ids_BS == IMAGE).long(),
    }


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION_NAME])
@pytest.mark.usefixtures("registered")
def test_a_vision_language_model_goes_the_way_of_trl(
    attention: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input_ids": [5 + row, START, *[IMAGE] * 4, 253, 7, 8 + row, 9]} for row in range(4)]

    def build(is_ours: bool) -> Any:
        policy = vision_model()
        policy.set_attn_implementation(attention if is_ours else "eager")
        return (SFTTrainer if is_ours else trl.SFTTrainer)(
            policy,
            trl.SFTConfig(**arguments(tmp_path, per_device_train_batch_size=4, max_length=None)),
            data_collator=images,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    ours, theirs = both(build)
    with caplog.at_level(logging.WARNING, "tunesmith"):
        assert_same(step_of(ours, images(rows)), step_of(theirs, images(rows)))
    assert caplog.text.count("Tunesmith leaves") == 1


@pytest.mark.usefixtures("registered")
def test_attention_by_name_in_a_trainer_of_trl_and_in_ours(tmp_path: Path) -> None:
    model(0).save_pretrained(tmp_path / "model")

    def build(kind: Any, attention: str) -> Any:
        options = {"attn_implementation": attention, "dtype": "float32"}
        return kind(
            str(tmp_path / "model"),
            trl.SFTConfig(**arguments(tmp_path, model_init_kwargs=options)),
            train_dataset=completions(),
            processing_class=tokenizer(),
        )

    plain = build(trl.SFTTrainer, "eager")
    batch = first_batch(plain)
    expected = step_of(plain, batch)
    for kind in (trl.SFTTrainer, SFTTrainer):
        trainer = build(kind, ATTENTION_NAME)
        assert trainer.model.config._attn_implementation == ATTENTION_NAME
        assert_same(step_of(trainer, batch), expected)
