"""What the source of a program shows: what may be read later, moved earlier, or left to the last turn."""
