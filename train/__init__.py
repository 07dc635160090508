"""The trainer: `python -m train RECIPE`, also under `torchrun -m train`. It knows nothing of cluster/ or infra/.

Importable without torch: recipe, recipe_file, schedule, files, spawn, and of data
sample, index, pack, verify.
"""
