"""Formats layer by layer under a budget: what each costs, and what is chosen."""
