"""Entry point of `python -m train RECIPE --out DIR`.

Without RANK in the environment it starts one process per GPU, or `--procs`. With RANK (torchrun, agent) it is that one.
"""

import os
import sys

from train.engine.main import main
from train.tools.files import use_utf8_names

# libgomp reads this variable when torch is loaded. By default its threads spin 300,000 times at a barrier. Where
# another process wants the same processors, they spin while the thread that they wait for cannot run: steps took 4
# times as long and more (LOG.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


if __name__ == "__main__":
    use_utf8_names()
    sys.exit(main())
