"""Recipes. A file has `recipe = Recipe(...)`, or a function `recipes()` that yields several with different names."""
