"""Log-prob of a token that was chosen and entropy of the distribution it came from, in torch and in C++."""
