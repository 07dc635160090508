"""Experiments. A recipe file holds `recipe = Recipe(...)`, or `recipes()` that yields several of different names."""
