"""Plots of benchmark results. Needs the extra `disagg[plot]`."""
