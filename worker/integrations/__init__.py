"""Hooks for other people's training loops. Neither framework is a dependency: its own module's functions import it."""
