"""What papers and records say of their schedules, typed from them, beside what our recipes do: docs/recipes.md."""
