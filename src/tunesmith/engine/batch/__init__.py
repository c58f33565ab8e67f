"""Frozen records that cross folder boundaries with tensors or token ids in them."""
