"""`python -m asr` is the command `asr`."""

import sys

from asr.cli.main import main

sys.exit(main())
