"""The commands of the page on GGUF run in their order, with a tiny model in place of SmolLM2."""

import glob
from pathlib import Path

import pytest

from pages import ROOT, blocks
from test_examples import write_files
from tunesmith.apps.cli.main import main

PAGE = ROOT / "docs" / "gguf.md"


@pytest.mark.usefixtures("own_logging")
def test_the_commands_from_a_run_to_a_gguf_file_and_back(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    write_files(PAGE, tmp_path)
    commands = [words[1:] for block in blocks(PAGE) if block.language == "console" for words in block.commands()]
    assert [words[0] for words in commands] == ["train", "export", "export", "generate"]
    for words in commands:
        tiny = ["tiny:llama" if word == "smollm2" else word for word in words]
        assert main([name for word in tiny for name in sorted(glob.glob(word)) or [word]]) == 0, words
    run = Path(glob.glob("runs/*-sft-*")[0]).name
    written = {str(path) for pattern in ("*", "eight/*") for path in Path().glob(pattern) if path.is_file()}
    eight = {f"eight/{run}-q8_0.gguf", f"eight/{run}-q8_0.Modelfile"}
    assert written == {"told.jsonl", "small.gguf", "small.Modelfile", *eight}
    assert "small.gguf" in (tmp_path / "small.Modelfile").read_text()
    capsys.readouterr()
    assert main(["export", f"runs/{run}", "small.gguf", "--format", "gguf"]) == 2
    assert "small.gguf exists; give another place, or --overwrite" in capsys.readouterr().err
    assert main(["export", f"runs/{run}", "small.gguf", "--format", "gguf", "--overwrite"]) == 0
    for words, said in (
        (["--format", "gguf", "--lora"], "holds no adapters; leave --lora out"),
        (["--format", "gguf", "--merge"], "leave these flags out"),
        (["--type", "q8_0"], "--type is for GGUF files"),
        ([], "export needs a new or empty folder"),
    ):
        dest = [] if not words else ["other"]
        assert main(["export", f"runs/{run}", *dest, *words]) == 2
        assert said in capsys.readouterr().err
