"""The backward pass of packed attention in C++; `kernels.attention` is its interface."""
