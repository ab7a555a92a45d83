"""A user's program, run as it is: as `__main__`, with its children, its lines and its steps.

What records on a real GPU and what stands in for one both begin here.
"""
