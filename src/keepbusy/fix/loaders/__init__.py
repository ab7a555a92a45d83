"""Fixes of what feeds the GPU: who prepares the samples of a data set."""
