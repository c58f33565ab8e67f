"""Measurement and diagnosis of a run: resources of each step, diagnosis, hangs, profiles."""
