"""The terms of a rental: what a launch asks for, what is rented, and what a job may spend."""
