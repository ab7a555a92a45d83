"""A run for other programs."""
