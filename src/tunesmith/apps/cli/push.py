"""`tunesmith push`: the trained model of a run in a repository of the Hugging Face hub."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.apps.cli.export import GgufType, check_layout, final_folder, writing_to
from tunesmith.apps.cli.options import Positional, flag, parse
from tunesmith.apps.cli.output import reporting, wants_progress


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Upload the trained model of a run to the Hugging Face hub, in one commit, with a model card.

    The repository is made, and is private, unless --public is given. The token is that of HF_TOKEN or of `hf auth
    login`. HF_ENDPOINT names another server with the hub's interface.
    """

    run: Annotated[str, Positional, flag("A run folder.", "RUN")]
    to: Annotated[str, flag("The repository.", "OWNER/NAME")]
    public: Annotated[bool, flag("Everybody may see it.")] = False
    adapters: Annotated[bool, flag("Adapters alone; without it, merged into their base.")] = False
    gguf: Annotated[
        Literal["none", GgufType],
        flag("Add a GGUF file with weights of this type, and a Modelfile for Ollama."),
    ] = "none"
    base: Annotated[
        str, flag("Base model on the hub, where the run was trained from a folder of this machine.", "OWNER/NAME")
    ] = ""
    license: Annotated[str, flag("Licence; without it, the base model's, if it is known.", "NAME")] = ""
    overwrite: Annotated[bool, flag("Replace another model in the repository; its history keeps that.")] = False
    trust_remote_code: Annotated[bool, flag("To merge, run code that the base brings along.")] = False
    dry_run: Annotated[bool, flag("Print what would be sent, and contact nobody.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


def push(words: Sequence[str]) -> None:
    """Run `tunesmith push`."""
    options = parse(PushOptions, words, "push")
    run = Path(options.run).expanduser()
    final = final_folder(run)
    check_layout(final)
    from tunesmith.apps.workflows.publish import published_files, run_id
    from tunesmith.engine.models.hub import Hub, check_name, offline

    check_name("--to", options.to)
    if options.base:
        check_name("--base", options.base)
    with (
        reporting(as_json=options.json) as output,
        writing_to("the folder of temporary files (TMPDIR)"),
        tempfile.TemporaryDirectory(prefix="tunesmith-push-") as folder,
    ):
        hub = None if options.dry_run else Hub(options.to)
        found = hub.look() if hub else None
        if hub:  # before adapters are merged in vain
            hub.removed(found, (), run_id(run), is_public=options.public, replaces=options.overwrite)
        with offline() if hub is None else nullcontext():
            files = published_files(
                run,
                options.to,
                Path(folder),
                adapters=options.adapters,
                gguf=None if options.gguf == "none" else options.gguf,
                base=options.base,
                license=options.license,
                trust_remote_code=options.trust_remote_code,
            )
        contents = sorted(files.items())
        sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in contents}
        for name, num_bytes in sizes.items():
            output.say(f"{num_bytes:>14,}  {name}")
        visibility = "public" if options.public else "private"
        facts: dict[str, object] = {"to": options.to, "visibility": visibility, "files": sizes}
        if hub is None:
            card = files["README.md"]
            assert isinstance(card, bytes)
            output.say(f"\n{card.decode()}\nnothing was sent: a dry run; it would go to {options.to}, {visibility}")
            output.finish({**facts, "card": card.decode(), "url": None, "commit": None, "removed": []})
            return
        removed = hub.removed(found, list(files), run_id(run), is_public=options.public, replaces=options.overwrite)
        done = hub.push(
            files,
            found,
            removed,
            is_public=options.public,
            title=f"{run.resolve().name}, by Tunesmith",
            shows_progress=wants_progress(),
        )
        if removed:
            output.say(f"removed, and kept in the history: {', '.join(removed)}")
        output.say(f"\n{done.url}  {visibility}, commit {done.commit[:12]}")
        output.finish({**facts, "url": done.url, "commit": done.commit, "removed": removed})
