"""The pages and the HTTP interface of `tunesmith serve`. The only folder that imports FastAPI; it never loads torch.

One middleware (`guard.py`) stands before every route and denies what the table of routes (`access.py`) does not allow.
"""
