"""Baselines, one file a system."""
