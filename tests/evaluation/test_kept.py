"""Answers of an evaluation are kept as they come: a killed one goes on to the same bits, and nothing is mixed up."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tunesmith.base.core.faults import VARIABLE
from tunesmith.base.core.trace import trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import Backend, open_engine
from tunesmith.learn.evaluation.continuations import Continuation, Likelihood, likelihoods
from tunesmith.learn.evaluation.kept import KeptAnswers, identity
from tunesmith.learn.evaluation.texts import kept_texts

KILLED = """
import sys
from pathlib import Path
from tests.evaluation.test_kept import answers_of
answers_of(Path(sys.argv[1]))
"""


def loaded_model() -> LoadedModel:
    return load_policy("tiny:llama", dtype=torch.float32)


def rows() -> list[Continuation]:
    rng = random.Random(0)
    contexts = [tuple(rng.choices(range(3, 250), k=rng.randint(1, 30))) for _ in range(8)]
    return [Continuation(one, tuple(rng.choices(range(3, 250), k=k))) for one in contexts for k in (1, 2, 3)]


def prompts(model: LoadedModel) -> list[Prompt]:
    """Some several times, not next to each other."""
    texts = ["The film", "A quiet story", "The film", "Long and", "A quiet story", "The film", "Dull"]
    return [Prompt("p", text, token_ids=tuple(model.tokenizer(text)["input_ids"])) for text in texts]


SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)


def answers_of(file: Path | None) -> tuple[list[Likelihood], list[str], KeptAnswers]:
    """What the tiny model answers, kept in `file`."""
    loaded = loaded_model()
    model = language_model(loaded.model)
    kept = KeptAnswers(file, identity(model, loaded.tokenizer))
    found = likelihoods(model, rows(), batch_tokens=40, kept=kept)
    engine = open_engine(model, loaded.tokenizer)
    return found, kept_texts(engine, prompts(loaded), SAMPLING, kept), kept


@pytest.mark.parametrize("visit", [1, 3, 9])
def test_a_killed_evaluation_goes_on_to_the_same_bits(visit: int, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    environment = {**os.environ, VARIABLE: f"evaluation/answered:kill:{visit}"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", KILLED, file], env=environment, cwd=root, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    num_lines = len(file.read_text().splitlines()) if file.exists() else 0
    assert num_lines == visit - 1
    found, texts, kept = answers_of(file)
    whole, whole_texts, nothing = answers_of(None)
    assert (found, texts) == (whole, whole_texts)
    assert nothing.num_found == 0 and (kept.num_found > 0) == (visit > 1)
    again = answers_of(file)
    assert again[:2] == (whole, whole_texts) and again[2].num_found == len(rows()) + len(texts)


def test_what_is_kept_is_not_computed_again(tmp_path: Path) -> None:
    loaded = loaded_model()
    model = language_model(loaded.model)
    for is_first in (True, False):
        kept = KeptAnswers(tmp_path / "answers", identity(model, loaded.tokenizer))
        with trace() as record:
            likelihoods(model, rows(), batch_tokens=40, kept=kept)
        assert (record.metrics().get("likelihoods/computed_tokens", 0) > 0) == is_first


def whose(loaded: LoadedModel, model: LanguageModel | None = None) -> str:
    return identity(model or language_model(loaded.model), loaded.tokenizer)


def test_another_model_setting_or_tokenizer_is_another_identity() -> None:
    loaded, again = loaded_model(), loaded_model()
    assert whose(loaded) == whose(again)
    names = [whose(loaded)]
    next(again.model.parameters()).data[0, 0] += 1e-3
    names.append(whose(again))
    again = loaded_model()
    again.model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    names.append(whose(again))
    again = loaded_model()
    again.tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    names.append(whose(again))
    names.append(whose(load_policy("tiny:llama", dtype=torch.bfloat16)))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("damage", ["cut", "number", "text", "binary", "kind"])
def test_damaged_lines_count_as_never_written(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "answers.jsonl"
    whole = answers_of(file)
    lines = file.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[2])
    changed = {**row, "answers": [[one[0] - 1, one[1]] for one in row["answers"]]}
    lines[2] = {
        "cut": lines[2][:25],
        "number": json.dumps(changed).encode() + b"\n",
        "text": b"nonsense\n",
        "binary": bytes(range(128, 256)) + b"\n",
        "kind": b'{"key": 3, "answers": {"a": null}}\n[]\n',
    }[damage]
    file.write_bytes(b"".join(lines))
    found, texts, kept = answers_of(file)
    assert (found, texts) == whole[:2]
    assert 0 < kept.num_found < len(found) + len(texts)
    assert "damaged lines, which are asked again" in caplog.text


def test_a_file_that_cannot_be_written_costs_a_warning_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert answers_of(tmp_path / "none" / "answers")[:2] == answers_of(None)[:2]
    assert caplog.text.count("so a stopped evaluation would begin anew") == 1


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_texts_do_not_depend_on_which_are_kept(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.learn.evaluation.texts._TOGETHER", 3)
    loaded = loaded_model()
    engine: Engine = open_engine(loaded.model, loaded.tokenizer, backend=backend)
    file, seen = tmp_path / "answers", list[int]()
    whole = kept_texts(engine, prompts(loaded), SAMPLING, KeptAnswers(file), on_progress=seen.append)
    assert len(set(whole)) > 4 and seen == sorted(seen) and seen[-1] == len(whole)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == {"native": 4, "transformers": 3}[backend]
    for missing in range(len(lines)):
        file.write_bytes(b"".join(line for place, line in enumerate(lines) if place != missing))
        kept = KeptAnswers(file)
        assert kept_texts(engine, prompts(loaded), SAMPLING, kept) == whole
        assert 0 < kept.num_found < len(whole)
    other = SamplingParams(max_new_tokens=8, temperature=1.0, seed=4)
    assert kept_texts(engine, prompts(loaded), other, KeptAnswers(file)) != whole
