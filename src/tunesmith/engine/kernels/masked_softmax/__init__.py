"""Scale, mask by indices and softmax in one pass."""
