"""Robot profiles: how a robot's own units map to a policy's.

`profile` holds the data and applies it, `profile_file` reads it from YAML; the other YAML files here are the profiles
of known robots. Knows no model, no normalization and no socket.
"""
