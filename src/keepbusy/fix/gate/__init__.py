"""How often a program waits for the GPU, held against how often it may: while it runs, and in a run that is kept."""
