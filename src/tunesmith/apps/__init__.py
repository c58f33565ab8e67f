"""Applications: the commands, and workflows that combine several trainers and engines."""
