"""Rollout workers: processes that draw leases of a request, with the same tokens whoever draws them."""
