"""Collects: files of prompts and votes, their database, statistics of votes, and the web pages."""
