"""Fixes written into a program's source: the smallest change at the lines that the plan names, proven by running it."""
