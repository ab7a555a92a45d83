"""What things cost: device files, laws of kernels, links between GPUs."""
