"""`python -m autograder`: build and check labs, lay out the nbgrader course, grade."""

import sys

from autograder.cli import main

sys.exit(main())
