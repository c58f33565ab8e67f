"""Sums over the sequences of a packed batch."""
