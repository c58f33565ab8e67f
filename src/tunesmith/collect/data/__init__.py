"""Prompts and preference pairs from files and lists: read strictly, split by prompt, padded into tensors."""
