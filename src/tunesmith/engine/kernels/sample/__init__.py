"""Sampling of one token for each row of logits."""
