"""What several processes share: reductions and checkpoints. On one process the reductions are the identity."""
