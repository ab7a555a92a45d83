"""The loops of a program: how often they iterate, where the program is, and the tree of its run."""
