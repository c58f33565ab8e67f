"""Tools that a policy calls while it is trained: Python functions of text to text, each with a schema."""
