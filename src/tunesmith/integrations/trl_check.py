"""The parts of a script for TRL that become faster by another import, from its text, which is never run."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.config.yaml_text import is_mapping, parse, read
from tunesmith.base.core.errors import InputError
from tunesmith.integrations.trl_support import MOVED, OVERRIDES, REMOVED, RUN_TIME, TRAINERS, reasons

_OURS = "tunesmith.integrations.trl"
_PARSERS = ("TrlParser", "HfArgumentParser")
_REFERENCES = (ast.Name, ast.Attribute)
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class Left:
    """Work of a trainer that TRL does because of `setting`; if not `is_certain`, only the running script knows."""

    works: tuple[str, ...]
    setting: str
    where: str
    why: str
    is_certain: bool


@dataclass(frozen=True, slots=True)
class Use:
    """A trainer in the script: the work that becomes faster, and what is or may be left to TRL."""

    trainer: str
    where: str
    faster: tuple[str, ...]
    left: tuple[Left, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Text in the script, and the lines to put in its place."""

    where: str
    old: str
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """A name in the script that TRL 1.16 lacks."""

    name: str
    where: str
    last_version: str
    instead: str


@dataclass(frozen=True, slots=True)
class Report:
    """The findings. `newest_version`: the newest TRL that has all names of the script, None if 1.16 has them."""

    uses: tuple[Use, ...]
    changes: tuple[Change, ...]
    gone: tuple[Gone, ...]
    notes: tuple[str, ...]
    newest_version: str | None


def check(script: Path, config: Path | None = None) -> Report:
    """The report on `script`; `config` is the YAML file that it reads.

    Raises:
        InputError: a file that cannot be read, is no Python or no YAML, or a script without a trainer that we have.
    """
    try:
        found = _Script(ast.parse(script.read_text(encoding="utf-8")), script.name)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:  # ValueError: a zero byte, or not UTF-8
        raise InputError(f"{script} cannot be read as Python: {error}; give the training script") from None
    if config is not None:
        document = parse(read(config), str(config)).data
        if not is_mapping(document):
            raise InputError(f"{config} has no keys and values; give the YAML file that the script reads")
        found.settings += [
            _Setting("", name, value, f"{name}: {value}", config.name) for name, value in document.items()
        ]
    uses = tuple(found.use(trainer, where) for trainer, where in found.trainers().items())
    if not uses:
        raise InputError(f"{script} uses none of the trainers that Tunesmith makes faster: {', '.join(TRAINERS)}")
    gone = tuple(found.gone())
    newest = min((one.last_version for one in gone), key=lambda text: list(map(int, text.split("."))), default=None)
    return Report(uses, tuple(found.changes()), gone, (*found.notes(is_given=config is not None), *RUN_TIME), newest)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A keyword, attribute or key; `owner` is the class that it is given to, empty for a key, "." for an attribute."""

    owner: str
    name: str
    value: object
    text: str
    where: str


class _Script:
    """The parts of a script that have to do with TRL; `_names` maps names in it to names of TRL."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self._file = file
        found = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
        self._nodes = sorted(found, key=lambda node: node.lineno)
        self._imports = [node for node in self._nodes if isinstance(node, ast.ImportFrom) and _is_known(node.module)]
        names = [(node.module, alias) for node in self._imports for alias in node.names]
        self._names = {alias.asname or alias.name: alias.name for _, alias in names}
        self._ours = {alias.name for module, alias in names if module == _OURS}
        plain = [alias for node in self._nodes if isinstance(node, ast.Import) for alias in node.names]
        modules = {alias.asname or "trl" for alias in plain if _is_known(alias.name)}
        reached = [node for node in self._nodes if isinstance(node, ast.Attribute)]
        self._reached = [node for node in reached if ast.unparse(node).partition(".")[0] in modules]
        self._names |= {ast.unparse(node): node.attr for node in self._reached}
        self._left = [found for node in self._nodes if isinstance(node, ast.ClassDef) for found in self._methods(node)]
        self._calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        targets = [
            (target, node.value) for node in self._nodes if isinstance(node, ast.Assign) for target in node.targets
        ]
        counts = Counter(ast.unparse(target) for target, _ in targets)
        texts = [(ast.unparse(target), value) for target, value in targets]
        self._values = {text: value for text, value in texts if counts[text] == 1}
        attributes = [(target, value) for target, value in targets if isinstance(target, ast.Attribute)]
        self.settings = [self._setting(".", target.attr, value) for target, value in attributes]
        self.settings += [found for call in self._calls for found in self._given(call)]

    def trainers(self) -> dict[str, str]:
        """Each trainer of ours that the script has, and its first place."""
        return {name: where for name, where in self._first().items() if name in TRAINERS}

    def use(self, trainer: str, where: str) -> Use:
        """The parts of `trainer` that become faster."""
        owners = ("", ".", trainer, trainer.replace("Trainer", "Config"))
        left = [one for owner, one in self._left if owner == trainer]
        for one in self.settings:
            for reason in reasons(trainer, one.name, one.value) if one.owner in owners else ():
                works = tuple(work for work in reason.works if work in TRAINERS[trainer])
                left.append(Left(works, one.text, one.where, reason.why, one.value is not _UNKNOWN))
        slow = {work for one in left if one.is_certain for work in one.works}
        return Use(trainer, where, tuple(work for work in TRAINERS[trainer] if work not in slow), tuple(left))

    def changes(self) -> Iterator[Change]:
        """The imports to change, and names that are reached through the module."""
        for node in (one for one in self._imports if one.module != _OURS):
            moved = [alias for alias in node.names if alias.name in MOVED]
            kept = [alias for alias in node.names if alias.name not in MOVED]
            parts = [ast.ImportFrom(node.module, kept, 0)] if kept else []
            if moved:
                new = map(ast.unparse, [*parts, ast.ImportFrom(_OURS, moved, 0)])
                yield Change(self._at(node), ast.unparse(node), tuple(new))
        for node in self._reached:
            if node.attr in MOVED:
                new = (f"from {_OURS} import {node.attr}", node.attr)
                yield Change(self._at(node), ast.unparse(node), new)

    def gone(self) -> Iterator[Gone]:
        """Names of the script that TRL 1.16 lacks."""
        owners = {"", *self._names.values()}
        given = {one.name: one.where for one in reversed(self.settings) if one.owner in owners}
        found = {name: where for name, where in (given | self._first()).items() if name not in self._ours}
        return (Gone(name, found[name], *REMOVED[name]) for name in REMOVED if name in found)

    def notes(self, *, is_given: bool) -> Iterator[str]:
        """Limits of the report."""
        for call in self._calls:
            name = self._name(call.func)
            if name in _PARSERS and not is_given:
                yield f"{self._at(call)}: {name} reads settings from a file or from flags; give the file as --config"
            if name.endswith(("Trainer", "Config")) and any(word.arg is None for word in call.keywords):
                yield f"{self._at(call)}: {name} takes ** arguments, which were not looked into"
        others = {name for name in self._names.values() if name.endswith("Trainer") and name not in TRAINERS}
        yield from (f"{name} stays TRL's: Tunesmith has none" for name in sorted(others))

    def _first(self) -> dict[str, str]:
        """Each name of TRL in the script, and its first place."""
        known = [(self._names.get(ast.unparse(node)), node) for node in self._nodes if isinstance(node, _REFERENCES)]
        imported = [(alias.name, node) for node in self._imports for alias in node.names]
        ordered = sorted([*known, *imported], key=lambda pair: -pair[1].lineno)
        return {name: self._at(node) for name, node in ordered if name}

    def _methods(self, node: ast.ClassDef) -> Iterator[tuple[str, Left]]:
        """Take a subclass for its base in TRL; yield the trainer and the work of each method that it has for itself."""
        base = next((name for one in node.bases if (name := self._names.get(ast.unparse(one)))), None)
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in OVERRIDES]
        if base is not None:
            self._names[node.name] = base
            why = f"{node.name} has its own; where it calls super(), Tunesmith's runs"
            for method in methods:
                yield base, Left((OVERRIDES[method.name],), f"{method.name}()", self._at(method), why, True)

    def _name(self, node: ast.expr) -> str:
        """The name in TRL of what `node` refers to; else its text."""
        text = ast.unparse(node)
        return self._names.get(text, text)

    def _given(self, call: ast.Call) -> Iterator[_Setting]:
        owner = self._name(call.func)
        if call.args and owner in TRAINERS:
            yield self._setting(owner, "model", call.args[0])
        if owner in self._names.values():
            yield from (self._setting(owner, word.arg, word.value) for word in call.keywords if word.arg)

    def _setting(self, owner: str, name: str, node: ast.expr) -> _Setting:
        return _Setting(owner, name, self._value(node), f"{name}={ast.unparse(node)}", self._at(node))

    def _value(self, node: ast.expr) -> object:
        """A literal, or the class that makes an object; a variable that is assigned once has the value assigned."""
        node = self._values.get(ast.unparse(node), node)
        if isinstance(node, ast.Call):
            parts = ast.unparse(node.func).split(".")
            return next((part for part in parts if part[:1].isupper()), _UNKNOWN)
        try:
            return ast.literal_eval(node)
        except (TypeError, ValueError):
            return _UNKNOWN

    def _at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self._file}:{node.lineno}"


def _is_known(module: str | None) -> bool:
    return module == _OURS or (module or "").partition(".")[0] == "trl"
