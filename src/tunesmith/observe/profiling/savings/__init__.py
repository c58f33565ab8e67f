"""Models of saving: the seconds of a step that the advice of a rule would save, from the facts of a run.

Each follows Amdahl: it takes the stages that the advice changes, and says by what factor they shrink. A model returns
None where the facts do not show its cause. Constants that are no facts were measured on two CPU cores.
"""
