"""Prefill here, decode there: the bytes that travel are the bytes attention reads."""

__version__ = "0.1.0"
