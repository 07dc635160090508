"""Makes the missing runs of all experiments, and writes RESULTS.md from all rows.

    python experiments/run.py --data CIFAR10 --photographs PHOTOGRAPHS
    python experiments/run.py --data CIFAR10 lars warmup                # some experiments; only printed

It may be stopped at any time, also by force. The same command continues.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness.cli import main
from experiments.studies import lars, norm_decay, progressive, rectangles, scaling, warmup, zero_gamma

STUDIES = (warmup, scaling, lars, zero_gamma, norm_decay, progressive, rectangles)
EXPERIMENTS = [study.EXPERIMENT for study in STUDIES]

if __name__ == "__main__":
    sys.exit(main(EXPERIMENTS))
