"""`python -m train RECIPE --out DIR`: one process per GPU, or --procs; one of many under torchrun or the agent."""

import os
import sys

from train.engine.main import main

# Read by libgomp when torch is loaded. Its threads would spin 300,000 times at a barrier, and where another process
# wants the same processors they spin while the one they wait for cannot run: steps 4 times slower and more (LOG.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


if __name__ == "__main__":
    sys.exit(main())
