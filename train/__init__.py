"""The trainer. Start it with `python -m train RECIPE`, or with `torchrun -m train RECIPE`.

This package knows nothing of `cluster` or `infra`. These parts import without torch: `recipe`, `forecast`, `tools` (but
for `checkpoint_io`), and of `data` the packages `index`, `packing` and `order`.
"""
