"""The rollout engine for GPUs. On a CPU the same code runs without CUDA graphs."""
