"""Statistics of votes and of comparisons: confidence intervals, tests, and strengths from comparisons in pairs."""
