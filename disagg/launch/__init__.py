"""Workers as Ray actors: start, scale, restart and reap them. Only this room imports Ray."""
