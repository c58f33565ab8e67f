"""Tunesmith: from human votes to a better language model.

`from tunesmith import train` is the whole public API for training from Python; see `tunesmith.train`.
Importing this package loads nothing heavy.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> object:
    """Load `tunesmith.train` on first use, so that `import tunesmith` stays light (PEP 562)."""
    if name == "train":
        import importlib

        return importlib.import_module("tunesmith.train")
    raise AttributeError(f"module 'tunesmith' has no attribute {name!r}; it offers {', '.join(__all__)}")
