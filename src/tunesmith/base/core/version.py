"""The version of the package; pyproject.toml has it too."""

__version__ = "0.2.0"
