"""The processes of an attempt on one machine: what all kinds have in common, and those of a user's command."""
