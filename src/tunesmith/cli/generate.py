"""`tunesmith generate`: a model continues prompts."""

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.cli.options import Positional, UseAppendAction, flag, parse
from tunesmith.cli.output import Output, as_plain, reporting, visible, wants_progress
from tunesmith.core.errors import InputError

if TYPE_CHECKING:
    from tunesmith.batch.rollout import Group
    from tunesmith.schema.records import Prompt

_DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Let a model continue prompts. Text goes in as it is; --chat asks it as a user's message."""

    run: Annotated[str, Positional, flag("The same as --model.", metavar="[RUN]")] = ""
    model: Annotated[str, flag("Run folder, hub id, folder, GGUF file; smollm2 if left out.", metavar="ID")] = ""
    prompt: Annotated[tuple[str, ...], UseAppendAction, flag("A prompt; repeatable.", metavar="TEXT")] = ()
    prompts: Annotated[str | None, flag("JSONL with a `prompt` column, or films.", metavar="FILE")] = None
    chat: Annotated[bool, flag("Wrap each text in the model's chat template.")] = False
    num_completions: Annotated[int, flag("Completions of each prompt.", "-n", metavar="N", shows_default=True)] = 1
    max_new_tokens: Annotated[int, flag("Limit of a completion.", metavar="N", shows_default=True)] = 64
    temperature: Annotated[float, flag("0 is greedy.", metavar="T", shows_default=True)] = 0.7
    top_p: Annotated[float, flag("Nucleus size; 1 is off.", metavar="P", shows_default=True)] = 1.0
    top_k: Annotated[int, flag("Number of candidates; 0 is off.", metavar="K", shows_default=True)] = 0
    seed: Annotated[int, flag("Same seed, same text.", metavar="N", shows_default=True)] = 0
    trust_remote_code: Annotated[bool, flag("Run code that the model brings along.")] = False
    out: Annotated[Path | None, flag("Write one JSON line per completion.", metavar="FILE.jsonl")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def generate(words: Sequence[str]) -> None:
    """Run `tunesmith generate`."""
    options = parse(GenerateOptions, words, "generate")
    if options.run and options.model:
        raise InputError(f"two models are given, {options.run} and --model {options.model}; give one")
    model = options.run or options.model or _DEFAULT_MODEL
    if options.out and options.out.exists():
        raise InputError(f"{options.out} exists and is kept; give another name to --out")
    prompts = _prompts(options)
    with reporting(as_json=options.json) as output:
        groups = _complete(model, options, prompts)
        rows = [row for group in groups for row in _rows(group)]
        if options.out:
            _write(options.out, rows)
            output.say(f"{len(rows)} completions written to {options.out}")
        else:
            _show(groups, output)
        output.finish({"model": model, "seed": options.seed, "out": options.out, "completions": rows})


def _prompts(options: GenerateOptions) -> "list[Prompt]":
    if bool(options.prompt) == bool(options.prompts):
        raise InputError("give either --prompt TEXT or --prompts FILE")
    from tunesmith.data.prompts import load_prompts
    from tunesmith.schema.records import Prompt

    found = load_prompts(options.prompts) if options.prompts else load_prompts(list(options.prompt))
    if not options.chat:
        return found
    return [
        Prompt(prompt.id, ({"role": "user", "content": prompt.content},), prompt.columns)
        if isinstance(prompt.content, str)
        else prompt
        for prompt in found
    ]


def _complete(model: str, options: GenerateOptions, prompts: "Sequence[Prompt]") -> "list[Group]":
    from tunesmith.batch.rollout import SamplingParams
    from tunesmith.config.sections import ModelSection
    from tunesmith.models.load import load_policy
    from tunesmith.rollout.engine import check_request
    from tunesmith.rollout.transformers_backend import TransformersEngine
    from tunesmith.telemetry.progress import progress

    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    check_request(prompts, options.num_completions, sampling)
    loaded = load_policy(ModelSection(name=model, trust_remote_code=options.trust_remote_code))
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    total = len(prompts) * options.num_completions
    with progress("completions", total, enabled=total > 1 and wants_progress()) as reporter:
        return engine.generate(
            prompts, options.num_completions, sampling, on_progress=lambda done, _: reporter.update(done)
        )


def _rows(group: "Group") -> list[dict[str, object]]:
    return [
        {
            "prompt": group.prompt.content,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
            "logps": list(completion.logps),
        }
        for completion in group.completions
    ]


def _write(file: Path, rows: Sequence[dict[str, object]]) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.writelines(json_text.dumps(as_plain(row), allow_nan=False) + "\n" for row in rows)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error


def _show(groups: "Sequence[Group]", output: Output) -> None:
    from rich.text import Text

    from tunesmith.schema.records import plain_text

    for group in groups:
        for completion in group.completions:
            end = "" if completion.finish_reason == "stop" else " ..."
            # A continuation joins on to a text; an answer stands below a message.
            joint = "\n" if group.prompt.is_conversational else ""
            asked = (visible(plain_text(group.prompt.content)) + joint, "bold")
            output.say(Text.assemble(asked, visible(completion.text) + end))
            output.say("")
