"""The pages and the HTTP interface of `tunesmith serve`. The only folder that imports FastAPI; it never loads torch.

One middleware (`guard.py`) checks every request and denies what the table of routes (`access.py`) does not allow.
"""
