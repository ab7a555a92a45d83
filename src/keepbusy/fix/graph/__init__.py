"""Modules whose forward and backward pass is one launch each, while the program runs as it is written."""
