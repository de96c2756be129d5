"""Checkpoint layouts of the engines that serve heads: one module a layout, both directions (heads/convert.py)."""
