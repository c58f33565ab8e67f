"""Linear maps in bfloat16 over weights that are packed once: fewer rows, less waiting, and the bits of torch."""
