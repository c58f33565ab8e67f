"""Linear maps over weights in 8 bits, in C++ or torch."""
