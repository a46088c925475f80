"""Figures: one file a figure, each a function from data to a matplotlib `Figure`; `style` is shared.

Every panel says whether its numbers were simulated or measured, and no panel shows both.
"""
