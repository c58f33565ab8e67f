"""Computes: kernels, packed batches, several processes, models, and the rollout engines."""
