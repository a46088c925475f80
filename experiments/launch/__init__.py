"""Sweeps: the cases of an experiment run on this machine or on Slurm, watched, resumed and collected.

The truth is on disk: the trials of a results folder, and beside them `Ledger`'s claims, one file a task and generation.
Whoever looks at them comes to the same conclusion, so a sweep may be killed, started again or run twice at once.
"""
