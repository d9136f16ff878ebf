"""The command line. Commands are thin: they parse, call a room, and print.

Data goes to standard output, everything else to standard error. Rooms that import torch, Ray,
transformers or gRPC are imported inside the commands that need them, so that `--help` and a client
of a running service start at once.
"""
