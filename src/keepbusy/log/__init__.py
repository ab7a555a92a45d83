"""A log of what a program asks of its GPU: every call of the CUDA driver, with the Python stack that it came from."""
