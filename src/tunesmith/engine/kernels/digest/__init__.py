"""Numbers that say which bytes tensors hold."""
