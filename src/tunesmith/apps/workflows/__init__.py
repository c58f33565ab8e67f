"""Trainers, engines and evaluation put to one purpose: the demo, comparisons."""
