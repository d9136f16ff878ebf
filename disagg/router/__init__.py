"""Which worker computes a prompt, which one decodes it, and what happens when one dies.

Decisions are pure functions of what workers report; `router.py` performs them.
"""
