"""Run folders on disk: metrics, samples, checkpoints, locks, listing; progress bars and trackers."""
