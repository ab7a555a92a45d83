"""A script with its fixes: applied while it runs, written into its source, and kept from coming undone."""
