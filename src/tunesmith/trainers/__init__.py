"""Trainers. Each file holds a whole algorithm in four parts: `State`, `build`, `step` and `run`."""
