"""`python -m agent.compiled`: compile the byte path for this installation, once; prints the folder."""

import sys

from agent.compiled.build import main

if __name__ == "__main__":
    sys.exit(main())
