"""Before against after: the same prompts and seeds for two models, and statistics that say how sure the answer is."""
