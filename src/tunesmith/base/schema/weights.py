"""Names of the forms that weights are multiplied in, for recipes, flags, servers and engines."""

from typing import Literal

Weights = Literal["model", "int8"]
"""`model`: in the model's dtype; `int8`: rounded to 8 bits, which is faster on a CPU, and other numbers."""
