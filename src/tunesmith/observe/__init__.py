"""Measures and predicts: profiles and diagnosis of a run, plans for other hardware, reports."""
