"""Benchmarks of engine, steps, updates and kernels, run in a clone as `python -m benchmarks.<name>`."""
