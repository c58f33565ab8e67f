"""What the domain is made of, as text and numbers: prompts, completions, pairs, votes. No torch here."""
