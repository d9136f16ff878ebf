"""Benchmarks: what is measured, printed as tables or JSON."""
