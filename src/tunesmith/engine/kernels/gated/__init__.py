"""The element-wise operations of a decoder: gated activations and soft-capping, in torch, in C++ and in Triton."""
