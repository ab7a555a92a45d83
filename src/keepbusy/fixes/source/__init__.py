"""Fixes written into a program's source with LibCST: the smallest change at the lines that the plan names."""
