"""`tunesmith bench`: our engine, steps, updates and kernels beside those of others, measured in turns."""
