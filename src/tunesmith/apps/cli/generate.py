"""`tunesmith generate`: a model continues prompts."""

import json as json_text
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import Positional, SamplingFlags, UseAppendAction, flag, parse
from tunesmith.apps.cli.output import LiveText, Output, as_plain, reporting, wants_progress, write_new
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import visible
from tunesmith.base.core.system import keep_freed_memory

if TYPE_CHECKING:
    from tunesmith.base.schema.records import Prompt
    from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
    from tunesmith.engine.rollout.engine import Engine

_DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingFlags):
    """Let a model continue prompts. Text goes in as it is; --chat asks it as a user's message."""

    run: Annotated[str, Positional, flag("The same as --model.", "[RUN]")] = ""
    model: Annotated[str, flag("Run folder, hub id, folder, GGUF file; smollm2 if left out.", "ID")] = ""
    prompt: Annotated[tuple[str, ...], UseAppendAction, flag("A prompt; repeatable.", "TEXT")] = ()
    prompts: Annotated[str | None, flag("JSONL with a `prompt` column, or films.", "FILE")] = None
    chat: Annotated[bool, flag("Wrap each text in the model's chat template.")] = False
    num_completions: Annotated[int, flag("Completions of each prompt.", "N", "-n")] = 1
    max_new_tokens: Annotated[int, flag("Limit of a completion.", "N")] = 64
    top_k: Annotated[int, flag("Number of candidates; 0 is off.", "K")] = 0
    seed: Annotated[int, flag("Same seed, same text.", "N")] = 0
    trust_remote_code: Annotated[bool, flag("Run code that the model brings along.")] = False
    out: Annotated[Path | None, flag("Write one JSON line per completion.", "FILE.jsonl")] = None
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
    from tunesmith.engine.rollout.engine import GenerationInterrupted

    with reporting(as_json=options.json) as output:
        try:
            _report(options, model, _complete(model, options, prompts), output)
        except GenerationInterrupted as interrupt:
            num = sum(len(group.completions) for group in interrupt.groups)
            sys.stderr.write(f"\n{num} of {len(prompts) * options.num_completions} completions were finished\n")
            _report(options, model, interrupt.groups, output, interrupted=True)
            raise


def _report(
    options: GenerateOptions, model: str, groups: "Sequence[Group]", output: Output, *, interrupted: bool = False
) -> None:
    rows = [row for group in groups for row in _rows(group)]
    if options.out:
        lines = (json_text.dumps(as_plain(row), allow_nan=False) + "\n" for row in rows)
        write_new(options.out, "".join(lines))
        output.say(f"{len(rows)} completions written to {options.out}")
    elif not _is_live(options):
        _show(groups, output)
    facts = {"model": model, "seed": options.seed, "out": options.out, "completions": rows}
    output.finish({**facts, "interrupted": interrupted})


def _is_live(options: GenerateOptions) -> bool:
    """True if a single completion is requested on a terminal: it is streamed."""
    is_one = len(options.prompt) == 1 and options.num_completions == 1
    return is_one and not options.json and not options.out and sys.stdout.isatty()


def _prompts(options: GenerateOptions) -> "list[Prompt]":
    if bool(options.prompt) == bool(options.prompts):
        raise InputError("give either --prompt TEXT or --prompts FILE")
    from tunesmith.base.schema.records import Prompt
    from tunesmith.collect.data.prompts import load_prompts

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
    from tunesmith.base.config.sections import ModelSection
    from tunesmith.base.runs.progress import progress
    from tunesmith.engine.models.load import load_policy
    from tunesmith.engine.rollout.engine import check_request
    from tunesmith.engine.rollout.factory import open_engine

    sampling = options.sampling(options.max_new_tokens, options.seed, options.top_k)
    keep_freed_memory()
    check_request(prompts, options.num_completions, sampling)
    loaded = load_policy(ModelSection(name=model, trust_remote_code=options.trust_remote_code))
    engine = open_engine(loaded.model, loaded.tokenizer, backend=options.engine)
    if _is_live(options):
        return _complete_live(engine, prompts, sampling)
    total = len(prompts) * options.num_completions
    with progress("completions", total, enabled=total > 1 and wants_progress()) as reporter:
        return engine.generate(
            prompts, options.num_completions, sampling, on_progress=lambda done, _: reporter.update(done)
        )


def _complete_live(engine: "Engine", prompts: "Sequence[Prompt]", sampling: "SamplingParams") -> "list[Group]":
    """Print the prompt and stream its completion."""
    from rich.text import Text

    Output(as_json=False).console.print(Text(_prompt_text(prompts[0]), "bold"), end="", soft_wrap=True)
    live = LiveText(sys.stdout)
    groups = engine.generate(prompts, 1, sampling, on_text=lambda _prompt, _sample, text: live.add(text))
    live.end(_end(groups[0].completions[0]) + "\n")
    return groups


def _rows(group: "Group") -> list[dict[str, object]]:
    return [
        {
            "prompt": group.prompt.content,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
            "logps": list(completion.logps),
            "raw_logps": list(completion.raw_logps),
        }
        for completion in group.completions
    ]


def _show(groups: "Sequence[Group]", output: Output) -> None:
    from rich.text import Text

    for group in groups:
        for completion in group.completions:
            prompt = (_prompt_text(group.prompt), "bold")
            output.say(Text.assemble(prompt, visible(completion.text) + _end(completion)))
            output.say("")


def _prompt_text(prompt: "Prompt") -> str:
    """The prompt as printed before its completion, with a line break after a conversation."""
    from tunesmith.base.schema.records import plain_text

    return visible(plain_text(prompt.content)) + ("\n" if prompt.is_conversational else "")


def _end(completion: "Completion") -> str:
    return "" if completion.finish_reason == "stop" else " ..."
