"""RMSNorm with the residual addition before it: the definition in torch, and the same in C++ and in Triton."""
