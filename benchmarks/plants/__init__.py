"""Healthy runs, and what `benchmarks.planted` plants in them from outside.

`causes` is the table, `files` makes models and data, `rewards` has the reward functions. `server.py` and `spin.py` are
programs that run beside a training, `trackers/` has a package that takes the place of a tracker's.
"""
