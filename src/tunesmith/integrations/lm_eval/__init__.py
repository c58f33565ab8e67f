"""EleutherAI's lm-eval with our engine as its model."""
