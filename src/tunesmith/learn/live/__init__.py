"""The live loop: a policy trained on votes while they come in."""
