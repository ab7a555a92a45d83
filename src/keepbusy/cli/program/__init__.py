"""The user's program where a verb runs it: its ranks, the process that watches over it, what is drawn meanwhile."""
