"""Environments and tools: what a policy talks to over several turns, and the trajectories that come of it."""
