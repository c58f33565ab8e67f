"""Plans of a training on any hardware: memory, parallelism, time and cost, from a config alone; nothing is loaded."""
