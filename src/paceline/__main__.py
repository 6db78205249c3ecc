"""``python -m paceline``, the same as ``paceline``."""

import sys

from .cli import main

sys.exit(main())
