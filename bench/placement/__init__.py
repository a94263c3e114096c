"""Placement benchmark: the public openb trace, the published policies, and ours.

`fleet`, `typical`, `policies`, `rigbook` and `index` are pure: no files, no clock, no own randomness.
`openb` reads the trace, `inflation` runs the paper's method, `__main__` prints.
"""
