"""Learns: losses, rewards, comparison of models, the trainers, and the live loop."""
