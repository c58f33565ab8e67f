"""Judges: models that compare or grade answers by a rubric, over HTTP or by our own engine. Answers and costs are on
disk.
"""
