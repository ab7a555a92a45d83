"""A script with its fixes: written into its source, in memory or on disk, and kept from coming undone."""
