"""Scores of completions: Python functions, built-in rewards, reward models, and the simulated rater."""
