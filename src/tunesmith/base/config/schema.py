"""The table of algorithms, which `tunesmith train`, estimates, plans, diagnosis and pages iterate over.

To add an algorithm, write its code (`trainers/`) and a file as those in `algorithms/`: a section class with its
settings, a recipe class whose docstring is the command's help, and a `Spec`. Then add it to the tuple below; from
another package, name it as an entry point instead:

    [project.entry-points."tunesmith.algorithms"]
    mine = "mine:SPEC"

Loading, `--help`, flags, the reference page and suggestions for misspelt keys read the rest from the classes.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from tunesmith.base.config.algorithms import best_of_n, distill, dpo, grpo, online_dpo, ppo, reward, sft
from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.spec import Spec
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.core.log import get_logger

_LIVE = "live"

_log = get_logger(__name__)


class Specs(Mapping[str, Spec]):
    """Specs by the name of the algorithm.

    Those of other packages are loaded when the table is first read, because their modules may import any of ours.
    """

    def __init__(self, *own: Spec) -> None:
        self._specs = {spec.name: spec for spec in own}
        self._is_complete = False

    def add(self, spec: Spec) -> None:
        """Add an algorithm, for this process.

        Raises:
            ConfigError: another one has its name.
        """
        if spec.name == _LIVE or self._specs.setdefault(spec.name, spec) is not spec:
            raise ConfigError(f"there is an algorithm {spec.name!r} already; give yours another name")

    def _read(self) -> Mapping[str, Spec]:
        if not self._is_complete:
            self._is_complete = True
            for point in entry_points(group="tunesmith.algorithms"):
                try:
                    spec = point.load()
                except Exception as error:  # noqa: BLE001 - code of another package, without which ours still work
                    _log.warning("the algorithm %s (%s) cannot be loaded: %r", point.name, point.value, error)
                    continue
                self.add(spec)
        return self._specs

    def __getitem__(self, name: str) -> Spec:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class Recipes(Mapping[str, type[Recipe]]):
    """The recipe classes of `SPECS`, and that of the live loop, by name."""

    def __getitem__(self, name: str) -> type[Recipe]:
        return LiveRecipe if name == _LIVE else SPECS[name].recipe

    def __iter__(self) -> Iterator[str]:
        return iter([*SPECS, _LIVE])

    def __len__(self) -> int:
        return len(SPECS) + 1


SPECS = Specs(*(module.SPEC for module in (sft, reward, dpo, online_dpo, ppo, grpo, best_of_n, distill)))
"""The algorithms of `tunesmith train`."""

RECIPES = Recipes()
"""Schema of each algorithm and of the live loop, by its name on the command line."""


def trains_reward_model(algorithm: object) -> bool:
    """True if runs of the algorithm of this name end with a reward model, which writes no text."""
    spec = SPECS.get(str(algorithm))
    return spec is not None and spec.trains == "reward model"
