"""Where PyTorch meets the virtual machine."""
