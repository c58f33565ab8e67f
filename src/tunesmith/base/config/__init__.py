"""Recipes: one pydantic schema, read from YAML and the command line, the origin of each value kept. No torch here."""
