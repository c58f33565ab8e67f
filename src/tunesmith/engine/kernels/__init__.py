"""Kernels: one folder for each operation, its definition in torch and the same in C++ or Triton, built when used."""
