"""`tunesmith users export | delete`: the data of one person. Nothing here loads torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tunesmith.apps.cli.options import DATABASE, Positional, flag, parse
from tunesmith.apps.cli.output import reporting
from tunesmith.apps.cli.votes import do_in, reader_of
from tunesmith.base.core.errors import InputError

_KEY = "The user is one of this key of the API, under the name that the application gave; else a rater, or a key."


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write all that is stored of one person to a file, as JSON Lines: votes, feedback, answers and conversations."""

    user: Annotated[str, Positional, flag("Name of a rater, of a key, or of a user of a key.", "USER")]
    file: Annotated[Path, Positional, flag("File, which must be new.", "FILE")]
    key: Annotated[str, flag(_KEY, "NAME")] = ""
    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


@dataclass(frozen=True, kw_only=True)
class DeleteOptions:
    """Remove all that is stored of one person, and end their access. Nothing brings it back.

    A server that has the votes does it, and goes on meanwhile. Versions of the live loop that learnt from it are
    marked; the loop learns from it no more.
    """

    user: Annotated[str, Positional, flag("Name of a rater, of a key, or of a user of a key.", "USER")]
    key: Annotated[str, flag(_KEY, "NAME")] = ""
    dir: Annotated[Path, flag("Folder of the votes.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    yes: Annotated[bool, flag("Remove it; without this, only say what there is.")] = False
    json: Annotated[bool, flag("Print one JSON object.")] = False


def export(words: Sequence[str]) -> None:
    """Run `tunesmith users export`."""
    options = parse(ExportOptions, words, "users export")
    from tunesmith.collect.store.inbox import Chore
    from tunesmith.collect.web.arena import person_rows

    with reporting(as_json=options.json) as output, reader_of(options) as reader:
        person = reader.person(options.user, options.key)
        num = _write(options.file.expanduser(), person_rows(reader, options.dir.expanduser(), person))
        do_in(options, Chore("note", {"kind": "data exported", "detail": person.as_detail}))
        output.say(f"{options.file}  {num} rows")
        output.finish({"file": options.file, "num_rows": num})


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write rows to a new file; returns how many. Raises InputError."""
    from tunesmith.collect.data.vote_files import jsonl_lines

    try:
        with path.open("x", encoding="utf-8") as file:
            path.chmod(0o600)
            return sum(bool(file.write(line)) for line in jsonl_lines(rows))
    except FileExistsError:
        raise InputError(f"{path} exists; nothing is overwritten, so give a new name") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def delete(words: Sequence[str]) -> None:
    """Run `tunesmith users delete`."""
    options = parse(DeleteOptions, words, "users delete")
    from collections import Counter

    from tunesmith.collect.store.inbox import Chore
    from tunesmith.collect.web.arena import FOLDER, person_rows, remove_talks

    folder = options.dir.expanduser()
    with reporting(as_json=options.json) as output, reader_of(options) as reader:
        person = reader.person(options.user, options.key)
        if not options.yes:
            num = Counter(row["kind"] for row in person_rows(reader, folder, person))
            output.say(", ".join(f"{kind} {count}" for kind, count in num.items()))
            output.say("nothing is removed yet: repeat the command with --yes")
            output.finish({"found": num})
            return
        # First too: if the command is cut off, the person still has the name by which it is repeated.
        num_talks = remove_talks(folder / FOLDER, person.rater_id)
        done = dict(do_in(options, Chore("delete", asdict(person))))
        done["conversations"] = num_talks + remove_talks(folder / FOLDER, done["id"])
        counts = (f"{count} of {name}" for name, count in done.items() if count and name != "id")
        output.say(f"removed: {', '.join(counts) or 'nothing but the name'}")
        output.say(f"they remain without a name, as rater {done['id']}, which the audit log refers to")
        output.finish({"deleted": done})
