"""Pushes of a run's model by the real client of the hub to a server with its interface."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import constants
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hub_server import TOKEN, HubState, Repository, serving
from tunesmith.apps.cli.main import main
from tunesmith.engine.models.export import save_merged
from tunesmith.engine.models.tiny import tiny_model

Capture = pytest.CaptureFixture[str]
Push = Callable[..., tuple[int, dict, str]]

IDS_BS = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0))


def train(folder: Path, *words: str) -> Path:
    """The folder of a run that trained a tiny model."""
    data = folder / "private" / "told.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text("".join(json.dumps({"prompt": f"Film {i} was", "completion": " a joy."}) + "\n" for i in range(4)))
    given = ["--model", "tiny:llama", "--demonstrations", str(data), "--steps", "2", "--run.dir", str(folder / "runs")]
    assert main(["train", "sft", *given, "--quiet", *words]) == 0
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    words = ["--model.lora.rank", "4", "--optimizer.learning-rate", "1e-2", "--model.dtype", "float32"]
    return train(tmp_path_factory.mktemp("adapted"), *words)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    """A server that the library asks in place of the hub, with a token."""
    with serving() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        template = state.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has the older way of large files
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield state


@pytest.fixture
def push(capsys: Capture) -> Push:
    """A function from words to exit code, report and messages; the token is in none of them."""

    def pushed(*words: object) -> tuple[int, dict, str]:
        capsys.readouterr()
        code = main(["-v", "push", *map(str, words), "--json"])
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err
        return code, json.loads(said.out) if said.out else {}, said.err

    return pushed


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file can become larger within the block, which is what a full disk does to a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def front(card: bytes) -> dict:
    return yaml.safe_load(card.decode().split("---\n")[1])


def test_what_arrives_is_what_was_trained_and_loads(run, hub, tmp_path):
    before = contents(run)
    words = [sys.executable, "-m", "tunesmith", "push", str(run), "--to", "alice/small", "--license", "mit"]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert f"{hub.url}/alice/small  private, commit" in done.stdout
    repository = hub.repositories["alice/small"]
    assert (repository.visibility, len(repository.commits)) == ("private", 2)
    final = contents(run / "final")
    found = {name: repository.files[name] for name in final if name != "README.md"}
    assert found == {name: content for name, content in final.items() if name != "README.md"}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} < found.keys()
    assert contents(run) == before
    received = repository.write_to(tmp_path / "received")
    expected = AutoModelForCausalLM.from_pretrained(run / "final")(IDS_BS).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(received)(IDS_BS).logits, expected)
    tokenizer = AutoTokenizer.from_pretrained(received)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


def test_the_card_has_the_records_of_the_run_and_no_path(run, hub, push):
    line = {"lm_eval": "0.4", "rows": [{"task": "arc", "metric": "acc", "after": 0.5, "num_questions": 8}]}
    (run / "benchmarks.jsonl").write_text(json.dumps(line) + "\n")
    try:
        assert push(run, "--to", "alice/small", "--license", "apache-2.0", "--base", "org/base")[0] == 0
    finally:
        (run / "benchmarks.jsonl").unlink()
    card = hub.repositories["alice/small"].files["README.md"]
    assert front(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tunesmith", "rlhf", "sft"],
        "base_model": "org/base",
        "license": "apache-2.0",
    }
    text = card.decode()
    result = json.loads((run / "result.json").read_text())
    for part in (
        "# small\n",
        'from_pretrained("alice/small")',
        "- Licence: apache-2.0\n",
        "- Algorithm: SFT\n",
        "- Data: `told.jsonl` (4 rows used)\n",
        f"| `loss` | {result['loss']:.4g} |",
        f"| `eval/loss` | {result['eval/loss']:.4g} |",
        "| arc | acc |",
        "learning_rate: 1.0e-05",
        "source: told.jsonl",
    ):
        assert part in text
    sent = b"\n".join(hub.repositories["alice/small"].files.values())
    assert str(run.parents[1]).encode() not in sent
    assert re.search(rb"/(home|root|tmp)/", sent) is None


def test_adapters_are_merged_or_sent_alone(adapted, hub, push, tmp_path):
    assert push(adapted, "--to", "alice/merged")[0] == 0
    merged = save_merged(adapted / "final", tmp_path / "merged")
    received = hub.repositories["alice/merged"].files
    assert received["model.safetensors"] == (merged / "model.safetensors").read_bytes()
    assert "adapter_config.json" not in received
    assert front(received["README.md"])["library_name"] == "transformers"
    assert {path.name for path in adapted.iterdir()} & {"model", "gguf"} == set()

    code, _, err = push(adapted, "--to", "alice/adapters", "--adapters")
    assert code == 2
    assert "push that too and give its name by --base" in err
    assert push(adapted, "--to", "alice/adapters", "--adapters", "--base", "alice/tiny")[0] == 0
    received = hub.repositories["alice/adapters"].files
    weights = adapted / "final" / "adapter_model.safetensors"
    assert received["adapter_model.safetensors"] == weights.read_bytes()
    assert json.loads(received["adapter_config.json"])["base_model_name_or_path"] == "alice/tiny"
    assert json.loads(received["base.json"])["name"] == "alice/tiny"
    assert front(received["README.md"])["base_model"] == "alice/tiny"
    assert "AutoPeftModelForCausalLM" in received["README.md"].decode()
    folder = hub.repositories["alice/adapters"].write_to(tmp_path / "adapters")
    base = tiny_model("llama").model
    plain = base(IDS_BS).logits
    found = PeftModel.from_pretrained(base, folder)(IDS_BS).logits
    whole = hub.repositories["alice/merged"].write_to(tmp_path / "whole")
    expected = AutoModelForCausalLM.from_pretrained(whole)(IDS_BS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3


def test_an_upload_that_broke_off_changes_nothing_and_goes_on(run, hub, push, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))  # between its tries
    weights = hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()
    hub.breaks_at = weights
    before = contents(run)
    code, _, err = push(run, "--to", "alice/small", "--gguf", "bf16")
    assert code == 2
    assert "the connection broke off" in err
    assert "nothing in alice/small has changed, and the run is as it was; push again" in err
    assert len(hub.repositories["alice/small"].commits) == 1
    assert len(hub.stored) == 1  # the GGUF file
    assert contents(run) == before
    hub.breaks_at, hub.requests[:] = "", []
    assert push(run, "--to", "alice/small", "--gguf", "bf16")[0] == 0
    assert [one for one in hub.requests if one.startswith("PUT")] == [f"PUT /stored/{weights}"]
    files = hub.repositories["alice/small"].files
    assert {f"{run.name}-bf16.gguf", f"{run.name}-bf16.Modelfile"} < files.keys()
    assert "gguf" in front(files["README.md"])["tags"]


def test_a_commit_whose_answer_was_lost_is_not_denied(run, hub, push):
    """The commit was there, and the message said that nothing had changed."""
    hub.breaks_after_commit = True
    code, _, err = push(run, "--to", "alice/small")
    assert (code, len(hub.repositories["alice/small"].commits)) == (2, 2)
    assert "nothing in alice/small has changed" not in err
    assert "alice/small has all of the commit or nothing of it, which its page shows" in err


@pytest.mark.parametrize(
    ("part", "status", "text", "said"),
    [
        ("whoami", 503, "", "cannot answer now (503), asked for the token; try again later"),
        ("/commit/", 500, "", "cannot answer now (500), asked for the files; try again later; nothing in alice/small"),
        ("validate-yaml", 200, "<html>", "answered otherwise than a hub, asked for the files: see HF_ENDPOINT"),
        ("create", 200, "[]", "answered otherwise than a hub, asked for a new repository"),
    ],
)
def test_a_broken_server_is_not_said_to_refuse(part, status, text, said, run, hub, push):
    """A server that failed was said to have refused the token or the files, or to be out of reach."""
    hub.fails[part] = (status, text)
    code, _, err = push(run, "--to", "alice/small")
    assert (code, said in err) == (2, True), err


@pytest.mark.parametrize("words", [("--format", "gguf"), ("--merge",), ()])
def test_places_that_cannot_be_written_are_named(words, adapted, push, tmp_path, monkeypatch, capsys):
    """Each of them left a traceback, with adapters."""
    (tmp_path / "file").touch()
    for dest in (tmp_path / "file" / "x", tmp_path / ("x" * 300)):
        assert main(["export", str(adapted), str(dest), *words]) == 2
        err = capsys.readouterr().err
        assert f"{dest} cannot be written: " in err or f"cannot write the model to {dest}: " in err
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    code, _, err = push(adapted, "--to", "alice/small", "--dry-run")
    assert code == 2
    assert "(TMPDIR) cannot be written: No such file or directory" in err


def test_a_full_disk_while_adapters_are_merged_is_named(adapted, tmp_path, capsys):
    """safetensors has an error of its own for it, which was not read as one of the disk."""
    with files_up_to(4096):
        for words in (("--format", "gguf"), ("--merge",)):
            assert main(["export", str(adapted), str(tmp_path / "new.gguf"), *words]) == 2
            err = capsys.readouterr().err
            assert "error: cannot write the model to" in err
            assert "File too large" in err
    assert not list(tmp_path.iterdir())


def test_another_model_is_not_replaced_unasked(run, adapted, hub, push):
    assert push(run, "--to", "alice/small", "--gguf", "f32")[0] == 0
    code, _, err = push(adapted, "--to", "alice/small")
    assert code == 2
    assert f"alice/small holds the model of run {run.name}" in err
    assert "give another name, or --overwrite" in err
    repository = hub.repositories["alice/small"]
    repository.commits[-1]["picture.png"] = b"mine"
    facts = push(run, "--to", "alice/small")[1]
    assert facts["removed"] == [f"{run.name}-f32.Modelfile", f"{run.name}-f32.gguf"]
    assert len(repository.commits) == 3
    assert repository.files["picture.png"] == b"mine"
    facts = push(adapted, "--to", "alice/small", "--adapters", "--base", "alice/tiny", "--overwrite")[1]
    assert {"model.safetensors", "config.json", "picture.png"} <= set(facts["removed"])
    assert "model.safetensors" not in repository.files
    assert repository.commits[2]["model.safetensors"] == (run / "final" / "model.safetensors").read_bytes()

    hub.repositories["alice/other"] = Repository("private", [{"config.json": b"{}", "model.bin": b"x"}])
    code, _, err = push(run, "--to", "alice/other")
    assert code == 2
    assert "alice/other holds other files (config.json, model.bin)" in err
    hub.is_busy = True
    code, _, err = push(run, "--to", "alice/small", "--overwrite")
    assert code == 2
    assert "refused the files (412: A commit has happened since" in err
    hub.is_busy = False
    assert "theirs" in repository.files
    hub.repositories["alice/new"] = Repository("private", [{".gitattributes": b"", "LICENSE": b"mine"}])
    assert push(run, "--to", "alice/new")[0] == 0
    assert hub.repositories["alice/new"].files["LICENSE"] == b"mine"


def test_the_card_says_that_the_base_was_in_8_bits(adapted, tmp_path, push):
    rounded = train(tmp_path, "--model.lora.rank", "4", "--model.base", "int8")
    for run, is_told in ((rounded, True), (adapted, False)):
        card = push(run, "--to", "alice/small", "--dry-run")[1]["card"]
        assert ("- Base in training: rounded to 8 bits; adapters on the base as it is" in card) is is_told


def test_of_a_live_loop_the_served_version_is_sent(run, hub, push, tmp_path):
    loop = tmp_path / "loop"
    shutil.copytree(run, loop)
    (loop / "versions").mkdir()
    (loop / "final").rename(loop / "versions" / "v000003")
    (loop / "final").symlink_to("versions/v000003", target_is_directory=True)
    code, facts, _ = push(loop, "--to", "alice/loop", "--quiet")
    assert code == 0
    assert "model.safetensors" in facts["files"]
    files = hub.repositories["alice/loop"].files
    assert files["model.safetensors"] == (run / "final" / "model.safetensors").read_bytes()
    assert b"| `loss` |" in files["README.md"]
    (tmp_path / "away").mkdir()
    other = tmp_path / "away" / "loop"  # another loop of the same name
    shutil.copytree(loop, other, symlinks=True)
    (other / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 0.5}\n')
    assert push(other, "--to", "alice/loop")[0] == 2


def test_it_is_public_only_when_asked(run, hub, push):
    assert push(run, "--to", "alice/open", "--public")[1]["visibility"] == "public"
    assert hub.repositories["alice/open"].visibility == "public"
    code, _, err = push(run, "--to", "alice/open")
    assert code == 2
    assert "alice/open is public; add --public" in err
    assert push(run, "--to", "alice/closed")[0] == 0
    code, _, err = push(run, "--to", "alice/closed", "--public")
    assert code == 2
    assert "alice/closed is private; leave --public out" in err
    assert hub.repositories["alice/closed"].visibility == "private"


def test_a_dry_run_says_all_and_asks_nobody(adapted, hub, push, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    code, facts, _ = push(adapted, "--to", "alice/small", "--dry-run")
    assert code == 0
    assert hub.requests == []
    assert facts["files"]["model.safetensors"] > 10_000
    assert "# small" in facts["card"]
    assert facts["commit"] is None
    assert main(["push", str(adapted), "--to", "alice/small", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tokenizer.json" in out
    assert "nothing was sent: a dry run; it would go to alice/small, private" in out


def test_refusals_say_what_to_change(run, hub, push, monkeypatch, tmp_path):
    for name in ("small", "a/b/c", "a/..", "a b/c"):
        code, _, err = push(run, "--to", name)
        assert (code, f"--to is {name!r}" in err) == (2, True)
    code, _, err = push(run, "--to", "alice/small", "--base", "mine")
    assert code == 2
    assert "--base is 'mine'; give OWNER/NAME" in err
    code, _, err = push(run, "--to", "bob/small")
    assert code == 2
    assert "the token of alice may not write to bob/small" in err
    hub.repositories["alice/small"], hub.may_write = Repository("private"), False
    code, _, err = push(run, "--to", "alice/small")
    assert code == 2
    assert "refused the files (403: You don't have the rights to write to this repository)" in err
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    code, _, err = push(run, "--to", "alice/small")
    assert code == 2
    assert "does not know the token" in err
    assert "hf_other" not in err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    code, _, err = push(run, "--to", "alice/small")
    assert code == 2
    assert "there is no token for the hub: set HF_TOKEN, or log in with `hf auth login`" in err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    code, _, err = push(run, "--to", "alice/small")
    assert code == 2
    assert "http://127.0.0.1:1 cannot be reached" in err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "recipe.yaml").write_text("algorithm: sft\n")
    code, _, err = push(tmp_path / "begun", "--to", "alice/small")
    assert code == 2
    assert "has no final/: its training did not end" in err
    code, _, err = push(run, "--to", "alice/small", "--adapters")
    assert code == 2
