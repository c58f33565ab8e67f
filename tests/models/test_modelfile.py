"""The Modelfile, read by the grammar that Ollama documents (its pages "Modelfile reference" and "Template")."""

import re
from collections import defaultdict

import pytest
from tokenizer_kinds import TEMPLATES, llama_2

pytest.importorskip("gguf")

from tunesmith.engine.models.gguf_out.modelfile import go_template, modelfile

INSTRUCTIONS = {"FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES"}
PARAMETERS = {
    **dict.fromkeys(("num_ctx", "repeat_last_n", "seed", "num_predict", "top_k"), int),
    **dict.fromkeys(("repeat_penalty", "temperature", "top_p", "min_p"), float),
    "stop": str,
}
FIELDS = {"System", "Prompt", "Response", "Suffix", "Messages", "Role", "Content", "ToolCalls", "Tools", "Function"}
FUNCTIONS = {"and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge", "len", "slice", "index", "json", "printf", "print"}
OPENING = {"if", "range", "with"}
WORDS = FUNCTIONS | OPENING | {"else", "end", "break", "continue"}


def parse(text: str) -> dict[str, list[str]]:
    """The arguments of each instruction of a Modelfile; AssertionError for what the documentation does not allow.

    `# comment`, or `INSTRUCTION arguments`, where the arguments are the rest of the line, a text between quotes, or a
    text of several lines between three quotes. The names of instructions are in any case.
    """
    found: dict[str, list[str]] = defaultdict(list)
    while text:
        line = text.partition("\n")[0]
        if not line.strip() or line.startswith("#"):
            text = text.partition("\n")[2]
            continue
        name, _, rest = text.partition(" ")
        name = name.upper()
        assert name in INSTRUCTIONS, name
        parameter = ""
        if name == "PARAMETER":
            parameter, _, rest = rest.partition(" ")
            assert parameter in PARAMETERS, parameter
        if rest.startswith('"""'):
            argument, closing, text = rest[3:].partition('"""')
            assert closing, f"{name} has no end"
        elif rest.startswith('"'):
            argument, closing, text = rest[1:].partition('"')
            assert closing and "\n" not in argument, f"{name} has no end"
        else:
            argument, _, text = rest.partition("\n")
            text = "\n" + text
        assert not text or text.startswith("\n"), f"{name} is followed by {text[:20]!r}"
        text = text[1:]
        PARAMETERS.get(parameter, str)(argument)
        found[f"{name} {parameter}".strip()].append(argument)
    assert len(found["FROM"]) == 1
    return dict(found)


def check_template(text: str) -> None:
    """AssertionError for an action that is no part of Go's templates, or a field that Ollama does not document."""
    depth = 0
    known = set()
    for action in re.findall(r"\{\{-?(.*?)-?\}\}", text, re.DOTALL):
        plain = re.sub(r'"[^"]*"', "", action)
        known |= set(re.findall(r"(\$\w+)\s*(?:,|:?=)", plain))
        assert set(re.findall(r"\$\w+", plain)) <= known, action
        assert set(re.findall(r"\.(\w+)", plain)) <= FIELDS, action
        words = re.findall(r"(?<![\w.$])[a-z]\w*", plain)
        assert set(words) <= WORDS, action
        first = words[0] if words else ""
        depth += (first in OPENING) - (first == "end")
        assert depth >= 0, action
        assert first != "else" or depth > 0, action
    assert depth == 0
    outside = re.sub(r"\{\{.*?\}\}", "", text, flags=re.DOTALL)
    assert "{{" not in outside and "}}" not in outside


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("license", ["", "mit", "Permission is granted\nto all.", 'called "free"'])
def test_what_is_written_is_read_as_it_was_meant(kind, license):
    tokenizer = llama_2()
    tokenizer.chat_template = TEMPLATES[kind]
    stops = ["</s>", "<|im_end|>", "# no comment"]
    found = parse(modelfile("a run-q8_0.gguf", tokenizer, stops, license))
    template = go_template(tokenizer)
    told = bool(license) and not license.endswith('"')  # which would be read as a part of the quotes at its end
    assert found == {
        "FROM": ["./a run-q8_0.gguf"],
        **({"TEMPLATE": [template]} if template else {}),
        "PARAMETER stop": stops,
        **({"LICENSE": [license]} if told else {}),
    }
    if template:
        check_template(template)


@pytest.mark.parametrize(
    "text",
    [
        'FROM ./a\nSTOP "x"\n',
        'TEMPLATE "x"\n',
        'FROM a\nTEMPLATE """x\n',
        "FROM a\nPARAMETER seed x\n",
        'FROM a\nLICENSE """a""""\n',
    ],
)
def test_the_grammar_refuses_what_is_none(text):
    with pytest.raises((AssertionError, KeyError, ValueError)):
        parse(text)


@pytest.mark.parametrize(
    "text", ["{{ if .System }}", "{{ end }}", "{{ .Unknown }}", "{{ lower .Content }}", "{{ $x }}"]
)
def test_no_template_of_go_is_refused(text):
    with pytest.raises(AssertionError):
        check_template(text)
