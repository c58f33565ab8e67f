"""Models and tokenizers: how they are found, loaded, scored, trained and written. Owns transformers, with rollout."""
