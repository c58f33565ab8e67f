"""Records of the domain as text and numbers: prompts, pairs, rankings, votes, findings. No torch."""
