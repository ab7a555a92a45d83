"""The virtual machine's memory: PyTorch's caching allocator, modelled, and the host's pinned pages."""
