"""The engine room: sequences, and the loop that moves them. It knows no socket and no peer."""
