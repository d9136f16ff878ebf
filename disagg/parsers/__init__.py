"""From the text of an answer to its parts: thoughts, content and tool calls.

A model writes all of them into one text, each family in its own way. Knows no tokens, no HTTP.
"""
