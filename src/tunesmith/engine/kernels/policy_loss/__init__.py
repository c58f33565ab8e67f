"""The loss of a policy: ratio, clips, KL and entropy terms, statistics and gradient."""
