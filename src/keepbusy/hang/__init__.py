"""A job that hangs, from what PyTorch's flight recorder wrote down of its collectives: who waits, and for whom."""
