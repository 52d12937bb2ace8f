"""Heads of several kinds, recipes and projects, taught the same and measured on the same prompts."""
