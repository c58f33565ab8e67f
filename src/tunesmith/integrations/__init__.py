"""Other libraries on top of Tunesmith."""
