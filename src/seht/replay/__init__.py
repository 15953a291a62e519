"""A closure as a function that can be run again."""
