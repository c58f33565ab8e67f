"""Trainers: a file for each algorithm, the loop of a run, and what a run needs around its steps."""
