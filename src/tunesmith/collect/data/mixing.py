"""Pairs of several sources: read under their names, drawn as often as their weights say, and those only evaluated on.

All of it is a function of seed, source and prompt, so that a resumed run has the same pairs, and a source that is added
or left out changes nothing of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunesmith.base.config.sections import PairsSource
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Pair, Ranking
from tunesmith.collect.data.collate import EncodedPreference, as_pairs
from tunesmith.collect.data.rows import BadRows
from tunesmith.collect.data.split import prompt_key

Load = Callable[[str, BadRows], list[Pair | Ranking]]
Encode = Callable[[list[Pair | Ranking], BadRows], Sequence[EncodedPreference]]

_log = get_logger(__name__)


def named_rows(sources: Sequence[PairsSource], load: Load, bad: BadRows, seed: int) -> list[Pair | Ranking]:
    """The rows of all `sources`, one source after another. The id of a row begins with its source: `hh/votes.jsonl:7`.

    Raises:
        DataError: a source cannot be read, or has bad rows that are not skipped.
    """
    rows = [
        replace(row, prompt=replace(row.prompt, id=f"{one.name}/{row.prompt.id}"))
        for one in sources
        for row in _at_most(one, load(one.source, bad), seed)
    ]
    bad.opened_all(", ".join(one.source for one in sources))
    return rows


def source_of(row_id: str) -> str:
    """The name of the source of a row of `named_rows`, by the row's id.

    >>> source_of("hh/votes.jsonl:7")
    'hh'
    """
    return row_id.partition("/")[0]


def _at_most(source: PairsSource, rows: list[Pair | Ranking], seed: int) -> list[Pair | Ranking]:
    """The rows of the first prompts in an order that `seed` draws, as many as `max_pairs` allows, in their order."""
    if source.max_pairs is None or len(rows) <= source.max_pairs:
        return rows
    drawn = sorted(range(len(rows)), key=lambda place: (derive(seed, "source", prompt_key(rows[place])), place))
    return [rows[place] for place in sorted(drawn[: source.max_pairs])]


@dataclass(frozen=True, slots=True)
class Mixed:
    """Pairs to train on in one epoch. `repeats` says of each which copy it is: 0 is the first."""

    items: Sequence[EncodedPreference]
    repeats: Sequence[int]


def mixed(
    items: Sequence[EncodedPreference], sources: Sequence[PairsSource], prompt_of: Mapping[str, str], seed: int
) -> Mixed:
    """The items of `named_rows`, each as often as its source's weight says: 2.5 is twice, and once more for the half of
    the prompts that `seed` draws. `prompt_of` is the key of an item's prompt by its id.

    Raises:
        DataError: the weights are so small that no pair is drawn.
    """
    weights = {one.name: one.weight for one in sources}
    found: list[EncodedPreference] = []
    repeats: list[int] = []
    for item in items:
        name = source_of(item.prompt_id)
        whole, part = divmod(weights[name], 1.0)
        is_drawn = derive(seed, "mix", prompt_of[item.prompt_id]) < part * 2**63
        for repeat in range(int(whole) + is_drawn):
            found.append(item)
            repeats.append(repeat)
    if items and not found:
        raise DataError(
            f"no pairs are left to train on: of {len(items)} the weights of pairs.sources draw none; raise them"
        )
    left = {source_of(item.prompt_id) for item in found}
    for name in dict.fromkeys(source_of(item.prompt_id) for item in items):
        if name not in left:
            _log.warning("the weight %g of the source %s draws none of its pairs to train on", weights[name], name)
    return Mixed(found, repeats)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Encoded pairs of sources that are only evaluated on, and the key of the prompt of each by its id."""

    items: Sequence[EncodedPreference] = ()
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])


def elsewhere(
    sources: Sequence[PairsSource],
    load: Load,
    encode: Encode,
    trained: Sequence[Pair | Ranking],
    *,
    skips: bool,
    seed: int,
) -> Elsewhere:
    """The pairs of `sources`, without those of prompts that `trained` has.

    Raises:
        DataError: a source cannot be read, has bad rows and not `skips` them, or has no decided pair of a prompt that
            is not trained on.
    """
    keys = {prompt_key(row) for row in trained} if sources else set[str]()
    items: list[EncodedPreference] = []
    prompts: dict[str, str] = {}
    for one in sources:
        bad = BadRows(skip=skips)
        rows = named_rows([one], load, bad, seed)
        unseen = [row for row in rows if prompt_key(row) not in keys]
        if not unseen:
            raise DataError(
                f"{one.source}: all prompts are trained on, so that nothing is left to evaluate on; leave "
                f"{one.name} out of pairs.heldout_sources, or name another source"
            )
        if len(unseen) < len(rows):
            _log.info("%s: %d rows are left out, whose prompts are trained on", one.name, len(rows) - len(unseen))
        encoded = as_pairs(encode(unseen, bad))
        bad.check()
        bad.finish()
        if not any(item.decided for item in encoded):
            raise DataError(
                f"{one.source}: all pairs left to evaluate on are ties, of which none can be right; leave {one.name} "
                "out of pairs.heldout_sources, or name another source"
            )
        items += encoded
        prompts |= {row.prompt.id: prompt_key(row) for row in unseen}
    return Elsewhere(items, prompts)
