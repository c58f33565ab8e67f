"""What a run writes while it works: its folder, metrics, samples, progress and trackers."""
