"""Where the time of a run goes: resources of each step, diagnosis, hangs, profiles."""
