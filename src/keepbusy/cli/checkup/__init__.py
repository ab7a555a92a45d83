"""What `keepbusy doctor` says of a machine: its settings, its links, and its device file."""
