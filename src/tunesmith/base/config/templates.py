"""Texts with names in braces, as of `str.format`, in which a recipe says how texts of a row are put together."""

import string
from collections.abc import Mapping


def names_in(template: str) -> tuple[str, ...]:
    """The names in braces, in their order; `{{` and `}}` are braces.

    Raises ValueError for a brace that is not closed, for one without a name, and for anything but a name in one.
    """
    names: list[str] = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if form or conversion or not name.isidentifier():
            raise ValueError(f"{{{name}}} is no name of a text; write a name alone, and {{{{ and }}}} for braces")
        names.append(name)
    return tuple(names)


def filled(template: str, texts: Mapping[str, str]) -> str:
    """`template` with the text of each name, in which braces mean nothing. Raises KeyError for a name without one.

    >>> filled("{reason}: {prompt}", {"reason": "shorter", "prompt": "The {film}"})
    'shorter: The {film}'
    """
    parts = string.Formatter().parse(template)
    return "".join(literal + ("" if name is None else texts[name]) for literal, name, _, _ in parts)


def checked_template(template: str, needed: str, known: tuple[str, ...] = ()) -> str:
    """`template` as it is. Raises ValueError, with the remedy, if it is malformed, lacks the name `needed`, or has one
    that is not `known`, where some are.
    """
    try:
        names = names_in(template)
    except ValueError as error:
        raise ValueError(f"{template!r} is no template: {error}") from error
    if needed not in names:
        raise ValueError(f"{template!r} has no {{{needed}}}, which is what is answered; add it")
    unknown = [name for name in names if known and name not in known]
    if unknown:
        listed = ", ".join(f"{{{name}}}" for name in known)
        raise ValueError(f"{template!r} has {{{unknown[0]}}}, of which there is no text; there are {listed}")
    return template
