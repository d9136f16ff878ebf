"""What is stored: pages, the layer groups of a plan, the records of a sequence, and the pool.

It knows where every byte lies and who owns it, never what a byte means.
"""
