"""Generalised advantage estimation."""
