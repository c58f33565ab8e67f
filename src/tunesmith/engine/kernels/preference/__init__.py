"""Selection by votes between two outputs, and the update of weights by what was selected, in one pass."""
