"""A native thread that measures the process from outside of Python."""
