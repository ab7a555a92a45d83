"""`python -m keepbusy` is `keepbusy`."""

import sys

from keepbusy.cli import main

sys.exit(main())
