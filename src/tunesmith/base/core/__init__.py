"""Errors, tracing, logging and seeds, from the standard library alone; every other folder may import this one."""
