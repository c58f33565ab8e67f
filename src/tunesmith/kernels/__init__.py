"""Kernels: one folder for each operation, with its definition in torch and the same in C++, compiled at first use."""
