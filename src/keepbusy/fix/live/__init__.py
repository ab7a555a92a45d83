"""Fixes applied to a program while it runs: only what gives the same result, each counted, each with a switch."""
