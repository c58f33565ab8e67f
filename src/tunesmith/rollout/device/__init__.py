"""The rollout engine for GPUs. It is tested on CPUs and in the Triton interpreter, and has not run on a GPU yet."""
