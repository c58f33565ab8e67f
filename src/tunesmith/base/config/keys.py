"""Keys of a recipe as the schema has them: dotted path, type, default, description; suggestions for misspelt ones."""

import difflib
import itertools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tunesmith.base.config.sections import Section


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a recipe: `path` (`reward.0.weight` for the first of a list), its type and default in words."""

    path: str
    type: str
    default: str
    description: str


def section_of(annotation: object) -> type[Section] | None:
    """The section that `annotation` names, or None if it is a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def item_of(annotation: object) -> object | None:
    """X of `tuple[X, ...]`, and None for every other annotation."""
    arguments = get_args(annotation)
    return arguments[0] if get_origin(annotation) is tuple and arguments[1:] == (Ellipsis,) else None


def holds_text(annotation: object) -> bool:
    """True if a command-line value is taken literally: the field is text or a choice of texts."""
    if annotation is str:
        return True
    return get_origin(annotation) is Literal and all(isinstance(choice, str) for choice in get_args(annotation))


def takes_truth(annotation: object) -> bool:
    """True if `true` and `false` are values of the field."""
    return annotation is bool or get_origin(annotation) is dict or any(takes_truth(a) for a in get_args(annotation))


def leaves(schema: type[Section], prefix: str = "") -> Iterator[Key]:
    """All leaf keys of `schema`, in the order of the schema."""
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        item = section_of(item_of(field.annotation))
        nested = section_of(field.annotation) or item
        if nested is not None:
            yield from leaves(nested, f"{path}.0." if item else f"{path}.")
            continue
        default = "required" if field.is_required() else _in_words(field.get_default(call_default_factory=True))
        yield Key(path, type_in_words(field), default, _description(schema, name))


def _description(schema: type[Section], name: str) -> str:
    """Help text of a field in one line: its own, or that of the nearest base class that has one."""
    bases = [base for base in schema.__mro__ if issubclass(base, Section) and name in base.model_fields]
    return next((" ".join(text.split()) for base in bases if (text := base.model_fields[name].description)), "")


def type_in_words(field: FieldInfo) -> str:
    """The type and bounds of a field as a user reads them: `int >= 1`, `raw | log_odds`, `float > 0 or null`."""
    return _annotation_in_words(field.annotation, field.metadata)


def _annotation_in_words(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        # pydantic keeps the bounds of `Annotated[...]` in a FieldInfo.
        inner = [item.metadata if isinstance(item, FieldInfo) else [item] for item in annotation.__metadata__]
        return _annotation_in_words(arguments[0], list(itertools.chain.from_iterable(inner)))
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        words = [_annotation_in_words(argument, metadata) for argument in arguments if argument is not type(None)]
        return " or ".join([*words, "null"] if type(None) in arguments else words)
    if origin is tuple:
        items = [_annotation_in_words(argument, []) for argument in arguments if argument is not Ellipsis]
        return f"list of ({items[0]})" if arguments[-1] is Ellipsis else f"[{', '.join(items)}]"
    if origin is dict:
        return "mapping"
    name = {str: "text", bool: "true | false"}.get(annotation, getattr(annotation, "__name__", str(annotation)))
    bounds = [
        f"{sign} {getattr(bound, attribute):g}"
        for bound in metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(bound, attribute)
    ]
    return " ".join([name, " and ".join(bounds)]).strip()


def _in_words(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return str(list(default))  # pyright: ignore[reportUnknownArgumentType]
    return str(default).replace("\n", "\\n") if default != "" else '""'


_CUTOFF = 0.6
_END_CUTOFF = 0.75

SYNONYMS = {
    "lr": "learning_rate",
    "beta": "kl.coef",
    "kl_coef": "kl.coef",
    "init_kl_coef": "kl.coef",
    "cliprange": "clip_low",
    "cliprange_value": "value_clip",
    "vf_coef": "value_coef",
    "num_ppo_epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "epochs": "num_epochs",
    "num_mini_batches": "num_minibatches",
    "per_device_train_batch_size": "micro_batch_size",
    "response_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "num_generations": "completions_per_prompt",
    "max_steps": "run.steps",
    "output_dir": "run.dir",
    "model_name_or_path": "model.name",
    "gae_lambda": "lam",
}
"""Names that other packages give to a key, and the end of its path here."""


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The one of `allowed` that `given` was probably meant to be, or None.

    For dotted paths: a known synonym or an equal last part comes first, then a like path of as many parts, then a like
    last part, then any like path.
    """
    options = list(allowed)
    last = given.rsplit(".", 1)[-1].lower().replace("-", "_")
    ending = SYNONYMS.get(last, last)
    same_end = [option for option in options if option == ending or option.endswith("." + ending)]
    if same_end:
        return max(same_end, key=lambda option: _likeness(option, given))
    as_deep = [option for option in options if option.count(".") == given.count(".")]
    if by_depth := difflib.get_close_matches(given, as_deep, n=1, cutoff=_END_CUTOFF):
        return by_depth[0]
    by_path = difflib.get_close_matches(given, options, n=1, cutoff=_CUTOFF)
    by_end = difflib.get_close_matches(last, {option.rsplit(".", 1)[-1] for option in options}, n=1, cutoff=_END_CUTOFF)
    if by_end:
        ends = [option for option in options if option.rsplit(".", 1)[-1] == by_end[0]]
        return max(ends, key=lambda option: _likeness(option, given))
    return by_path[0] if by_path else None


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no name is near."""
    found = nearest(given, allowed)
    return f"; did you mean {found}?" if found else ""


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
