"""What programs use in production to keep the host ahead of the device: torch alone, nothing of the other rooms."""
