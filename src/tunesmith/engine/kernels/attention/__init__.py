"""Causal attention over a paged cache and over packed sequences: records, the definition in torch, the same in C++."""
