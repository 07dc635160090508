"""All experiments, what is missing of them, and RESULTS.md from all rows.

    python experiments/run.py --data CIFAR10 --photographs PHOTOGRAPHS

May be stopped at any time, by Ctrl-C or by force; called again it goes on.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness.cli import main
from experiments.studies import lars, norm_decay, progressive, rectangles, scaling, warmup, zero_gamma

EXPERIMENTS = [one.EXPERIMENT for one in (warmup, scaling, lars, zero_gamma, norm_decay, progressive, rectangles)]

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS))
