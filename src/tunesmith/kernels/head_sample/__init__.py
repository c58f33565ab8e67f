"""The output layer and the draw behind it in one: an experiment in Triton, which the GPU benchmark alone calls."""
