"""What a machine can do by itself, whatever runs on it: its GPU, and the links between ranks."""
