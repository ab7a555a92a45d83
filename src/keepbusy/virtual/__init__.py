"""A program with no GPU -> `Timeline`: the device, its clock, its costs, its memory."""
