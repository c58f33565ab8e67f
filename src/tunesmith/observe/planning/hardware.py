"""Rates of accelerators and links: built-in tables of makers' figures, or a YAML file with the same fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.yaml_text import is_mapping, parse, read
from tunesmith.base.core.errors import InputError

GB = 1e9


@dataclass(frozen=True, slots=True)
class Hardware:
    """An accelerator, or a core of a processor; rates are the maker's peaks.

    `flop_per_s` is of dense 16-bit matrix products, `link_gb_per_s` of an accelerator to others of its node in one
    direction, `network_gb_per_s` to another node. `reaches` are the shares of the peaks that a training gets: of matrix
    products, of memory, of links. `layer_us` is the time of a layer's kernels that does not depend on their size,
    `collective_us` that of one exchange between accelerators, `decode_us` that of a decoding step outside of the
    layers, to which each of its rows adds `row_us`. `load_gb_per_s` is the rate at which an engine takes new
    weights. `price_per_hour` is 0 where it is not known.
    """

    name: str
    flop_per_s: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float
    network_gb_per_s: float
    layer_us: float = 20.0
    collective_us: float = 15.0
    decode_us: float = 0.0
    row_us: float = 0.0
    load_gb_per_s: float = 5.0
    matmul_reach: float = 0.45
    memory_reach: float = 0.7
    link_reach: float = 0.8
    price_per_hour: float = 0.0
    is_cpu: bool = False

    @property
    def matmul_rate(self) -> float:
        """Floating-point operations a second of the matrix products of a pass."""
        return self.flop_per_s * self.matmul_reach

    @property
    def memory_rate(self) -> float:
        """Bytes a second from memory."""
        return self.memory_gb_per_s * GB * self.memory_reach

    def link_rate(self, *, across_nodes: bool) -> float:
        """Bytes a second of a link."""
        return (self.network_gb_per_s if across_nodes else self.link_gb_per_s) * GB * self.link_reach


_CORE = Hardware(
    *("cpu", 50e9, 4, 21, 5, 1),
    layer_us=50,
    collective_us=100,
    decode_us=400,
    row_us=30,
    load_gb_per_s=2,
    matmul_reach=0.6,
    is_cpu=True,
)
"""The costs of decoding are those of `observe/profiling/savings`, measured on two cores."""

HARDWARE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("h100", 989e12, 80, 3350, 450, 50),
        Hardware("a100", 312e12, 80, 2039, 300, 25),
        Hardware("v100", 125e12, 32, 900, 150, 12.5),
        _CORE,
    )
}
"""SXM modules with NVLink and a network of 400, 200 and 100 Gbit/s each; `cpu` is one core of a server."""


def read_hardware(given: str) -> Hardware:
    """The hardware named `given`, or of the YAML file `given`, whose field `base` names the one that it changes.

    Raises:
        InputError: no such name, no such field, or a value that is no positive number.
    """
    if given in HARDWARE:
        return HARDWARE[given]
    path = Path(given).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(
            f"--hardware is {given}; give {', '.join(HARDWARE)}, or a .yaml file{did_you_mean(given, HARDWARE)}"
        )
    values = parse(read(path), str(path)).data
    if not is_mapping(values):
        raise InputError(f"{path} holds no fields; give some of {', '.join(_NUMBERS)}")
    base = str(values.get("base", "h100"))
    if base not in HARDWARE:
        raise InputError(f"{path}: base is {base}; it must be one of {', '.join(HARDWARE)}")
    changes = {str(key): value for key, value in values.items() if key != "base"}
    return replace(HARDWARE[base], name=str(changes.pop("name", path.stem)), **_numbers(changes, path))


_NUMBERS = tuple(field.name for field in fields(Hardware) if field.name != "name")


def _numbers(values: Mapping[str, object], path: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in values.items():
        if key not in _NUMBERS:
            hint = did_you_mean(key, _NUMBERS)
            raise InputError(f"{path}: there is no field {key}{hint}; fields are base, name, {', '.join(_NUMBERS)}")
        high = 1.0 if key.endswith("_reach") else float("inf")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(value, int | float) or not is_number or not 0 < value <= high:
            raise InputError(f"{path}: {key} is {value}; it must be a number above 0" + (", at most 1" * (high == 1)))
        found[key] = float(value)
    return found
