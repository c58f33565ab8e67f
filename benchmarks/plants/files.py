"""Models and data of the planted runs: random weights and random letters, the same at each call."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tunesmith.engine.models.tiny import EOS_ID, byte_tokenizer, scratch_model

_LIKING = 1.25
_LETTERS = "abcdefghijklmnopqrstuvwxyz    "


def write_files(folder: Path) -> None:
    """Write to the new folder `folder`: `medium`, a Llama of 26 million weights; `ending`, whose completions end after
    some 60 tokens, a few of them after far more; prompts of 400 letters; demonstrations of different and of similar
    lengths; pairs.
    """
    folder.mkdir(parents=True)
    _save(scratch_model(hidden_size=512, intermediate_size=1408, num_hidden_layers=8).model, folder / "medium")
    ending = scratch_model().model
    with torch.no_grad():  # a number that all hidden states have in common, and that the end of a sequence likes
        weight: Any = ending.get_input_embeddings().weight
        weight[:, 0] = 0.2
        weight[EOS_ID, 0] = _LIKING
    _save(ending, folder / "ending")
    draw = random.Random(0)
    _write(folder / "prompts.jsonl", ({"prompt": _text(draw, 400)} for _ in range(64)))
    different = (20 + min(900, int(draw.expovariate(1 / 120))) for _ in range(512))
    _write(folder / "different.jsonl", ({"prompt": "a", "completion": _text(draw, length)} for length in different))
    similar = (draw.randint(120, 240) for _ in range(512))
    _write(folder / "similar.jsonl", ({"prompt": "a", "completion": _text(draw, length)} for length in similar))
    sides = {"prompt": 40, "chosen": 60, "rejected": 60}
    _write(folder / "pairs.jsonl", ({side: _text(draw, size) for side, size in sides.items()} for _ in range(512)))


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _text(draw: random.Random, num_letters: int) -> str:
    return "".join(draw.choices(_LETTERS, k=num_letters - 1)) + "."


def _write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
