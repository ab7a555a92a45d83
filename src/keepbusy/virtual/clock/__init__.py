"""The virtual machine's time: streams, copy engines and host threads."""
